"""Bars in a terminal, lines elsewhere."""

import io
import threading

import pytest
from lab_helpers import TINY, run_of, train
from rich.console import Console

from orthocond.lab import display as module
from orthocond.lab.display import Display, is_plain
from orthocond.lab.progress import Progress


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=200)


def test_lines_have_rate_remaining_time_and_the_numbers_that_are_known(clock, console):
    with Display(["nog"], plain=True, console=console) as display:
        for step in range(1, 101):
            display(0, Progress(step, 100, {"loss": 1 / step, "error": None if step < 60 else 12.345}))
            clock[0] += 0.5
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[0] == "nog: step 10 of 100, 2.0 steps/s, 45 s left, loss 0.1"
    assert lines[-1] == "nog: step 100 of 100, 2.0 steps/s, 0 s left, loss 0.01, error 12.3"


def test_a_notebook_gets_lines_of_text(clock, capsys, monkeypatch):
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("rich.jupyter.display", lambda *_: pytest.fail("rich shows blocks of HTML"))
    with Display(["nog"]) as display:
        for step in (5, 10):
            display(0, Progress(step, 10, {"loss": 0.5}))
            clock[0] += 1
    assert capsys.readouterr().out.splitlines() == [
        "nog: step 5 of 10, loss 0.5",
        "nog: step 10 of 10, 5.0 steps/s, 0 s left, loss 0.5",
    ]


@pytest.mark.parametrize("notebook", [True, False])
def test_a_training_from_python_shows_where_it_stands_in_a_notebook_alone(tmp_path, capsys, monkeypatch, notebook):
    monkeypatch.setattr("rich.console._is_jupyter", lambda: notebook)
    train(TINY, run_of(tmp_path, TINY))
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(",")[0] for line in lines[-1:]] == ["dbn-sprites-small-svd-seed0: step 10 of 10"] * notebook


def test_slow_trainings_have_a_line_every_half_minute(clock, console):
    with Display(["svd"], plain=True, console=console) as display:
        for step in range(1, 10):
            display(0, Progress(step, 1000, {}))
            clock[0] += 16
    assert [line.split()[2] for line in console.file.getvalue().splitlines()] == ["3", "5", "7", "9"]


def test_a_resumed_training_was_not_that_fast(clock, console):
    with Display(["svd"], plain=True, console=console) as display:
        display(0, Progress(900, 1000, {}))
        clock[0] += 100
        display(0, Progress(1000, 1000, {}))
    assert "1.0 steps/s" in console.file.getvalue().splitlines()[-1]


@pytest.mark.parametrize("plain", [True, False])
def test_stages_of_an_evaluation_have_their_own_steps(clock, plain):
    console = Console(file=io.StringIO(), width=200, force_terminal=not plain, color_system=None)
    with Display(["nog"], plain=plain, console=console) as display:
        display(0, Progress(100, 100, {"loss": 0.5}))
        display(0, Progress(0, 1, {}, "condition of the weights"))
        for epoch in range(0, 31, 10):
            display(0, Progress(epoch, 30, {}, "predictability of axes"))
            clock[0] += 5
    text = console.file.getvalue()
    assert "nog: predictability of axes" in text
    if plain:
        lines = ["nog: condition of the weights", "nog: predictability of axes"]
        assert text.splitlines()[1:3] == lines
        assert text.splitlines()[-1] == "nog: predictability of axes: step 30 of 30, 2.0 steps/s, 0 s left"
    else:
        assert "30/30" in text


def test_quiet_prints_nothing(console):
    with Display(["svd"], quiet=True, console=console) as display:
        display(0, Progress(1, 1, {}))
    assert console.file.getvalue() == ""


@pytest.mark.parametrize(
    ("terminal", "variables", "plain"),
    [
        (True, {}, False),
        (False, {}, True),
        (True, {"CI": "true"}, True),
        (True, {"NO_COLOR": "1"}, True),
        (True, {"JPY_PARENT_PID": "7"}, True),
    ],
)
def test_plain_without_a_terminal_in_ci_without_color_and_in_a_cell(terminal, variables, plain, monkeypatch):
    for name in ("CI", "NO_COLOR", "JPY_PARENT_PID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert is_plain(Console(file=io.StringIO(), force_terminal=terminal)) is plain


@pytest.mark.parametrize("count", [1, 3, 12])
def test_bars_from_several_threads(count, monkeypatch):
    for name in ("CI", "NO_COLOR", "JPY_PARENT_PID"):
        monkeypatch.delenv(name, raising=False)
    console = Console(file=io.StringIO(), force_terminal=True, width=160)
    names = [f"method{i}" for i in range(count)]
    with Display(names, console=console) as display:

        def work(index):
            for step in range(1, 6):
                display(index, Progress(step, 5, {"loss": 0.25}))

        threads = [threading.Thread(target=work, args=(index,)) for index in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        bars = {task.description: task for task in display._bars.tasks}
    assert all(bars[name].completed == 5 for name in names)
    assert all(bars[name].visible == (count <= 8) for name in names)  # of many, those that have ended make room
    assert "all" not in bars if count == 1 else bars["all"].completed == count
    shown = console.file.getvalue()
    assert (f"{count}/{count}" if count > 1 else "5/5") in shown
    assert "loss 0.25" in shown or count > 8
