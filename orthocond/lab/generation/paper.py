"""The numbers that the paper prints of GANs, single trainings, for the tables that stand beside them."""

from orthocond.lab.tables.table import Number


def _numbers(text: str) -> dict[str, Number]:
    """Numbers from ``method value`` pairs."""
    words = text.split()
    return {name: Number(float(value)) for name, value in zip(words[::2], words[1::2], strict=True)}


# EigenGAN: FID, and VP in percent. Its own orthogonality loss is the baseline, and is off where NOG or OLR is on.
EIGEN_ANIMEFACE = {
    "fid": _numbers("ol 23.59 nog 19.48 olr 18.30 nog+olr 16.31"),
    "vp": _numbers("ol 37.01 nog 43.53 olr 43.99 nog+olr 45.48"),
}
EIGEN_FFHQ = {
    "fid": _numbers("ol 36.81 nog 33.34 olr 31.42 nog+olr 30.06"),
    "vp": _numbers("ol 31.79 nog 37.27 olr 37.23 nog+olr 39.32"),
}

# Vanilla GAN: FID, VP in percent, condition number of the first projection; the paper has no row without treatment.
CELEBA = {
    "fid": _numbers("orojar 32.43 hp 31.65 lvp 34.36 nog 29.69 olr 33.29 nog+olr 30.65"),
    "vp": _numbers("orojar 24.24 hp 24.67 lvp 23.49 nog 25.33 olr 27.22 nog+olr 28.74"),
    "condition": _numbers("orojar 2.75 hp 2.67 lvp 2.78 nog 2.28 olr 2.14 nog+olr 2.01"),
}
CHURCH = {
    "fid": _numbers("orojar 38.96 hp 39.20 lvp 41.24 nog 37.22 olr 37.83 nog+olr 35.20"),
    "vp": _numbers("orojar 11.62 hp 13.73 lvp 12.58 nog 13.43 olr 14.50 nog+olr 16.98"),
    "condition": _numbers("orojar 2.48 hp 2.57 lvp 2.66 nog 2.13 olr 2.09 nog+olr 1.93"),
}
MILLISECONDS = {"orojar": 23, "hp": 30, "lvp": 16, "nog": 8, "olr": 8, "nog+olr": 9}
"""Times of one forward and one backward pass."""
