"""Diagnose a model: which layers are ill-conditioned, and the lines that help.

Prints the table and the advice for a network whose first convolution feeds a whitening layer, does what the advice
says, and prints the condition numbers before and after.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import orthocond as oc


def network():
    model = nn.Sequential()
    model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    model.bn1 = oc.DecorrelatedBatchNorm2d(64)
    model.head = nn.Sequential(nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, 10))
    return model


def images_and_labels():
    """Smooth pictures: neighboring pixels and colors agree, as in photographs."""
    images = F.avg_pool2d(torch.randn(128, 3, 22, 22), 7, 1) * 5
    return images.mean(1, keepdim=True) + 0.2 * images, torch.randint(10, (128,))


def main():
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(*images_and_labels()), batch_size=128)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = oc.diagnose(model, loader, F.cross_entropy)
    print(before)
    lines = [advice.code for row in before.rows for advice in row.advice if advice.code]
    for line in lines:  # what you would paste into your script
        exec(line, {"model": model, "loader": loader, "optimizer": optimizer, "oc": oc})
    after = oc.diagnose(model, loader, F.cross_entropy)
    print("\nAfter these lines:\n")
    for name in ("conv1", "bn1"):
        one, other = before[name], after[name]
        print(
            f"{name:6s} rank {one.rank} of {one.size} → {other.rank} of {other.size},  "
            f"κ on the range {one.condition_on_range:.3g} → {other.condition_on_range:.3g}"
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
