"""Deploy: fold whitening and treated weights into plain convolutions, and export to ONNX.

Prints what was folded, the time of a forward before and after, and the difference of onnxruntime from torch. ONNX has
no eigendecomposition, so the pooling head gets a solver that uses only matrix products for the export.
"""

import argparse
import logging
import time
import warnings
from pathlib import Path

import torch
from torch import nn

import orthocond as oc


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        *(oc.orthogonal(nn.Conv2d(3, 32, 3, bias=False)), oc.DecorrelatedBatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU()),
        *(oc.CovariancePool2d(), nn.Linear(136, 10)),
    )


def milliseconds(model, x):
    with torch.no_grad():
        model(x)
        start = time.perf_counter()
        for _ in range(10):
            model(x)
    return (time.perf_counter() - start) * 100


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("runs/examples/model.onnx"))
    output = parser.parse_args().output
    model = network()
    for _ in range(5):  # training: the statistics have to come from somewhere
        model(torch.randn(32, 3, 32, 32).cumsum(-1))
    model.eval()
    x = torch.randn(8, 3, 32, 32).cumsum(-1)
    deployed = oc.fold(model)
    print(f"{deployed.fold_report}\n")
    print(f"Largest change of an output by folding: {(model(x) - deployed(x)).abs().max().item():.0e}")
    print(f"Forward of 8 images: {milliseconds(model, x):.1f} ms before, {milliseconds(deployed, x):.1f} ms after")
    exact = deployed(x).detach()
    deployed[6].solver = oc.NewtonSchulz(steps=15)
    output.parent.mkdir(parents=True, exist_ok=True)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it would tell of torchvision, which nobody needs here
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of its own internals
        shapes = ({0: torch.export.Dim("batch")},)
        torch.onnx.export(deployed, (x,), output, dynamo=True, dynamic_shapes=shapes, verbose=False)
    import onnxruntime

    session = onnxruntime.InferenceSession(output, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    for count in (8, 3):
        (found,) = session.run(None, {name: x[:count].numpy()})
        difference = (torch.from_numpy(found) - exact[:count]).abs().max() / exact.abs().max()
        print(f"onnxruntime, {count} images: relative difference {difference:.0e}")
    print(f"\nThe model is {output.resolve()} ({output.stat().st_size / 1000:.0f} kB)")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
