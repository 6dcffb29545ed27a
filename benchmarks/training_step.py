"""What SVD layer and treatments add to a training step: `python benchmarks/training_step.py --output FILE`.

ResNet-18 and ResNet-50 with the stem for small images, one step of SGD with momentum and weight decay on random
images, one thread. The paper's setting: whitening after the first convolution, treatments of that convolution. All
contenders share the rest of the network and take turns; ratios are formed within each round.

A whole step repeats itself to a few percent only, which hides the treatments. So the stem, in which alone the
contenders differ, is timed by itself too (forward, backward, optimizer's step), and what it takes more is given as a
share of the whole step. Bounds are checked on that share; where one is exceeded, the operations that take more time
are listed.
"""

from functools import partial

import torch
from common import arguments, peak_memory, save
from paired import percent, quartiles, ratios, take_turns
from torch import nn
from torch.nn import functional as F

from orthocond.lab.classification.networks.resnet import resnet18, resnet50
from orthocond.layers import DecorrelatedBatchNorm2d
from orthocond.monitor import ConditionMonitor
from orthocond.steps import NearestOrthogonal, OptimalLR, treat
from orthocond.weights import orthogonal

ROUNDS = 14
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


def stepper(rest, images, backward, norm, orthogonal_weight=False, settings=None, monitored=False):
    """A function that makes one training step of a stem and the parameters ``rest``."""
    conv = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    stem = nn.Sequential(orthogonal(conv) if orthogonal_weight else conv, norm(64))
    optimizer = torch.optim.SGD([*stem.parameters(), *rest], lr=1e-3, momentum=0.9, weight_decay=5e-4)
    if settings:
        treat(conv, optimizer, **settings)
    monitor = ConditionMonitor(stem, pre_svd={"1": "0"}) if monitored else None

    def step():
        backward(stem(images))
        optimizer.step()
        optimizer.zero_grad()

    def monitored_step():
        with monitor:
            step()
        return monitor.history

    return step if monitor is None else monitored_step


def contenders(*parts):
    result = {"BN": stepper(*parts, nn.BatchNorm2d)}
    return result | {name: stepper(*parts, DecorrelatedBatchNorm2d, *settings) for name, settings in TREATED.items()}


def difference_of_profiles(run, base, count=6, repetitions=20):
    """Milliseconds that operations take more of the processor's own time in ``run`` than in ``base``."""
    totals = []
    for function in (run, base):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for _ in range(repetitions):
                function()
        averages = profile.key_averages()
        totals.append({event.key: event.self_cpu_time_total / 1e3 / repetitions for event in averages})
    more = {name: time - totals[1].get(name, 0.0) for name, time in totals[0].items()}
    return dict(sorted(more.items(), key=lambda item: -item[1])[:count])


def report(title, make, batch, seconds):
    model = make(100, stem="cifar").train()
    model.conv1 = model.bn1 = nn.Identity()
    images, labels = torch.randn(batch, 3, 32, 32).cumsum(-1), torch.randint(100, (batch,))
    gradient = torch.randn(batch, 64, 32, 32) / images.numel()
    whole = contenders(list(model.parameters()), images, lambda y: F.cross_entropy(model(y), labels).backward())
    stems = contenders([], images, partial(torch.autograd.backward, grad_tensors=gradient))
    times = take_turns(whole, ROUNDS, seconds)
    stem_times = take_turns(stems, ROUNDS, seconds)
    print(f"\n{title}, batch {batch}: what a step takes more, by the processor's clock")
    rows = {}
    for name, run in whole.items():
        row = {"step_ms": _clocks(times[name]), "stem_ms": _clocks(stem_times[name]), "peak_bytes": peak_memory(run)}
        rows[name] = row
        line = f"  {name:31s} {row['step_ms']['processor']['median']:6.0f} ms {row['peak_bytes'] / 2**20:5.0f} MB"
        for base in ("BN", SVD):
            if base in rows and base != name:
                over = row[f"over {base}"] = ratios(times, name, base)
                over["by_stem"] = added(stem_times, times, name, base)
                line += f"   over {base} {percent(over['by_stem'])}, whole step {percent(over['processor'])}"
        print(line)
    return {"title": title, "batch": batch, "contenders": rows, "exceeded": check(rows, stems)}


def _clocks(times):
    return {clock: quartiles(values) for clock, values in times.items()}


def added(stem_times, times, name, base):
    """1 + what the stem takes more in a round, as a share of the median step of the base."""
    step = quartiles(times[base]["processor"])["median"]
    pairs = zip(stem_times[name]["processor"], stem_times[base]["processor"], strict=True)
    return quartiles([1 + (a - b) / step for a, b in pairs])


def check(rows, stems):
    exceeded = {}
    for (name, base), bound in BOUNDS.items():
        found = rows[name][f"over {base}"]["by_stem"]["median"]
        if found > bound:
            more = difference_of_profiles(stems[name], stems[base])
            exceeded[f"{name} over {base}"] = {"bound": bound, "found": found, "more_ms": more}
            print(f"  {name} over {base}: {100 * (found - 1):.1f} %, above {100 * (bound - 1):.0f} %. More time is in")
            for operation, ms in more.items():
                print(f"    {ms:7.2f} ms  {operation}")
    return exceeded


if __name__ == "__main__":
    options = arguments(__doc__)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    cases = [("ResNet-18", resnet18, 16), ("ResNet-50", resnet50, 8)]
    save(options.output, [report(*case, options.seconds) for case in cases])
