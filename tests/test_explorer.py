"""The explorer before a browser opens it: sources, directions, the file, and what wrong sources are told."""

import json
import math
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

import orthocond as oc
from orthocond.cli import main
from orthocond.directions import Directions, axes
from orthocond.gans import EigenGenerator, SimpleGenerator
from orthocond.lab.data import FACTORS, render
from orthocond.lab.explorer import shipped, write_explorer
from orthocond.lab.explorer.page import Exhibit, Kind, _describe_kind, write_page
from orthocond.lab.explorer.scores import changed_factors, scores_of
from orthocond.lab.explorer.sources import from_module, from_onnx, kinds_of, to_onnx
from orthocond.lab.runs import Run

EXHIBIT = Exhibit("toy", b"model", 4, (4,), "normal", 1.0, (-1.0, 1.0), None, (Kind("axes", "axes", "", axes(4)),))


class Toy(nn.Module):
    z_dim = 3

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 48)

    def forward(self, z):
        return torch.tanh(self.linear(z)).reshape(-1, 3, 4, 4)


def run(*arguments):
    return main([*arguments])


# Values


def test_directions_come_by_effect_and_ties_follow_them():
    found = Directions(torch.eye(4)[:3], torch.tensor([5.0, 1.0, 1.0]), effect=torch.tensor([0.1, 0.2, 0.3]))
    kind = _describe_kind(Kind("k", "title", "about", found, scores={"0": {"score": 7.0}, "2": {"score": 9.0}}))
    assert [row["name"] for row in kind["directions"]] == ["2", "1", "0"]
    assert [row["scores"] for row in kind["directions"]] == [{"score": 9.0}, {}, {"score": 7.0}]
    assert kind["ties"] == [[0, 1]]
    assert kind["tie_tol"] == found.tie_tol


def test_exported_models_agree_with_torch_for_any_number_of_latents(tmp_path):
    generator = oc.Generator(Toy(), range=(-1, 1))
    content, batch = to_onnx(generator, "toy")
    assert batch is None
    file = tmp_path / "toy.onnx"
    file.write_bytes(content)
    exhibit = from_onnx(file)
    assert (exhibit.z_dim, exhibit.batch, exhibit.latent_shape) == (3, None, (3,))
    import onnxruntime

    session = onnxruntime.InferenceSession(content)
    for count in (1, 5):
        z = generator.sample(count)
        found = torch.from_numpy(session.run(None, {"z": z.numpy()})[0])
        torch.testing.assert_close(found, generator(z).detach(), rtol=0, atol=5e-6)
    assert generator.module.training


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: SimpleGenerator(8, 5, 4), {"joint", "jacobian", "sefa", "axes"}),
        (lambda: EigenGenerator(8, 2, 4, 4), {"layers", "joint", "jacobian", "axes"}),
        (Toy, {"joint", "jacobian", "axes"}),
    ],
)
def test_every_generator_has_its_kinds_of_directions(make, names):
    generator = make()
    noise = torch.zeros(4) if isinstance(generator, EigenGenerator) else None
    kinds = kinds_of(oc.Generator(generator, noise=noise, range=None))
    assert {kind.name for kind in kinds} == names
    assert all(kind.directions.effect is not None for kind in kinds)


def test_joint_directions_come_first_unless_the_axes_are_as_good():
    """Each of four factors lights its own pixels; the latents are the factors, or the factors turned."""
    turn = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(0)))[0]

    def lights(rotation):
        def draw(z):
            return (1.5 * z @ rotation).sin().reshape(-1, 1, 2, 2)

        return oc.Generator(draw, 4, latent_shape=(4,))

    assert [kind.name for kind in kinds_of(lights(turn))] == ["joint", "jacobian", "axes"]
    straight = kinds_of(lights(torch.eye(4)))
    assert [kind.name for kind in straight] == ["axes", "joint", "jacobian"]
    assert "entanglement, from 0 to 1, is 0.00" in straight[1].about


