"""The command line: help, settings, errors and exit codes."""

import gc
import importlib
import io
import json
import os
import re
import subprocess
import sys

import pytest

from orthocond.cli import app, main, settings
from orthocond.cli import train as train_module
from orthocond.cli.terminal import speak_any_encoding
from orthocond.lab import experiments
from orthocond.lab.config import change
from orthocond.lab.presets import KINDS


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "900")


@pytest.fixture
def chosen(monkeypatch):
    """What `train` was asked for, instead of a training."""
    calls = []
    monkeypatch.setattr(train_module, "_train", lambda *arguments: calls.append(arguments) or 0)
    return calls


# Help


def test_help_names_every_command(capsys):
    assert main([]) == 0
    text = capsys.readouterr().out
    assert all(f" {name} " in text for name in app.COMMANDS)


@pytest.mark.parametrize("name", app.COMMANDS)
def test_every_command_explains_itself_and_each_option(name, capsys):
    assert main([name, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    options = [line for line in lines if line.startswith("│ ")]
    assert options
    assert all(len(line.strip("│ ").split("  ")) > 1 for line in options), "an option without explanation"


@pytest.mark.parametrize("name", experiments.names())
@pytest.mark.parametrize("scale", ["paper", "laptop"])
def test_help_of_a_preset_shows_every_setting_with_its_own_default(name, scale, capsys):
    assert main(["train", name, "--scale", scale, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for setting in settings.settings(experiments.preset(name, scale)):
        option = "--" + setting.path.replace("_", "-")
        (line,) = (line for line in lines if f"{option} " in line and line.startswith("│ --"))
        assert setting.help, option
        if setting.value is not None and setting.value != ():
            assert f"[default: {setting.value}]" in line


@pytest.mark.parametrize("name", app.COMMANDS)
def test_the_list_of_commands_says_what_the_command_says_of_itself(name):
    place, text = app.COMMANDS[name]
    module, _, function = place.partition(":")
    described = getattr(importlib.import_module(f"orthocond.cli.{module}"), function).__doc__
    assert " ".join(described.partition("\n\n")[0].split()) == text


def test_version(capsys):
    import orthocond

    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == orthocond.__version__


def test_garbage_is_collected_again_after_the_start(capsys):
    assert main(["--version"]) == 0
    assert gc.isenabled()


_LIGHT = """
import sys
from orthocond.cli import main
assert main(sys.argv[1:]) == 0
heavy = {"torch", "numpy", "scipy", "matplotlib", "accelerate", "datasets", "pandas", "PIL"}
if sys.argv[1:] in (["--help"], ["--version"]):
    heavy.add("pydantic")
heavy &= set(sys.modules)
assert not heavy, heavy
"""


@pytest.mark.parametrize(
    "line", [["--help"], ["--version"], ["train", "--help"], ["list"], ["data"], ["--install-completion"]]
)
def test_what_computes_nothing_starts_without_the_heavy_parts(line, tmp_path):
    environment = os.environ | {"HOME": str(tmp_path), "SHELL": "/bin/bash"}
    command = [sys.executable, "-c", _LIGHT, *line]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr


def test_the_list_alone_starts_without_the_parser():
    program = "import sys; from orthocond.cli import main; main(['list']); assert 'cyclopts' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)


def test_completion_is_a_script_that_knows_commands_and_options(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SHELL", "/bin/bash")
    assert main(["--install-completion"]) == 0
    script = (tmp_path / ".local/share/bash-completion/completions/orthocond").read_text()
    assert all(name in script for name in app.COMMANDS)
    assert "--data-root" in script
    assert "python" not in script.lower(), "pressing Tab starts no interpreter"
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


# Settings

CHANGES = [
    (["--schedule.lr", "0.05"], "schedule.lr", 0.05),
    (["--schedule.milestones", "3", "4", "5"], "schedule.milestones", (3, 4, 5)),
    (["--schedule.milestones=[3,4]"], "schedule.milestones", (3, 4)),
    (["--schedule.milestones", "none"], "schedule.milestones", ()),
    (["--schedule.milestones=none"], "schedule.milestones", ()),
    (["--model.depths", "none"], "model.depths", ()),
    (["--data.flip"], "data.flip", True),
    (["--data.limit", "none"], "data.limit", None),
    (["--method", "nog+ow+olr"], "method.name", "nog+ow+olr"),
    (["--method.name", "nog"], "method.name", "nog"),
    (["--olr", "paper"], "method.olr", "paper"),
    (["--ow", "skewconv"], "method.ow", "skewconv"),
    (["--solver", "svd-pade"], "method.solver", "svd-pade"),
    (["--model", "package.module:function"], "model.name", "package.module:function"),
    (["--data", "cifar10"], "data.source", "cifar10"),
    (["--data.limit", "0x10"], "data.limit", 16),
    (["--seed", "7"], "seed", 7),
    (["--precision", "bf16"], "precision", "bf16"),
]


@pytest.mark.parametrize(("tokens", "path", "value"), CHANGES, ids=lambda x: str(x))
def test_an_option_changes_its_setting_alone(tokens, path, value, chosen):
    assert main(["train", "dbn-sprites-small", *tokens]) == 0
    neutral = {"data.noise": 0.0} if path == "data.source" else {}  # what only sprites have
    expected = change(experiments.preset("dbn-sprites-small"), {path: value} | neutral)
    assert chosen[0][0] == expected != experiments.preset("dbn-sprites-small")


def test_the_preset_may_follow_options(chosen):
    assert main(["train", "--seed", "3", "--scale", "paper", "gan-celeba", "--method", "hp"]) == 0
    assert chosen[0][0] == change(experiments.preset("gan-celeba", "paper"), {"seed": 3, "method.name": "hp"})


def test_options_go_before_the_file_and_the_file_before_the_preset(chosen, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('preset = "dbn-cifar100-resnet50"\nscale = "paper"\nseed = 4\n[schedule]\nlr = 1\nepochs = 7\n')
    assert main(["train", "--config", str(file), "--schedule.lr", "0.3"]) == 0
    config = chosen[0][0]
    assert (config.preset, config.scale, config.seed) == ("dbn-cifar100-resnet50", "paper", 4)
    assert (config.schedule.lr, config.schedule.epochs, config.schedule.batch_size) == (0.3, 7, 128)
    assert main(["train", "dbn-sprites-small", "--scale", "laptop", "--config", str(file)]) == 0
    assert (chosen[1][0].preset, chosen[1][0].scale, chosen[1][0].schedule.lr) == ("dbn-sprites-small", "laptop", 1.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[shedule]\nlr = 1", "'schedule'"),
        ("[schedule]\nlr = 'fast'", "schedule.lr needs a number"),
        ("lr = = 1", "is not TOML"),
        ("log_every = 0", "log_every needs at least 1; got 0"),
        ("kind = 'generation'", "is of the kind 'classification'"),
    ],
)
def test_a_bad_file_is_named(text, words, tmp_path, capsys):
    file = tmp_path / "mine.toml"
    file.write_text(text)
    assert main(["train", "dbn-sprites-small", "--config", str(file)]) == 2
    error = capsys.readouterr().err
    assert "mine.toml" in error
    assert words in error


def test_a_file_may_be_json_and_has_the_same_constraints(chosen, tmp_path, capsys):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"preset": "gan-sprites", "schedule": {"steps": 7}}))
    assert main(["train", "--config", str(file)]) == 0
    assert (chosen[0][0].preset, chosen[0][0].schedule.steps) == ("gan-sprites", 7)
    for text, words in (
        ("[1, 2]", "needs settings by name"),
        ("3", "needs settings by name"),
        ("[" * 100_000, "is not JSON"),
        ('{"preset": "gan-sprites", "seed": 1, "seed": 2}', "it has 'seed' twice"),
        ('{"preset": ["gan-sprites"]}', "Preset and scale need names"),
        ('{"preset": "gan-sprites", "scale": {}}', "Preset and scale need names"),
        ('{"preset": "gan-sprites", "schedule": {"steps": 0}}', "schedule.steps needs at least 1"),
        ('{"preset": "gan-sprites", "schedule": [3]}', "schedule needs the settings of GanSchedule"),
    ):
        file.write_text(text)
        assert main(["train", "--config", str(file)]) == 2
        error = capsys.readouterr().err
        assert "config.json" in error or "reset" in error
        assert words in error
    assert main(["train", "--config", str(tmp_path)]) == 2  # a folder


@pytest.mark.parametrize("word", ["explore", "report", "evaluate"])
def test_a_name_too_long_for_a_file_is_no_run(word, capsys):
    assert main([word, "a" * 5000]) == 2
    assert capsys.readouterr().err.count("\n") == 2  # what is wrong, and where help is


def test_a_function_that_needs_arguments_is_a_mistake_of_usage(capsys):
    assert main(["explore", "os:system"]) == 2
    assert "has to be a function without arguments" in capsys.readouterr().err


def test_an_empty_source_is_refused(capsys):
    assert main(["train", "dbn-sprites-small", "--data", ""]) == 2
    assert "--data.source needs a text that is not empty" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["meta-layer", "pre-svd"])
def test_layers_are_named_in_networks_of_users_only(option, chosen, capsys):
    tokens = ["train", "dbn-sprites-small", f"--model.{option}", "bn1"]
    assert main([*tokens, "--model", "package.module:function"]) == 0
    assert getattr(chosen[0][0].model, option.replace("-", "_")) == "bn1"
    assert main(tokens) == 2
    assert re.search(
        rf"{option}.* names a layer of your own network.*; resnet18 has its SVD layer", capsys.readouterr().err
    )


def test_another_source_leaves_out_what_only_sprites_have(chosen, tmp_path):
    for preset, setting in (("dbn-sprites-small", "noise"), ("gan-sprites", "shape")):
        assert main(["train", preset, "--data", str(tmp_path)]) == 0
        data = chosen[-1][0].data
        assert data.source == str(tmp_path)
        assert not getattr(data, setting)
        assert getattr(experiments.preset(preset).data, setting)


# Errors

BAD_USAGE = [
    ("trian", '"train"'),
    ("train", "dbn-sprites-small"),
    ("train dbn-sprites-smal", "'dbn-sprites-small'"),
    ("train --seed 1", "Which preset"),
    ("train --resume", "needs the preset"),
    ("train dbn-sprites-small --scale papre", "'paper'"),
    ("train dbn-sprites-small --method nogg", "'nog'"),
    ("train dbn-sprites-small --method nog+nog", "counts once"),
    ("train gan-sprites --method hpp", "'hp'"),
    ("train dbn-sprites-small --solver egih", '"eigh"'),
    ("train dbn-sprites-small --olr papre", '"paper"'),
    ("train dbn-sprites-small --shedule.lr 1", "--schedule.lr"),
    ("train dbn-sprites-small --schedule.lr fast", "--schedule.lr"),
    ("train dbn-sprites-small --config missing.toml", "missing.toml"),
    ("train dbn-sprites-small more", "more"),
    ("evaluate no-such-run", "no-such-run"),
    ("diagnose", "RUN"),
    ("bench --methods svdd", "'svd'"),
    ("bench gan-sprite", "'gan-sprites'"),
    ("table weight-treatment", "'weight-treatments'"),
    ("table gcp --only nogg", "SVD + NOG"),
    ("list preset", '"presets"'),
    ("train dbn-sprites-small --log-every 0", "--log-every needs at least 1; got 0"),
    (f"train dbn-sprites-small --data.limit {10**30}", "--data.limit needs at most"),
    ("train dbn-sprites-small --schedule.epochs 0", "--schedule.epochs needs at least 1"),
    ("train dbn-sprites-small --schedule.steps -3", "--schedule.steps needs at least 1"),
    ("train dbn-sprites-small --schedule.lr nan", "--schedule.lr needs a finite number"),
    ("train dbn-sprites-small --schedule.lr 0", "--schedule.lr needs more than 0"),
    ("train dbn-sprites-small --schedule.momentum 1", "--schedule.momentum needs less than 1"),
    ("train dbn-sprites-small --schedule.milestones 2 0", "--schedule.milestones[1] needs at least 1"),
    ("train dbn-sprites-small --seed -1", "--seed needs at least 0"),
    ("train dbn-sprites-small --schedule.nesterov maybe", "There is no place for 'maybe' after --schedule.nesterov."),
    ("train dbn-sprites-small --method.short 0.5 0.5 0.7", "There is no place for '0.7' after --method.short."),
    ("data list sprites more", "There is no place for 'more'."),
    ("train dbn-sprites-small --model.width 0", "--model.width needs at least 1"),
    ("train gan-sprites --steps 30", "Did you mean --schedule.steps?"),
    ("train dbn-sprites-small --lr=0.1", "Did you mean --schedule.lr?"),
    ("train dbn-sprites-small --model resnet51", "Did you mean 'resnet50'?"),
    ("train dbn-sprite", "Did you mean 'dbn-sprites-small'?"),
    ("train dbn-sprites-small --data.noise 1 --data cifar10", "data.noise is a setting of sprites; cifar10 has none"),
    ("train gan-sprites --objective.augment-probability 2", "--objective.augment-probability needs at most 1"),
    ("train gan-sprites --schedule.ema 1", "--schedule.ema needs less than 1"),
    ("train gan-sprites --schedule.betas 0.5 1", "--schedule.betas[1] needs less than 1"),
    ("train gan-sprites --data.resize 8", "data.resize needs at least data.size, 16; got 8"),
    ("table gcp --seeds 0", "Must be >= 1"),
    ("table gcp --jobs 0", "Must be >= 1"),
    ("bench --repeats 0", "Must be >= 1"),
    ("bench --batch-size 0", "Must be >= 1"),
    ("explore --z-dim 0", "Must be >= 1"),
    ("explore --z-dim -1", "Must be >= 1"),
    ("explore --range 0 inf", "needs two finite values"),
    ("explore --range nan 1", "needs two finite values"),
    ("train dbn-sprites-small --dry-run --schedule.epochs 2.7", "--schedule.epochs: needs a whole number; got 2.7"),
    ("train dbn-sprites-small --dry-run --seed 2.7", "--seed: needs a whole number; got 2.7"),
    ("train dbn-sprites-small --dry-run --schedule.steps 1.9", "--schedule.steps: needs a whole number; got 1.9"),
    ("train dbn-sprites-small --dry-run --schedule.milestones 1.5", "--schedule.milestones: needs a whole number"),
    ("train dbn-sprites-small --dry-run --schedule.milestones=[1,2.5]", "needs a whole number; got 2.5"),
    ("train dbn-sprites-small --dry-run --data.validation 0.5", "--data.validation: needs a whole number; got 0.5"),
    ("train dbn-sprites-small --dry-run --save-every 0.5", "--save-every: needs a whole number; got 0.5"),
    ("train dbn-sprites-small --dry-run --runs /dev/null/runs", "--runs needs a folder that can be created"),
    ("train dbn-sprites-small --runs /dev/null", "/dev/null is a file"),
    ("table gcp --seeds 1.5", "--seeds: needs a whole number; got 1.5"),
    ("table gcp --jobs 1.5", "--jobs: needs a whole number; got 1.5"),
    ("bench --repeats 1.5", "--repeats: needs a whole number; got 1.5"),
    ("traverse 0 --k 1.5", "--k: needs a whole number; got 1.5"),
    ("traverse 0 --samples 1.5", "--samples: needs a whole number; got 1.5"),
    ("traverse 0 --seed 1.5", "--seed: needs a whole number; got 1.5"),
    ("explore --z-dim 1.5", "--z-dim: needs a whole number; got 1.5"),
]


@pytest.mark.parametrize(("line", "words"), BAD_USAGE, ids=[line for line, _ in BAD_USAGE])
def test_bad_usage_gives_the_nearest_name_and_code_2(line, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(line.split()) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (OSError("the disk is full"), 1, "the disk is full"),
        (FileNotFoundError(2, "No such file or directory", "x.png"), 1, "No such file or directory: 'x.png'\n"),
        (ValueError("a number is wrong"), 1, "a number is wrong"),
        (RuntimeError("another process writes"), 1, "another process writes"),
        (FloatingPointError("The loss is nan"), 3, "The loss is nan"),
        (KeyboardInterrupt(), 130, "Stopped"),
        (MemoryError(), 1, "There is not enough memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), 1, "Use a smaller batch"),
        (OverflowError("int too large"), 1, "int too large"),
        (ValueError("a\x1b[2Jb is broken"), 1, "a\\x1b[2Jb is broken"),
        (ModuleNotFoundError("No module named 'accelerate'", name="accelerate"), 1, 'pip install "orthocond[lab]"'),
        (ModuleNotFoundError("No module named 'mine'", name="mine"), 1, "No module named 'mine'"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_errors_become_a_message_and_a_code(error, code, words, monkeypatch, capsys):
    def fail(*_):
        raise error

    monkeypatch.setattr(train_module, "_train", fail)
    assert main(["train", "dbn-sprites-small"]) == code
    text = capsys.readouterr().err
    assert words in text
    assert "Traceback" not in text
    assert "Errno" not in text
    assert main(["train", "dbn-sprites-small", "--debug"]) == code
    assert "Traceback" in capsys.readouterr().err


def test_a_bug_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(train_module, "_train", lambda *_: {}["no such key"])
    with pytest.raises(KeyError):
        main(["train", "dbn-sprites-small"])


@pytest.mark.parametrize(("package", "words"), [("rich.table", "list"), ("cyclopts", "--help")])
def test_without_the_extra_it_says_how_to_install(package, words, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith("orthocond.cli.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    assert main([words]) == 1
    assert re.search(rf'{package}( is not installed)?: pip install "orthocond\[lab\]"', capsys.readouterr().err)


def test_ctrl_c_while_it_starts(monkeypatch, capsys):
    class Interrupt:
        def find_spec(self, name, path=None, target=None):
            if name == "orthocond.cli.app":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "orthocond.cli.app")
    monkeypatch.setattr(sys, "meta_path", [Interrupt(), *sys.meta_path])
    assert main(["list"]) == 130
    assert capsys.readouterr().err == "Stopped.\n"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_any_terminal_gets_all_letters_in_some_way(encoding, monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="")
    monkeypatch.setattr(sys, "stdout", stream)
    speak_any_encoding()
    print("κ(P + εI) = 3 × 10 → ∞, 漢 ± −1")
    stream.flush()
    text = stream.buffer.getvalue().decode(encoding).replace("×", "x").replace("±", "+-")
    assert text == "kappa(P + epsI) = 3 x 10 -> inf, ? +- -1\n"


@pytest.mark.parametrize(("rank", "printed"), [("0", "wrong\n"), ("1", "Process 1: wrong\n")])
def test_processes_of_torchrun_say_which_they_are(rank, printed, monkeypatch, capsys):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(train_module, "_train", lambda *_: (_ for _ in ()).throw(ValueError("wrong")))
    assert main(["train", "dbn-sprites-small"]) == 1
    assert capsys.readouterr().err == printed


# Lists


def test_list_shows_all_names(capsys):
    from orthocond.lab import data

    assert main(["list", "all"]) == 0
    text = capsys.readouterr().out
    assert main(["list"]) == 0
    assert capsys.readouterr().out == text
    words = text.split()
    parts = {part for kind in KINDS.values() for name in kind.grammar.names for part in name.split("+")}
    assert {*experiments.names(), *parts, *data.names(), "laptop", "workstation", "paper"} <= set(words)
    assert main(["list", "data"]) == 0
    assert "dbn-sprites-small" not in capsys.readouterr().out


def test_list_finds_data_in_a_root(tmp_path, capsys):
    (tmp_path / "my-images" / "cats").mkdir(parents=True)
    assert main(["list", "data", "--data-root", str(tmp_path)]) == 0
    assert "my-images" in capsys.readouterr().out
