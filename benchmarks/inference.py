"""Inference with and without folding: `python benchmarks/inference.py --output FILE`.

ResNet-18 with the stem for small images, float32, one thread. A network with whitening and an orthogonal weight in its
stem, folded, is to take the time of the plain network with its batch normalizations folded: both are the same
convolutions. Ratios are formed within each round.
"""

import torch
from common import arguments, save
from paired import percent, quartiles, ratios, take_turns
from torch import nn

from orthocond.folding import fold
from orthocond.lab.classification.networks.resnet import resnet18
from orthocond.layers import DecorrelatedBatchNorm2d
from orthocond.weights import orthogonal

BASE = "batch norm, folded"


def networks():
    """The two networks, after a training forward that gives them statistics."""
    plain = resnet18(100, stem="cifar", stem_norm=nn.BatchNorm2d)
    whitened = resnet18(100, stem="cifar", stem_norm=DecorrelatedBatchNorm2d)
    orthogonal(whitened.conv1)
    for model in (plain, whitened):
        with torch.no_grad():
            model.train()(torch.randn(16, 3, 32, 32).cumsum(-1))
        model.eval()
    return plain, whitened


def inference(model, x):
    def run():
        with torch.inference_mode():
            model(x)

    return run


def report(batch, seconds):
    plain, whitened = networks()
    x = torch.randn(batch, 3, 32, 32).cumsum(-1)
    models = {"batch norm": plain, BASE: fold(plain, x), "whitening": whitened, "whitening, folded": fold(whitened, x)}
    times = take_turns({name: inference(model, x) for name, model in models.items()}, 20, seconds)
    print(f"\nResNet-18, batch {batch}: time over that of {BASE}, by the processor's clock and the wall's")
    rows = {}
    for name in models:
        rows[name] = {"ms": {clock: quartiles(values) for clock, values in times[name].items()}}
        rows[name]["over"] = over = ratios(times, name, BASE)
        milliseconds = rows[name]["ms"]["processor"]["median"]
        print(f"  {name:20s} {milliseconds:7.1f} ms   {percent(over['processor'])}   {percent(over['wall'])}")
    return {"title": "ResNet-18", "batch": batch, "contenders": rows}


if __name__ == "__main__":
    options = arguments(__doc__)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    save(options.output, [report(batch, 4 * options.seconds) for batch in (1, 16)])
