"""Data sets that are downloaded, from a server on this machine: whole, checked, resumed, or not there at all."""

import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from data_files import pack, write_cifar100, write_idx, write_tree

from orthocond.cli import main
from orthocond.lab.data import KNOWN, KnownSet, get, load, names
from orthocond.lab.data.known import RemoteFile
from orthocond.lab.presets import KINDS


class Server(ThreadingHTTPServer):
    """Serves files from memory; can stop in the middle, and forget how to continue."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {}
        self.asked = []
        self.stops = []  # after how many bytes to stop, for the next answers
        self.ranges = True

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        asked = self.headers.get("Range")
        server.asked.append((self.path[1:], asked))
        content = server.files.get(self.path[1:])
        if content is None:
            return self.send_error(404)
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and server.ranges else 0
        if start >= len(content):
            return self.send_error(416)
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        stop = server.stops.pop(0) if server.stops else len(content)
        self.wfile.write(content[start : start + stop])
        return None

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def cifar(server, tmp_path, monkeypatch):
    """A small CIFAR-100 on the server, in place of the real one."""
    (tmp_path / "made").mkdir()
    write_cifar100(tmp_path / "made" / "cifar-100-python")
    content = pack(tmp_path / "made", tmp_path / "packed.tar.gz").read_bytes()
    server.files["c.tar.gz"] = content
    file = RemoteFile(
        f"{server.url}c.tar.gz", f"sha256:{hashlib.sha256(content).hexdigest()}", "cifar-100-python.tar.gz"
    )
    monkeypatch.setitem(KNOWN, "cifar100", KnownSet("small", "home", ("cifar-100-python", file.path), (file,)))
    return content


def visible(root):
    return sorted(path.name for path in root.rglob("*") if path.is_file() and path.name != ".lock")


def test_a_download_can_be_loaded(server, cifar, tmp_path):
    seen = []
    path = get("cifar100", tmp_path / "root", lambda *state: seen.append(state))
    assert path == tmp_path / "root" / "cifar-100-python.tar.gz"
    assert path.read_bytes() == cifar
    assert load("cifar100", root=tmp_path / "root").labels.tolist() == [3, 99]
    assert seen[-1] == ("cifar-100-python.tar.gz", len(cifar), len(cifar))
    assert names(tmp_path / "root")["cifar100"] == str(path)
    get("cifar100", tmp_path / "root")
    assert len(server.asked) == 1  # it is there, with the right checksum
    path.write_bytes(b"damaged")
    get("cifar100", tmp_path / "root")
    assert path.read_bytes() == cifar


def test_what_lies_there_unpacked_is_not_downloaded(server, cifar, tmp_path):
    (tmp_path / "root").mkdir()
    write_cifar100(tmp_path / "root" / "cifar-100-python")
    assert get("cifar100", tmp_path / "root") == tmp_path / "root" / "cifar-100-python"
    assert server.asked == []


def test_an_interrupted_download_goes_on(server, cifar, tmp_path):
    server.stops = [1000, 500]
    path = get("cifar100", tmp_path)
    assert path.read_bytes() == cifar
    assert [asked for _, asked in server.asked] == [None, "bytes=1000-", "bytes=1500-"]


def test_a_download_goes_on_in_another_process(server, cifar, tmp_path):
    server.stops = [1000, 0, 0]
    with pytest.raises(OSError, match=r"stopped after 1000 bytes .*What was downloaded is kept.*run the same command"):
        get("cifar100", tmp_path / "root")
    assert visible(tmp_path / "root") == [".cifar-100-python.tar.gz.part"]
    with pytest.raises(FileNotFoundError, match="orthocond data get cifar100"):
        load("cifar100", root=tmp_path / "root")
    server.asked.clear()
    assert get("cifar100", tmp_path / "root").read_bytes() == cifar
    assert server.asked == [("c.tar.gz", "bytes=1000-")]
    assert visible(tmp_path / "root") == ["cifar-100-python.tar.gz"]


def test_a_server_that_cannot_go_on(server, cifar, tmp_path):
    server.ranges = False
    server.stops = [1000]
    assert get("cifar100", tmp_path).read_bytes() == cifar


def test_all_came_but_was_not_checked(server, cifar, tmp_path):
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / ".cifar-100-python.tar.gz.part").write_bytes(cifar)
    assert get("cifar100", tmp_path / "root").read_bytes() == cifar
    assert visible(tmp_path / "root") == ["cifar-100-python.tar.gz"]


@pytest.mark.parametrize("what", ["server", "part"])
def test_a_wrong_checksum_leaves_nothing(server, cifar, tmp_path, what):
    (tmp_path / "root").mkdir()
    if what == "server":
        server.files["c.tar.gz"] = cifar[:-1] + b"x"
    else:
        (tmp_path / "root" / ".cifar-100-python.tar.gz.part").write_bytes(b"of another file")
    with pytest.raises(ValueError, match=r"c\.tar\.gz does not have the checksum sha256:.* was deleted.*see home"):
        get("cifar100", tmp_path / "root")
    assert visible(tmp_path / "root") == []


def test_several_files(server, tmp_path, monkeypatch):
    images, _ = write_idx(tmp_path / "made", compress=True)
    files = []
    for path in sorted((tmp_path / "made").iterdir()):
        server.files[path.name] = path.read_bytes()
        digits = hashlib.md5(path.read_bytes()).hexdigest()
        files.append(RemoteFile(server.url + path.name, f"md5:{digits}", f"fashion-mnist/{path.name}"))
    monkeypatch.setitem(KNOWN, "fashion-mnist", KnownSet("small", "home", ("fashion-mnist",), tuple(files)))
    missing = server.files.pop(path.name)
    with pytest.raises(OSError, match=rf"{path.name} is not there .*404"):
        get("fashion-mnist", tmp_path)
    server.files[path.name] = missing
    server.asked.clear()
    assert get("fashion-mnist", tmp_path) == tmp_path / "fashion-mnist"
    assert server.asked == [(path.name, None)]
    assert len(load("fashion-mnist", root=tmp_path)) == len(images)


def test_a_server_that_is_not_there(server, cifar, tmp_path, monkeypatch):
    file = KNOWN["cifar100"].files[0]._replace(url="http://127.0.0.1:9/c.tar.gz")
    monkeypatch.setitem(KNOWN, "cifar100", KnownSet("small", "home", (file.path,), (file,)))
    with pytest.raises(OSError, match=r"stopped after 0 bytes .*check the network"):
        get("cifar100", tmp_path / "root")


@pytest.mark.parametrize(
    "answer",
    [b"This is no HTTP.\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1000\r\nless than that"],
    ids=["no HTTP", "cut off between chunks"],
)
def test_an_answer_that_breaks_the_protocol_is_a_sentence(server, cifar, tmp_path, monkeypatch, answer):
    monkeypatch.setattr(Handler, "do_GET", lambda self: self.wfile.write(answer))
    with pytest.raises(OSError, match=r"stopped after 0 bytes .*check the network"):
        get("cifar100", tmp_path / "root")


def test_names_that_cannot_be_got(tmp_path):
    with pytest.raises(ValueError, match=r"celeba cannot be downloaded without you\. https://.*img_align_celeba\.zip"):
        get("celeba", tmp_path)
    with pytest.raises(ValueError, match=r"no data set 'cifar-10' .* Did you mean 'cifar10'\?"):
        get("cifar-10", tmp_path)
    with pytest.raises(ValueError, match="built in"):
        get("sprites", tmp_path)
    write_tree(tmp_path / "celeba", ["0.png"])
    assert get("celeba", tmp_path) == tmp_path / "celeba"
    assert len(load("celeba", root=tmp_path)) == 1


def test_every_known_set_can_be_got_or_says_how():
    for name, one in KNOWN.items():
        assert bool(one.files) != bool(one.recipe), name
        assert one.home.startswith("https://")
        for file in one.files:
            kind, _, digits = file.checksum.partition(":")
            assert len(digits) == {"sha256": 64, "md5": 32}[kind]
            assert any(file.path.startswith(place) for place in one.places)


def test_every_preset_trains_on_a_known_set():
    needed = {
        config.data.source for kind in KINDS.values() for scales in kind.presets.values() for config in scales.values()
    }
    assert needed - {"sprites", "images"} <= KNOWN.keys()  # the latter are your own
    assert {"tiny-imagenet-20", "animeface-64", "utkface-128", "celeba-10k", "buildings-64"} <= needed


def test_command_line(server, cifar, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    write_tree(tmp_path / "root" / "\x1b[2Jmine", ["0.png"])
    root = ["--data-root", str(tmp_path / "root")]
    assert main(["data", *root]) == 0
    text = capsys.readouterr().out
    assert "orthocond data get cifar100" in text
    assert "by hand: orthocond data get imagenet tells how" in text
    assert all(f"by hand: orthocond data get {name} tells how" in text for name in ("tiny-imagenet-20", "buildings-64"))
    assert "\\x1b[2Jmine" in text
    assert "\x1b[2Jmine" not in text
    assert main(["data", "get", "cifar100", "--quiet", *root]) == 0
    assert capsys.readouterr().out == f"cifar100: {tmp_path / 'root' / 'cifar-100-python.tar.gz'}\n"
    assert main(["data", "get", "celeba", *root]) == 1
    assert "cannot be downloaded without you" in capsys.readouterr().err
    write_tree(tmp_path / "root" / "celeba-10k", ["0.png"])
    assert main(["data", *root]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.strip().startswith("celeba-10k"))
    assert line.rstrip().endswith(str(tmp_path / "root" / "celeba-10k"))
    for wrong in (["get"], ["list", "cifar10"], ["fetch", "cifar10"]):
        assert main(["data", *wrong, *root]) == 2
