"""Files that somebody made to harm: they get an error that names them, and nothing runs, hangs, crashes or grows."""

import gzip
import io
import os
import pickle
import resource
import struct
import tarfile
import zipfile

import numpy as np
import pytest
from data_files import encoded, pixels, write_cifar100, write_idx, write_tree
from PIL import EpsImagePlugin, Image

from orthocond.lab.data import BrokenImageError, load
from orthocond.lab.data import archives as archives_module
from orthocond.lab.data.cifar import unpickle

# Pickles


class Malicious:
    def __reduce__(self):
        return (exec, ("raise SystemExit('code ran')",))


@pytest.mark.parametrize("protocol", range(6))
def test_malicious_pickle_is_refused_without_running(tmp_path, protocol):
    write_cifar100(tmp_path / "c")
    (tmp_path / "c" / "train").write_bytes(pickle.dumps({b"data": Malicious()}, protocol))
    with pytest.raises(ValueError, match=r"c/train is not a CIFAR file .*exec"):
        load(tmp_path / "c")


@pytest.mark.parametrize(
    "call", ["cos\nsystem", "cnumpy\nload", "c__builtin__\neval", "cnumpy.core.multiarray\nfromfile"]
)
def test_only_arrays_are_unpickled(call):
    with pytest.raises(ValueError, match="only NumPy arrays"):
        unpickle(f"{call}\n(S'x'\ntR.".encode(), "file")


class Forged:
    """Pickles as a call with a state, whatever that may be."""

    def __init__(self, function, arguments, *state):
        self.reduced = (function, arguments, *state)

    def __reduce__(self):
        return self.reduced


def dtype(*state):
    return Forged(np.dtype, ("u1", False, True), *state)


PLAIN = (3, "|", None, None, None, -1, -1, 0)
OBJECTS = (3, "|", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 1, 27)
ADDRESS = struct.pack("<Q", 0x4141414141414141)
RECONSTRUCT = np.zeros(1).__reduce__()[0]
FROMBUFFER = np.zeros(1).__reduce_ex__(5)[0]


def array(kind, content=bytes(3072), shape=(1, 3072)):
    return Forged(RECONSTRUCT, (np.ndarray, (0,), b"b"), (1, shape, kind, False, content))


@pytest.mark.parametrize(
    ("forged", "message"),
    [
        (np.zeros(2, "O"), "only bytes"),
        (np.zeros(2, [("a", "O")]), "only bytes"),
        (np.zeros(2, "f4"), "only bytes"),
        (dtype(OBJECTS), "only bytes"),
        (dtype((3, "|", None, ("a",), {"a": 1}, 8, 1, 27)), "fields of their own"),
        (array(dtype((3, "|", (np.dtype, (8,)), None, None, -1, -1, 0)), ADDRESS, (1,)), "only bytes|fields"),
        (array(Forged(np.dtype, ("O8",), PLAIN), ADDRESS, (1,)), "only bytes"),
        (array("u1"), "not bytes"),
        (array(dtype(PLAIN), b"few", (10**6, 3072)), "does not have the bytes of its shape"),
        (array(dtype(PLAIN), b"", (2**40, 0, 2**40, 2**63)), "dimension"),
        (array(dtype(PLAIN), b"", (-1,)), "whole numbers"),
        (array(dtype(PLAIN), b"", [3072]), "whole numbers"),
        (array(dtype(PLAIN), "text", (4,)), "does not have the bytes"),
        (Forged(FROMBUFFER, (b"few", dtype(PLAIN), (10**9,), "C")), "does not have the bytes"),
        (Forged(FROMBUFFER, (bytes(4), dtype(PLAIN), (4,), "C"), (1, (4,), dtype(PLAIN), False, bytes(4))), "changes"),
    ],
)
def test_no_array_but_one_of_bytes_is_made(tmp_path, forged, message):
    write_cifar100(tmp_path / "c")
    content = pickle.dumps({b"data": forged, b"fine_labels": [0]}, 4)
    (tmp_path / "c" / "train").write_bytes(content)
    with pytest.raises(ValueError, match=rf"c/train.*({message})"):
        load(tmp_path / "c")


