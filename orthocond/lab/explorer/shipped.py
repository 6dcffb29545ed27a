"""The generator that comes with the package: discs of 32 x 32 pixels, the averaged one of a GAN trained on sprites."""

import json
from functools import cache
from importlib.resources import files

from safetensors.torch import load

from orthocond.gans import SimpleGenerator
from orthocond.lab.devices import one_thread
from orthocond.lab.explorer.page import Exhibit
from orthocond.lab.explorer.sources import from_module

_FILE = files("orthocond.lab.explorer") / "static" / "sprites.safetensors"


def settings() -> dict[str, str]:
    """How the network was made, and the command that trained it."""
    content = _FILE.read_bytes()
    length = int.from_bytes(content[:8], "little")
    found: dict[str, str] = json.loads(content[8 : 8 + length])["__metadata__"]
    return found


def generator() -> SimpleGenerator:
    """The generator, in evaluation mode.

    Example:
        >>> generator()(torch.zeros(1, 6)).shape
        torch.Size([1, 3, 32, 32])
    """
    made = SimpleGenerator(**json.loads(settings()["arguments"]))
    made.load_state_dict(load(_FILE.read_bytes()))
    return made.eval()


@cache
def exhibit() -> Exhibit:
    """The generator with its directions, for a page; it is made once in a process."""
    with one_thread():  # a network this small has nothing to share
        return from_module(generator(), "Sprites", sprites=True)
