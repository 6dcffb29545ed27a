"""A Lightning loop: whitening, treated steps and the condition number in the log.

`treat` is one line in configure_optimizers, where the optimizer is created. Gradients that Lightning clips are clipped
before it. The monitor starts and stops with the fit, and what it records goes through `self.log`. Needs
`pip install lightning`.
"""

import logging
import warnings

import lightning
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import orthocond as oc


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = oc.DecorrelatedBatchNorm2d(16)
        self.head = nn.Sequential(nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 4))
        self.monitor = oc.ConditionMonitor(self)

    def forward(self, images):
        return self.head(self.bn1(self.conv1(images)))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        self.treatment = oc.treat(self.conv1, optimizer, gradient=oc.NearestOrthogonal(), lr=oc.OptimalLR())
        return optimizer

    def on_train_start(self):
        self.monitor.start()

    def training_step(self, batch, index):
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("loss", loss)
        if self.monitor.history:
            self.log("condition", self.monitor.history[-1]["condition"])
        return loss

    def on_train_end(self):
        self.monitor.stop()


def loader():
    """A bright quarter on smooth noise: which one?"""
    rng = torch.Generator().manual_seed(0)
    labels = torch.randint(4, (512,), generator=rng)
    images = F.avg_pool2d(torch.randn(512, 3, 20, 20, generator=rng), 5, 1) * 3
    for image, label in zip(images, labels.tolist(), strict=True):
        row, column = 8 * (label // 2), 8 * (label % 2)
        image[:, row : row + 8, column : column + 8] += 0.8
    return DataLoader(TensorDataset(images, labels), batch_size=64, shuffle=True, generator=rng)


def main():
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")  # Lightning's advice on workers and versions
    torch.manual_seed(0)
    model = Classifier()
    trainer = lightning.Trainer(
        max_epochs=4,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader())
    kappa = model.monitor.history.columns("bn1")["condition"]
    images, labels = next(iter(loader()))
    with torch.no_grad():
        accuracy = (model.eval()(images).argmax(1) == labels).float().mean()
    steps = model.treatment.statistics[0].steps
    print(f"{steps} treated steps, κ from {kappa[0]:.0f} to {kappa[-1]:.0f}, accuracy {accuracy:.0%}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