@pytest.mark.parametrize(
    "target",
    [b"cnumpy\ndtype\n", b"cnumpy\nndarray\n", b"c_codecs\nencode\n", b"cnumpy.core.numeric\n_frombuffer\n"],
)
@pytest.mark.parametrize("state", [b"}S'value'\nI1\ns", b"(N}S'__doc__'\nS'changed'\nst"])
def test_a_pickle_does_not_change_what_it_is_given_to_call(target, state):
    with pytest.raises(ValueError, match="file is not a CIFAR file"):
        unpickle(target + state + b"b.", "file")


def test_objects_that_skip_their_making(tmp_path):
    write_cifar100(tmp_path / "c")
    head = b"\x80\x02}(C\x04dataq\x00cnumpy\nndarray\n)\x81"  # NEWOBJ makes an array without calling __init__
    (tmp_path / "c" / "train").write_bytes(head + b"C\x0bfine_labels]u.")
    with pytest.raises(ValueError, match=r"c/train.*'data' must be uint8"):
        load(tmp_path / "c")


@pytest.mark.parametrize(
    "bomb",
    [
        b"\x80\x02Nr\xff\xff\xff\x3f.",  # LONG_BINPUT at place 2**30 - 1: a memo of 8 GB from nine bytes
        b"Np1000000000\n.",
        b"\x80\x05\x96\xff\xff\xff\xff\x01\x00\x00\x00.",  # a bytearray of 8 GB that is not there
        b"\x80\x04\x8e\xff\xff\xff\xff\x01\x00\x00\x00.",
        b"\x80\x04\x95\xff\xff\xff\xff\x01\x00\x00\x00.",
    ],
)
def test_a_small_pickle_takes_little_memory(bomb):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match="file is not a CIFAR file"):
        unpickle(bomb, "file")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18  # kilobytes


@pytest.mark.parametrize("labels", [(0, 1), {0: 0, 1: 1}, [0, 1.0], [0, True], [0, None], [0, 2**70], "01", [[0], [1]]])
def test_labels_are_a_list_of_whole_numbers(tmp_path, labels):
    write_cifar100(tmp_path / "c")
    content = {b"data": np.zeros((2, 3072), np.uint8), b"fine_labels": labels}
    (tmp_path / "c" / "train").write_bytes(pickle.dumps(content, 4))
    with pytest.raises(ValueError, match=r"c/train: 'fine_labels' must be a list of whole numbers"):
        load(tmp_path / "c")


@pytest.mark.parametrize("names", [b"abc", [1], None, {b"a": 1}])
def test_class_names_are_a_list_of_names(tmp_path, names):
    write_cifar100(tmp_path / "c")
    (tmp_path / "c" / "meta").write_bytes(pickle.dumps({b"fine_label_names": names}))
    with pytest.raises(ValueError, match=r"c/meta: 'fine_label_names' must be a list of names"):
        load(tmp_path / "c")


# Pictures


def test_a_program_named_like_a_picture_is_not_started(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *a, **k: started.append(a) or Image.new("RGB", (8, 8)))
    write_tree(tmp_path, ["a.png"])
    (tmp_path / "b.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n")
    with pytest.raises(BrokenImageError, match=r"b\.png is not an image"):
        load(tmp_path)
    assert started == []


@pytest.mark.parametrize("form", ["PCX", "ICO", "TGA", "PDF", "JPEG2000", "DDS"])
def test_other_formats_are_refused(tmp_path, form):
    (tmp_path / "a.png").write_bytes(encoded(pixels(), form))
    with pytest.raises(BrokenImageError, match=r"a\.png is not an image"):
        load(tmp_path)


@pytest.mark.parametrize(("suffix", "form"), [("jpg", "PNG"), ("png", "JPEG"), ("tif", "TIFF"), ("pgm", "PPM")])
def test_the_listed_formats_may_have_each_others_suffix(tmp_path, suffix, form):
    (tmp_path / f"a.{suffix}").write_bytes(encoded(pixels(), form))
    assert len(load(tmp_path)) == 1


@pytest.mark.parametrize("shape", [(1, 60_000), (60_000, 1)])
@pytest.mark.parametrize("size", [None, 224])
def test_a_picture_that_would_be_huge_when_scaled(tmp_path, shape, size):
    (tmp_path / "a.png").write_bytes(encoded(np.zeros((*shape, 3), np.uint8)))
    with pytest.raises(BrokenImageError, match=r"a\.png is not an image .*times as long"):
        load(tmp_path, size=size)


