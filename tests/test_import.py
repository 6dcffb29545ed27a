"""Importing the package: nothing is loaded before it is asked for, and everything is there when it is."""

import inspect
import pkgutil
import subprocess
import sys

import pytest

import orthocond
from orthocond.lab import data, runs


def test_the_package_costs_nothing_until_it_is_used():
    program = "import sys; import orthocond; assert not {'torch', 'numpy'} & set(sys.modules); orthocond.polar"
    program += "; assert 'torch' in sys.modules; assert 'orthocond.gans' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("package", [orthocond, data, runs])
def test_every_public_name_is_there(package):
    for name in package.__all__:
        assert getattr(package, name) is not None
    assert len(set(package.__all__)) == len(package.__all__)


def test_modules_of_the_library_are_attributes():
    program = "import orthocond; orthocond.steps.treat, orthocond.matrix.polar, orthocond.directions, orthocond.folding"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_names_are_listed_and_others_are_errors():
    assert {"polar", "treat", "gans", "__version__"} <= set(dir(orthocond))
    with pytest.raises(AttributeError, match="module 'orthocond' has no attribute 'polr'"):
        orthocond.polr  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'polr'"):
        from orthocond import polr  # noqa: F401


@pytest.mark.parametrize("package", [orthocond, data, runs])
def test_no_name_is_that_of_a_module(package):
    """A function and a module of one name would take turns, by the order of imports."""
    modules = {module.name for module in pkgutil.iter_modules(package.__path__)}
    assert all(inspect.ismodule(getattr(package, name)) for name in modules & set(package.__all__))
