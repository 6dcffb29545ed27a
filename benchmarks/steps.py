"""Cost of NOG and OLR for each optimizer step: `python benchmarks/steps.py --output FILE`.

One optimizer step (SGD with momentum and weight decay) with and without treatments: of one 64 x 27 stem, and of all
convolutions and the classifier of a ResNet-18 for small images. Beside it the same gradients made orthogonal by others
(those of pytorch-optimizer if it is installed). GeoTorch makes no given matrix orthogonal: see weights.py.
"""

import torch
from common import arguments, report, save
from torch.optim._muon import _zeropower_via_newtonschulz

from orthocond.matrix import polar
from orthocond.matrix.even_root import even_inverse_root, symmetric_product
from orthocond.steps import NearestOrthogonal, OptimalLR, Stiefel, treat

VARIANTS = {
    "plain": None,
    "NOG": {"gradient": NearestOrthogonal()},
    "NOG of the update": {"gradient": NearestOrthogonal(of="update")},
    "OLR, exact": {"lr": OptimalLR()},
    "OLR, newton": {"lr": OptimalLR("newton")},
    "OLR, paper": {"lr": OptimalLR("paper")},
    "Stiefel": {"manifold": Stiefel()},
    "NOG and OLR": {"gradient": NearestOrthogonal(), "lr": OptimalLR()},
}


def resnet18():
    shapes = [(64, 3, 3, 3), *[(64, 64, 3, 3)] * 4]
    for width in (128, 256, 512):
        shapes += [(width, width // 2, 3, 3), *[(width, width, 3, 3)] * 3, (width, width // 2, 1, 1)]
    return [*shapes, (100, 512)]


ILL = "NOG, gradients of condition number 1e3"


def conditioned(g):
    """The gradient with singular values from 1 to 1e-3, evenly spaced in their logarithm."""
    u, s, v = torch.linalg.svd(g.flatten(1), full_matrices=False)
    return (u * torch.logspace(0, -3, len(s)) @ v).reshape(g.shape)


def stepper(shapes, settings, ill=False):
    """A function that makes one step from the same gradients, as NOG of an orthogonal gradient would be quicker."""
    weights = [torch.nn.Parameter(torch.randn(s) / s[0] ** 0.5) for s in shapes]
    gradients = [torch.randn_like(w) for w in weights]
    if ill:
        gradients = [conditioned(g) for g in gradients]
    optimizer = torch.optim.SGD(weights, lr=1e-3, momentum=0.9, weight_decay=5e-4)
    if settings is not None:
        treat(weights, optimizer, spectrum_every=0, **settings)

    def step():
        for w, gradient in zip(weights, gradients, strict=True):
            w.grad = gradient.clone()
        optimizer.step()

    return step


def rivals(shapes):
    """The same gradients made orthogonal by others, and what no method of a Gram matrix can do without."""
    gradients = [torch.randn(s).flatten(1) for s in shapes]
    grams = [g @ g.mT if len(g) <= len(g.mT) else g.mT @ g for g in gradients]
    results = [torch.empty_like(g) for g in gradients]

    def all_of(function):
        return lambda: [function(g) for g in gradients]

    found = {
        "polar, one by one": all_of(polar),
        "Gram matrices alone": all_of(lambda g: g @ g.mT if len(g) <= len(g.mT) else g.mT @ g),
        "Gram matrices alone, one half": all_of(
            lambda g: symmetric_product(*((g, g.mT)[:: -1 if len(g) > len(g.mT) else 1]))
        ),
        "products with the root alone": lambda: [
            torch.mm(a, g, out=y) if len(a) == len(g) else torch.mm(g, a, out=y)
            for a, g, y in zip(grams, gradients, results, strict=True)
        ],
        "eigendecompositions alone": lambda: [torch.linalg.eigh(a) for a in grams],
        "roots by a polynomial where it does": lambda: [even_inverse_root(a) for a in grams],
        "thin SVD": all_of(lambda g: torch.linalg.svd(g, full_matrices=False)),
        "iteration of torch.optim.Muon, bfloat16": all_of(
            lambda g: _zeropower_via_newtonschulz(g, (3.4445, -4.775, 2.0315), 5, 1e-7)
        ),
    }
    try:
        from pytorch_optimizer.optimizer.utils import zero_power_via_newton_schulz_5 as theirs
    except ImportError:
        print("pytorch-optimizer is not installed: left out")
    else:
        found["iteration of pytorch-optimizer, bfloat16"] = all_of(theirs)
        found["iteration of pytorch-optimizer, float32"] = all_of(lambda g: theirs(g, dtype=torch.float32))
    return found


def case(title, shapes, seconds):
    entries = sum(torch.Size(s).numel() for s in shapes)
    contenders = {name: stepper(shapes, settings) for name, settings in VARIANTS.items()}
    contenders |= {ILL: stepper(shapes, VARIANTS["NOG"], ill=True)} | rivals(shapes)
    return report(f"one step of {title}: {len(shapes)} weights, {entries:,} entries", contenders, seconds, "plain")


if __name__ == "__main__":
    options = arguments(__doc__)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    cases = {"a stem, 64 x 27": [(64, 3, 3, 3)], "all of ResNet-18": resnet18()}
    save(options.output, [case(title, shapes, options.seconds) for title, shapes in cases.items()])