def test_names_with_terminal_codes_are_escaped(tmp_path):
    (tmp_path / "\x1b[2Ja.png").write_bytes(b"nothing")
    with pytest.raises(BrokenImageError) as caught:
        load(tmp_path)
    assert "\\x1b[2Ja.png" in str(caught.value)
    assert "\x1b" not in str(caught.value)


# Folders


def test_a_pipe_is_not_waited_for(tmp_path):
    write_tree(tmp_path / "folder", ["0.png"])
    os.mkfifo(tmp_path / "folder" / "1.png")
    with pytest.raises(ValueError, match=r"folder cannot be read \(1\.png is a pipe"):
        load(tmp_path / "folder")
    os.mkfifo(tmp_path / "images.tar")
    with pytest.raises(ValueError, match=r"images\.tar cannot be read .*regular file"):
        load(tmp_path / "images.tar")


def test_links(tmp_path):
    folder = write_tree(tmp_path / "folder", ["a/0.png", "b/0.png"])
    (folder / "c").symlink_to(folder / "b")  # a second name: as many images as names
    (folder / "a" / "1.png").symlink_to(folder / "a" / "0.png")
    assert len(load(folder)) == 4
    (folder / "a" / "2.png").symlink_to("nowhere")
    with pytest.raises(ValueError, match=r"a/2\.png is a pipe, a device, or a link to nothing"):
        load(folder)
    (folder / "a" / "2.png").unlink()
    (folder / "b" / "loop").symlink_to(folder)
    with pytest.raises(ValueError, match=r"loop is a link to a folder that contains it"):
        load(folder)


# Archives


def tar(path, *members, mode="w", **content):
    """A tar with members as given, and files."""
    with tarfile.open(path, mode) as archive:
        for member in members:
            archive.addfile(member)
        for name, data in content.items():
            member = tarfile.TarInfo(f"{name}.png")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def special(name, kind, link=""):
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, link
    return member


