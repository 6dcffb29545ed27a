"""Every row of every table at the paper's scale: two real steps of its network, on sprites of the right size.

They take half an hour on one core: ``make test-paper-scale``.
"""

import gc
import json
from dataclasses import replace

import pytest
import torch

from orthocond.lab import catalog, experiments
from orthocond.lab.bench import Stepper
from orthocond.lab.config import change
from orthocond.lab.runs import Run
from orthocond.lab.runs.finding import name_of
from orthocond.lab.tables.records import read_run
from orthocond.lab.tables.table import Material

pytestmark = pytest.mark.slow

_SETTINGS = {"data.source": "sprites", "data.limit": 16, "data.held_out": 8, "data.validation": 0, "log_every": 1}
_STEPS = {"schedule.steps": 2, "schedule.batch_size": 4}
_trained = {}


def _needed(name):
    return catalog.TABLES[name].configs("paper", 1)


def _named(kind):
    names = [name for name in catalog.names() if name != "paper-scale"]  # which is the same, with more images
    return [name for name in names if (configs := _needed(name)) and configs[0].kind == kind]


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _record(config, folder):
    """What two steps and the evaluation leave, as the record of the configuration itself."""
    if config not in _trained:
        short = change(config, _SETTINGS | _STEPS)
        run = Run.create(folder, "run", short)
        assert experiments.train(short, run) == 0, name_of(config)
        _trained[config] = replace(read_run(run, short), config=config, path=None)
        gc.collect()  # networks and their hooks are cycles of a gigabyte
    return _trained[config]


@pytest.mark.parametrize("name", _named("classification"))
def test_classifiers_train_are_evaluated_and_tabled(name, tmp_path):
    configs = _needed(name)
    records = {config: _record(config, tmp_path / "runs") for config in configs}
    for config, record in records.items():
        assert record.finished, name_of(config)
        assert len(record.series("loss")[1]) == 2, name_of(config)
        assert record.evaluation is not None, name_of(config)
    catalog.TABLES[name].write(tmp_path, Material("paper", 1, records))
    content = json.loads((tmp_path / "table.json").read_text())
    assert content["table"] == name
    assert "Missing" not in (tmp_path / "table.md").read_text()


@pytest.mark.parametrize("name", _named("generation"))
def test_generators_make_two_steps(name, tmp_path):
    for config in _needed(name):
        if config not in _trained:
            short = change(config, {"schedule.batch_size": 2})
            stepper = Stepper(experiments.task_of(short), short, Run.create(tmp_path, "run", short))
            assert stepper.time(2), name_of(config)
            assert all(bool(p.isfinite().all()) for p in stepper.task.module.parameters()), name_of(config)
            _trained[config] = True
            del stepper
            gc.collect()
