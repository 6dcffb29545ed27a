"""The nearest orthogonal gradient (NOG) and Muon: one idea, as a treatment of any optimizer and as an optimizer.

A small network learns a random function, with SGD, with SGD under oc.treat (the gradient, or the update with its
momentum, made orthogonal) and with torch.optim.Muon where torch has it. Prints the loss and what each does to a step.
"""

import torch
from torch import nn

import orthocond as oc

STEPS = 150


def network(seed, width=64):
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Linear(20, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()),
        *(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4)),
    )


def hidden(model):
    """The matrices between hidden layers, which Muon is made for."""
    return [model[2].weight, model[4].weight]


def sgd(model, lr, **treatment):
    """All of the model under SGD; the hidden matrices at a rate of their own if they are treated."""
    matrices = hidden(model)
    rest = [p for p in model.parameters() if all(p is not m for m in matrices)]
    groups = [{"params": rest}, {"params": matrices, "lr": lr}]
    optimizer = torch.optim.SGD(groups, lr=0.2, momentum=0.9)
    if treatment:
        oc.treat(matrices, optimizer, **treatment)
    return [optimizer]


def muon(model):
    matrices = hidden(model)
    rest = [p for p in model.parameters() if all(p is not m for m in matrices)]
    settings = {"lr": 0.03, "momentum": 0.9, "nesterov": False, "weight_decay": 0.0}
    return [torch.optim.SGD(rest, lr=0.2, momentum=0.9), torch.optim.Muon(matrices, **settings)]


METHODS = {
    "SGD": lambda model: sgd(model, 0.2),
    "SGD, NOG of the gradient": lambda model: sgd(model, 0.003, gradient=oc.NearestOrthogonal()),
    "SGD, NOG of the update": lambda model: sgd(model, 0.2, gradient=oc.NearestOrthogonal(of="update")),
}
if hasattr(torch.optim, "Muon"):
    METHODS["torch.optim.Muon"] = muon


def train(make):
    """Loss at the end, and singular values of the last update of a hidden matrix, as a ratio."""
    teacher, model = network(1), network(2)
    optimizers = make(model)
    rng = torch.Generator().manual_seed(3)
    for _ in range(STEPS):
        x = torch.randn(128, 20, generator=rng)
        with torch.no_grad():
            target = 3 * teacher(2 * x)
        loss = nn.functional.mse_loss(model(x), target)
        before = hidden(model)[0].detach().clone()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    return float(loss.detach()), oc.singular_spectrum(hidden(model)[0].detach() - before)


def main():
    print(f"{STEPS} steps{'':17s}{'loss':>9s}   singular values of the last update of a hidden matrix, 64 x 64")
    for name, make in METHODS.items():
        loss, update = train(make)
        even = int((update.eigenvalues > update.largest / 2).sum())
        values = f"largest {update.largest.item():.2g}, {even} of 64 at least half as large"
        print(f"{name:26s}{loss:9.4f}   {values}")
    print(
        "\nNOG of the gradient comes before the momentum, which averages over orthogonal matrices. NOG of the update"
        "\nand Muon come after it. NOG leaves out directions without signal; Muon's iteration lifts them in part."
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