@pytest.mark.parametrize("mode", ["w", "w:gz"])
@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_links_and_devices_in_a_tar(tmp_path, mode, kind):
    path = tar(tmp_path / "a.tar", special("b.png", kind, "a.png"), mode=mode, a=encoded(pixels()))
    with pytest.raises(ValueError, match=r"a\.tar cannot be read \(it holds .*b\.png"):
        load(path)


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
def test_a_tar_that_is_cut_off_anywhere(tmp_path, mode):
    files = {f"f{i}": encoded(pixels(i)) for i in range(4)}
    path = tar(tmp_path / "a.tar", mode=mode, **files)
    whole = path.read_bytes()
    assert len(load(path)) == 4
    end = whole.rstrip(b"\0").__len__() if mode == "w" else len(whole) - 1
    for size in sorted({*range(0, end, max(1, end // 40)), *range(0, end, 512), end}):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"a\.tar"):
            load(path)


def test_a_tar_with_damage_in_its_middle_or_more_at_its_end(tmp_path):
    files = {f"f{i}": encoded(pixels(i)) for i in range(4)}
    path = tar(tmp_path / "a.tar", **files)
    whole = bytearray(path.read_bytes())
    path.write_bytes(whole + whole)
    with pytest.raises(ValueError, match="more after its end"):
        load(path)
    second = 512 + -(-len(files["f0"]) // 512) * 512
    whole[second + 3] ^= 1  # in the header of the second file
    path.write_bytes(whole)
    with pytest.raises(ValueError, match=f"damaged at byte {second}"):
        load(path)


def test_a_tar_whose_file_has_a_negative_size(tmp_path):
    """The next file would be looked for before this one, again and again."""
    member = tarfile.TarInfo("a.png")
    header = bytearray(member.tobuf())
    header[124:136] = (-512).to_bytes(12, "big", signed=True)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    path = tmp_path / "a.tar"
    path.write_bytes(bytes(header) + bytes(10240))
    with pytest.raises(ValueError, match=r"a\.tar"):
        load(path)


def test_a_zero_byte_does_not_turn_a_picture_into_a_folder(tmp_path):
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("a/0.png", "a/1.png"):
            archive.writestr(name, encoded(pixels()))
    path.write_bytes(path.read_bytes().replace(b"a/1.png", b"a/\0.png"))
    with pytest.raises(ValueError, match="has a name that is cut off"):
        load(path)


@pytest.mark.parametrize("form", ["a.zip", "a.tar"])
def test_a_name_twice(tmp_path, form):
    path = tmp_path / form
    if form == "a.tar":
        tar(path, a=encoded(pixels()))
        with tarfile.open(path, "a") as archive:
            archive.addfile(special("a.png", tarfile.REGTYPE))
    else:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a.png", encoded(pixels()))
            with pytest.warns(UserWarning, match="Duplicate"):
                archive.writestr("a.png", encoded(pixels(1)))
    with pytest.raises(ValueError, match=r"holds a\.png twice"):
        load(path)


@pytest.mark.parametrize("form", ["a.zip", "a.tar.gz", "a.tar.xz"])
def test_an_archive_that_grows_out_of_proportion(tmp_path, form):
    path, zeros = tmp_path / form, bytes(2**26 + 1)
    if form == "a.zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("a.png", zeros)
    else:
        tar(path, mode=f"w:{path.suffix[1:]}", a=zeros, b=zeros)
    with pytest.raises(ValueError, match=r"a\.(zip|tar\.[gx]z) .*more than 200 times"):
        load(path)


def test_a_pax_header_that_grows_out_of_proportion(tmp_path):
    """It is read before any file is listed."""
    member = special("x", tarfile.XHDTYPE)
    member.size = 2**28
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(member.tobuf() + bytes(2**10)))
    with pytest.raises(ValueError, match="more than 200 times"):
        load(path)


def test_a_zip_whose_list_ends_early(tmp_path):
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for i in range(3):
            archive.writestr(f"{i}.png", encoded(pixels(i)))
        archive.comment = b"three"
    assert len(load(path)) == 3
    whole = bytearray(path.read_bytes())
    whole[whole.index(b"PK\x01\x02") + 32] = 200  # the first file's comment swallows the others
    path.write_bytes(whole)
    with pytest.raises(ValueError, match=r"a\.zip cannot be read \(its list has 1 files, and it tells of 3\)"):
        load(path)


def test_a_zip_that_lies(tmp_path):
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.png", encoded(np.zeros((64, 64, 3), np.uint8)))
    whole = path.read_bytes()
    place = whole.index(b"PK\x01\x02")
    for offset, size, message in ((24, 4, "does not have the 1 bytes"), (16, 4, "checksum"), (42, 4, "not where")):
        lie = bytearray(whole)
        lie[place + offset : place + offset + size] = (1).to_bytes(size, "little")
        path.write_bytes(lie)
        with pytest.raises(ValueError, match=rf"a\.zip.*{message}"):
            load(path)
    with zipfile.ZipFile(path, "w") as archive:
        link = zipfile.ZipInfo("b.png")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "a.png")
    with pytest.raises(ValueError, match=r"the link b\.png"):
        load(path)


@pytest.mark.parametrize("form", ["folder", "a.zip", "a.tar"])
def test_limits_of_count_and_size(tmp_path, monkeypatch, form):
    path = tmp_path / form
    files = {f"f{i}": encoded(pixels(i)) for i in range(3)}
    if form == "folder":
        write_tree(path, [f"{name}.png" for name in files])
    elif form == "a.tar":
        tar(path, **files)
    else:
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in files.items():
                archive.writestr(f"{name}.png", data)
    monkeypatch.setattr(archives_module, "_FILES", 2)
    with pytest.raises(ValueError, match="more than 2 files"):
        load(path)
    monkeypatch.undo()
    monkeypatch.setattr(archives_module, "_BYTES", 100)
    with pytest.raises(ValueError, match=r"f0\.png.*bytes, and 100 are allowed"):
        load(path)


def test_an_idx_file_that_grows_out_of_proportion(tmp_path):
    write_idx(tmp_path / "a", compress=True)
    head = bytes((0, 0, 8, 3)) + b"".join(n.to_bytes(4, "big") for n in (2**31, 2**31, 2**31))
    (tmp_path / "a" / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(head + bytes(2**20)))
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte\.gz has .*more than 200 times"):
        load(tmp_path / "a")
    (tmp_path / "a" / "train-images-idx3-ubyte.gz").write_bytes(head)
    with pytest.raises(ValueError, match="not complete"):
        load(tmp_path / "a")