def test_pictures_that_keep_to_the_upper_half_of_the_range_get_a_warning(tmp_path, monkeypatch, capsys):
    module = nn.Sequential(nn.Linear(3, 48), nn.Sigmoid(), nn.Unflatten(1, (3, 4, 4)))
    file = tmp_path / "sigmoid.onnx"
    file.write_bytes(to_onnx(oc.Generator(module, 3, range=None), "sigmoid")[0])
    exhibit = from_onnx(file)
    assert "--range 0 1" in exhibit.warning
    assert from_onnx(file, range=(0, 1)).warning == ""
    monkeypatch.setattr("orthocond.lab.explorer.write._find", lambda *_: exhibit)
    assert run("explore", str(file), "--no-open", "--out", str(tmp_path / "x.html")) == 0
    assert "--range 0 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("shape", "told"),
    [
        ((1, 6, 6), ""),
        ((3, 6, 6), ""),
        ((2, 6, 6), "2 channels"),
        ((4, 6, 6), "4 channels"),
        ((6, 6, 3), "(n, C, H, W)"),
    ],
    ids=str,
)
def test_channels_that_the_page_cannot_draw_are_told(tmp_path, shape, told):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, math.prod(shape)), nn.Tanh(), nn.Unflatten(1, shape))
    file = tmp_path / "mine.onnx"
    file.write_bytes(to_onnx(oc.Generator(module, 3), "mine")[0])
    warning = from_onnx(file).warning
    assert told in warning
    assert bool(told) == bool(warning)
    assert ("come last" in warning) == (shape == (6, 6, 3))


def generator_with_norm():
    torch.manual_seed(0)
    layers = [nn.ConvTranspose2d(3, 8, 4), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 3, 4, 2, 1), nn.Tanh()]
    return nn.Sequential(*layers)


def test_an_untrained_generator_is_told(tmp_path):
    """By statistics that no batch has changed, or by pictures that do not change; a trained one is left in peace."""
    module = generator_with_norm()
    assert "untrained: the running statistics" in from_module(oc.Generator(module, 3), "mine").warning
    module(torch.randn(16, 3, 1, 1))  # one batch in training
    assert from_module(oc.Generator(module, 3), "mine").warning == ""
    for layer in module:
        if isinstance(layer, nn.ConvTranspose2d):
            nn.init.normal_(layer.weight, std=1e-4)
    gray = from_module(oc.Generator(module, 3), "mine").warning
    assert gray.startswith("mine seems to be untrained: no direction changes its pictures by a gray level within 3 σ.")
    file = tmp_path / "gray.onnx"
    file.write_bytes(to_onnx(oc.Generator(module, 3), "gray")[0])
    assert "by a gray level" in from_onnx(file).warning


def test_a_function_without_a_number_of_latents_is_asked_for_it(tmp_path, monkeypatch, capsys):
    (tmp_path / "without_z_dim.py").write_text("from torch import nn\ndef make(): return nn.Linear(3, 48)\n")
    monkeypatch.chdir(tmp_path)
    assert run("explore", "without_z_dim:make", "--no-open") == 2
    assert "How many latents does without_z_dim:make take? Pass their number: --z-dim" in capsys.readouterr().err


def test_a_range_that_is_too_large_is_told_once(tmp_path, monkeypatch, capsys, recwarn):
    code = "return nn.Sequential(nn.Linear(3, 48), nn.Sigmoid(), nn.Unflatten(1, (3, 4, 4)))"
    (tmp_path / "upper_half.py").write_text(f"from torch import nn\ndef make(): {code}\n")
    monkeypatch.chdir(tmp_path)
    assert run("explore", "upper_half:make", "--z-dim", "3", "--no-open") == 0
    assert capsys.readouterr().out.count("--range 0 1") == 1
    assert not [w for w in recwarn if "range" in str(w.message)]


