"""What SVD layer and treatments add to a training step: `python benchmarks/training_step.py --output FILE`.

ResNet-18 and ResNet-50 with the stem for small images, one step of SGD with momentum and weight decay on random
images, one thread. The paper's setting: whitening after the first convolution, treatments of that convolution. All
contenders share the rest of the network and take turns; ratios are formed within each round. Where a bound is
exceeded, the operations are listed that take more time than in the step it is compared to.
"""

from functools import partial

import torch
from common import arguments, peak_memory, save
from paired import percent, quartiles, ratios, take_turns
from torch import nn
from torch.nn import functional as F

from orthocond.lab.backbones import resnet18, resnet50
from orthocond.layers import DecorrelatedBatchNorm2d
from orthocond.monitor import ConditionMonitor
from orthocond.steps import NearestOrthogonal, OptimalLR, treat
from orthocond.weights import orthogonal

ROUNDS = 15
SVD = "SVD"
# name: (orthogonal weight, treatments of the step, monitor)
TREATED = {
    SVD: (False, {}, False),
    "SVD + NOG": (False, {"gradient": NearestOrthogonal()}, False),
    "SVD + OLR": (False, {"lr": OptimalLR()}, False),
    "SVD + OLR (paper)": (False, {"lr": OptimalLR("paper")}, False),
    "SVD + OW": (True, {}, False),
    "SVD + NOG + OW + OLR": (True, {"gradient": NearestOrthogonal(), "lr": OptimalLR()}, False),
    "SVD + NOG + OW + OLR + monitor": (True, {"gradient": NearestOrthogonal(), "lr": OptimalLR()}, True),
}
# (contender, base): largest ratio
BOUNDS = {
    (SVD, "BN"): 1.05,
    ("SVD + NOG", SVD): 1.01,
    ("SVD + OLR", SVD): 1.01,
    ("SVD + OLR (paper)", SVD): 1.01,
    ("SVD + NOG + OW + OLR", SVD): 1.03,
}


def stepper(model, images, labels, norm, orthogonal_weight=False, settings=None, monitored=False):
    """A function that makes one training step of the model with a stem of its own."""
    conv, bn = nn.Conv2d(3, 64, 3, padding=1, bias=False), norm(64)
    model.conv1, model.bn1 = conv, bn
    if orthogonal_weight:
        orthogonal(conv)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=5e-4)
    if settings:
        treat(conv, optimizer, **settings)
    monitor = ConditionMonitor(model, pre_svd={"bn1": "conv1"}) if monitored else None

    def step():
        model.conv1, model.bn1 = conv, bn
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    def monitored_step():
        with monitor:
            step()

    return step if monitor is None else monitored_step


def difference_of_profiles(run, base, count=6):
    """The operations that take more of the processor's own time in one call of ``run`` than of ``base``."""
    totals = []
    for function in (run, base):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for _ in range(3):
                function()
        totals.append({event.key: event.self_cpu_time_total / 3e3 for event in profile.key_averages()})
    more = {name: time - totals[1].get(name, 0.0) for name, time in totals[0].items()}
    return dict(sorted(more.items(), key=lambda item: -item[1])[:count])


def report(title, make, batch, seconds):
    model = make(100, stem="cifar").train()
    images, labels = torch.randn(batch, 3, 32, 32).cumsum(-1), torch.randint(100, (batch,))
    build = partial(stepper, model, images, labels)
    contenders = {"BN": build(nn.BatchNorm2d)}
    contenders |= {name: build(DecorrelatedBatchNorm2d, *settings) for name, settings in TREATED.items()}
    times = take_turns(contenders, ROUNDS, seconds)
    print(f"\n{title}, batch {batch}: time of a step by the processor's clock, and by the wall's")
    rows = {}
    for name in contenders:
        row = {"ms": {clock: quartiles(values) for clock, values in times[name].items()}}
        row["peak_bytes"] = peak_memory(contenders[name])
        row["over"] = {base: ratios(times, name, base) for base in ("BN", SVD) if base != name}
        rows[name] = row
        over = "".join(
            f"   over {base} {percent(r['processor'])}, wall {percent(r['wall'])}" for base, r in row["over"].items()
        )
        print(f"  {name:31s} {row['ms']['processor']['median']:6.0f} ms {row['peak_bytes'] / 2**20:5.0f} MB{over}")
    exceeded = {}
    for (name, base), bound in BOUNDS.items():
        found = rows[name]["over"][base]["processor"]["median"]
        if found > bound:
            more = difference_of_profiles(contenders[name], contenders[base])
            exceeded[f"{name} over {base}"] = {"bound": bound, "found": found, "more_ms": more}
            print(f"  {name} over {base}: {100 * (found - 1):.1f} %, above {100 * (bound - 1):.0f} %. More time is in")
            for operation, ms in more.items():
                print(f"    {ms:7.2f} ms  {operation}")
    return {"title": title, "batch": batch, "contenders": rows, "exceeded": exceeded}


if __name__ == "__main__":
    options = arguments(__doc__)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    cases = [("ResNet-18", resnet18, 16), ("ResNet-50", resnet50, 8)]
    save(options.output, [report(*case, options.seconds) for case in cases])
