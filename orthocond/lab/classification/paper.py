"""The numbers that the paper prints, for the tables that stand beside them."""

from orthocond.lab.tables.table import Number

RUNS = 10
"""Trainings behind each mean of decorrelated batch normalization; those of covariance pooling are single."""


# Validation errors in percent, by the method's name.
RESNET50_CIFAR10 = {
    "svd": Number(4.35, 0.09, 4.17),
    "sn": Number(4.31, 0.10, 4.15),
    "ol": Number(4.28, 0.07, 4.23),
    "ow": Number(4.42, 0.09, 4.28),
    "nog": Number(4.15, 0.06, 4.04),
    "olr": Number(4.23, 0.17, 3.98),
    "nog+ow": Number(4.09, 0.07, 4.01),
    "nog+ow+olr": Number(3.93, 0.09, 3.85),
    "ns": Number(4.20, 0.11, 4.11),
}
RESNET50_CIFAR100 = {
    "svd": Number(19.99, 0.16, 19.80),
    "sn": Number(19.94, 0.33, 19.60),
    "ol": Number(19.73, 0.28, 19.54),
    "ow": Number(20.06, 0.17, 19.94),
    "nog": Number(19.43, 0.24, 19.15),
    "olr": Number(19.50, 0.39, 18.95),
    "nog+sn": Number(19.43, 0.21, 19.20),
    "nog+ol": Number(20.14, 0.39, 19.54),
    "nog+ow": Number(19.22, 0.28, 18.90),
    "nog+olr": Number(19.77, 0.27, 19.36),
    "ow+olr": Number(20.61, 0.22, 20.43),
    "nog+ow+olr": Number(19.05, 0.31, 18.77),
    "ns": Number(19.45, 0.33, 19.01),
}
DENSENET121_CIFAR100 = {
    "svd": Number(27.37, 0.54, 26.88),
    "sn": Number(27.05, 0.44, 26.51),
    "ol": Number(27.41, 0.35, 26.99),
    "ow": Number(27.25, 0.47, 26.67),
    "nog": Number(25.14, 0.39, 24.65),
    "olr": Number(25.34, 0.28, 25.01),
    "nog+ow": Number(24.49, 0.43, 23.97),
    "nog+ow+olr": Number(23.74, 0.24, 23.41),
    "ns": Number(25.87, 0.43, 25.31),
}
MOBILENETV2_CIFAR100 = {
    "svd": Number(34.35, 0.32, 34.00),
    "sn": Number(34.19, 0.37, 33.82),
    "ol": Number(34.58, 0.43, 34.15),
    "ow": Number(34.27, 0.46, 33.77),
    "nog": Number(33.42, 0.41, 32.91),
    "olr": Number(33.59, 0.64, 32.84),
    "nog+ow": Number(33.13, 0.55, 32.61),
    "nog+ow+olr": Number(32.83, 0.48, 32.33),
    "ns": Number(33.67, 0.51, 33.24),
}

# Covariance pooling, ResNet-18 on ImageNet: accuracies in percent, and decompositions that did not converge.
GCP_TOP1 = {
    "svd": Number(73.13),
    "sn": Number(73.28),
    "ol": Number(71.75),
    "ow": Number(73.07),
    "nog": Number(73.51),
    "olr": Number(73.39),
    "nog+ow": Number(73.71),
    "nog+ow+olr": Number(73.82),
    "ns": Number(73.36),
}
GCP_TOP5 = {
    "svd": Number(91.02),
    "sn": Number(91.11),
    "ol": Number(90.20),
    "ow": Number(90.93),
    "nog": Number(91.35),
    "olr": Number(91.26),
    "nog+ow": Number(91.43),
    "nog+ow+olr": Number(91.57),
    "ns": Number(90.96),
}
GCP_FAILURES = {"svd": 5, "sn": 2, "ol": 1, "ow": 2, "nog": 1, "olr": 0, "nog+ow": 0, "nog+ow+olr": 0, "ns": 0}

# Condition numbers that the text names, as it names them: some of covariance pooling only by how much lower they are.
DBN_CONDITION = {"bn": "1e3", "svd": "1e12", "ns": "1e5", "sn": "1e5", "ow": "1e3", "nog": "1e6", "olr": "1e4"}
GCP_CONDITION = {
    "svd": "1e16",
    "ns": "1e15",
    "ow": "1e15 lower",
    "olr": "1e15 lower",
    "nog": "2e15 lower",
    "nog+ow+olr": "5e15 lower",
}

PAPER_RATE = 5 / 77e6
"""Failures of a decomposition of covariance pooling: 5 in 60 epochs of 1.28 million images, one decomposition each."""

# Milliseconds of a forward and a backward pass, ResNet-50 on CIFAR-100, RTX A6000; bn is the ordinary ResNet-50.
MILLISECONDS = {
    "bn": (42.0, 90.0),
    "svd": (44.0, 95.0),
    "ns": (43.0, 93.0),
    "nog": (44.0, 97.0),
    "olr": (44.0, 96.0),
    "ow": (48.0, 102.0),
    "nog+ow+olr": (49.0, 106.0),
}