# Runs


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run that trained for one step, and the evaluation that a longer one might have."""
    folder = tmp_path_factory.mktemp("runs")
    settings = ["--data.size", "16", "--model.channels", "8", "8", "8", "--data.limit", "64", "--schedule.steps", "1"]
    arguments = ["train", "gan-sprites", *settings, "--schedule.batch-size", "8", "--no-evaluate", "--quiet"]
    assert run(*arguments, "--runs", str(folder)) == 0
    (made,) = (Run.open(path.parent) for path in folder.glob("*/config.json"))
    z_dim = made.config["model"]["z_dim"]
    names = [f"z{i}" for i in range(z_dim)]
    vp = {"per_direction": [0.5 + i / 100 for i in range(z_dim)]}
    axes_ = {"names": names, "importance": [1.0] * z_dim, "vp": vp, "activeness": [*[0.1] * (z_dim - 1), "NaN"]}
    joint_ = {"names": ["joint 0", "joint 1"], "importance": [3.0, 1.0], "activeness": [0.2, 0.1]}
    content = {"step": made.load().step, "directions": {"axes": axes_, "joint": joint_, "eigengan": joint_}}
    (made.path / "evaluation.json").write_text(json.dumps(content))
    return made


def test_scores_are_those_of_the_evaluation_and_nothing_else(trained):
    own = axes(trained.config["model"]["z_dim"])
    found = scores_of(trained, "axes", own)
    assert found["z1"] == {"predictability": 0.51, "activeness": 0.1}
    assert list(found.values())[-1].keys() == {"predictability"}
    joint = Directions(torch.eye(3)[:2], torch.tensor([3.0001, 1.5]), ("joint 0", "joint 1"))
    assert scores_of(trained, "joint", joint) == {"joint 0": {"activeness": 0.2}}  # the other one is not the same
    assert scores_of(trained, "layers", joint) == {"joint 0": {"activeness": 0.2}}
    assert scores_of(trained, "sefa", joint) == {}
    file = trained.path / "evaluation.json"
    kept = file.read_text()
    try:
        file.write_text(json.dumps(json.loads(kept) | {"step": 999}))
        assert scores_of(trained, "axes", own) == {}  # of other weights
        file.write_text("[]")
        with pytest.raises(ValueError, match=r"evaluation.json is damaged .* orthocond evaluate"):
            scores_of(trained, "axes", own)
        file.unlink()
        assert scores_of(trained, "axes", own) == {}
    finally:
        file.write_text(kept)


def test_explorer_of_a_run_lies_in_its_folder_and_says_whose_it_is(trained):
    file = write_explorer(trained.path)
    assert file == trained.path / "explore.html"
    page = file.read_text()
    title = re.search("<title>(.*)</title>", page)[1]
    assert re.fullmatch(r"gan-sprites, none, seed 0 \(run 0\) — orthocond explorer", title)
    models = json.loads(re.search('<script id="models-data" type="application/json">(.*?)</script>', page)[1])
    (kind,) = (kind for kind in models[0]["kinds"] if kind["kind"] == "axes")
    assert {row["name"]: row["scores"]["predictability"] for row in kind["directions"]}["z1"] == 0.51


def test_factors_that_a_direction_changes_are_measured_for_sprites_alone():
    """The factors of real sprites are the latents: each axis changes its own."""

    class Sprites(nn.Module):
        z_dim = 6

        def forward(self, z):
            low, high = torch.tensor(list(FACTORS.values())).unbind(1)
            return render(low + (high - low) * torch.sigmoid(z), torch.zeros(len(z), dtype=torch.long), 32)

    found = changed_factors(oc.Generator(Sprites(), range=(0, 1)), axes(6))
    for i, name in enumerate(FACTORS):
        assert max(found[f"z{i}"], key=found[f"z{i}"].get) == name
    assert changed_factors(oc.Generator(Toy(), range=None), axes(3)) == {}


def test_the_generator_that_ships_says_what_its_directions_change():
    kinds = {kind.name: kind for kind in shipped.exhibit().kinds}
    assert all(set(kind.factors) == set(kind.directions.names) for kind in kinds.values())
    tops = {max(row, key=row.get) for row in kinds["joint"].factors.values()}
    assert {"hue", "background"} <= tops


def test_the_file_needs_nothing_else():
    page = write_page([EXHIBIT], "A <title> & more")
    assert "A &lt;title&gt; &amp; more" in page
    assert not re.findall(r"(?:src|href)=\"?(?!\")http", page)
    assert len(page) < 6e6
    assert "{{" not in page.replace("{{", "", 0).split("<script>")[0]


def test_text_of_a_model_cannot_end_the_script():
    page = write_page([replace(EXHIBIT, name="</script><script>alert(1)</script>")], "x")
    assert "<script>alert" not in page


# The command


def test_explore_writes_one_file_for_a_function(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_generator.py").write_text(
        "import torch\nfrom torch import nn\n\n\ndef make():\n"
        "    return nn.Sequential(nn.Linear(3, 48), nn.Sigmoid(), nn.Unflatten(1, (3, 4, 4)))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("webbrowser.open", lambda url: pytest.fail("it was told not to open"))
    assert run("explore", "my_generator:make", "--z-dim", "3", "--range", "0", "1", "--no-open") == 0
    assert "Written to explore.html" in capsys.readouterr().out
    assert (tmp_path / "explore.html").stat().st_size > 4e6
    sys.modules.pop("my_generator")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["nothing.onnx"], "There is no file nothing.onnx"),
        (["broken.onnx"], "broken.onnx is not an ONNX model"),
        (["7"], "There is no run '7'"),
        (["os:system"], "has to be a function without arguments"),
        (["face.pt"], "face.pt holds weights, and a page needs the network, too"),
        (["--out", "page.pdf"], "needs a file that ends with .html"),
        (["broken.onnx", "--range", "1", "0"], "smaller value first"),
        (["broken.onnx", "--prior", "cauchy"], "prior"),
    ],
)
def test_wrong_sources_get_a_sentence(tmp_path, monkeypatch, capsys, arguments, error):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.onnx").write_bytes(b"this is not a model")
    assert run("explore", "--no-open", *arguments) in (1, 2)
    text = capsys.readouterr().err
    assert error in text
    assert "Traceback" not in text
    assert not list(tmp_path.glob("*.html"))


@pytest.mark.parametrize(
    ("dims", "error"),
    [(["n", 4], r"odd.onnx fails for latents \(\d+, 4\) \("), ([], "odd.onnx needs latents")],
    ids=["one batch size only", "scalar"],
)
def test_onnx_files_that_do_not_run_get_a_sentence(dims, error, tmp_path, monkeypatch, capfd):
    shape = helper.make_tensor("shape", TensorProto.INT64, [4], [1, 1, 2, 2])  # of one image, whatever the input
    node = helper.make_node("Reshape", ["z", "shape"], ["images"])
    inputs = [helper.make_tensor_value_info("z", TensorProto.FLOAT, dims)]
    outputs = [helper.make_tensor_value_info("images", TensorProto.FLOAT, [1, 1, 2, 2])]
    graph = helper.make_graph([node], "odd", inputs, outputs, [shape])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    (tmp_path / "odd.onnx").write_bytes(model.SerializeToString())
    monkeypatch.chdir(tmp_path)
    assert run("explore", "odd.onnx", "--no-open") == 1
    text = capfd.readouterr().err
    assert re.match(error, text)
    assert len(text.splitlines()) == 1
    assert not list(tmp_path.glob("*.html"))


def test_images_outside_the_range_are_refused(tmp_path):
    generator = oc.Generator(Toy(), range=(-1, 1))
    file = tmp_path / "toy.onnx"
    file.write_bytes(to_onnx(generator, "toy")[0])
    with pytest.raises(ValueError, match="was declared as"):
        from_onnx(file, range=(0, 1))


def test_the_generator_that_ships_draws_discs_on_a_ground(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run("explore", "--no-open") == 0
    assert "explore.html" in capsys.readouterr().out
    images = shipped.generator()(torch.randn(32, 6, generator=torch.Generator().manual_seed(0))).detach()
    corners = images[:, :, [0, 0, -1, -1], [0, -1, 0, -1]]
    assert float(corners.std(2).mean()) < 0.05  # one ground
    assert float(images.std((2, 3)).mean()) > 0.15  # and something on it


def test_the_command_finds_functions_in_the_current_directory(tmp_path):
    """A script of an environment does not have it on its path, unlike ``python -m`` and pytest."""
    (tmp_path / "here_only.py").write_text("def make():\n    raise ValueError('it was found')\n")
    code = "import sys; sys.path = [p for p in sys.path if p]; from orthocond.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "explore", "here_only:make", "--no-open"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert "it was found" in found.stderr
