"""The state of a training run as plain data: a tree of numbers, texts and tensors to JSON and safetensors and back."""

import json
import math
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

# What safetensors can hold, so that the error comes before anything is written.
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8)
_DTYPES = (*_FLOATS, *_INTEGERS, torch.complex64, torch.bool)
_DICTS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
_KIND = "$"  # the key that marks a JSON object as something that JSON has no word for


def pack(state: object) -> tuple[Any, dict[str, Tensor]]:
    """A tree of plain values and tensors as a JSON value and a flat dictionary of tensors, exactly.

    The tree may hold None, bool, int, float (infinite and NaN too), str, bytes, list, tuple, dict (keys None, bool,
    int, float or str), OrderedDict with the metadata of a module's ``state_dict``, Counter, tensors, NumPy arrays and
    NumPy numbers: every ``state_dict`` of a module, an optimizer or a scheduler of torch. Order, kind and bits are
    kept, as are the strides of dense tensors. Places that hold the same tensor (tied weights) share one copy, and hold
    one tensor again after `unpack`; tensors that only overlap become independent.

    Args:
        state: The tree.

    Returns:
        The JSON value, and the tensors on the CPU, contiguous, by their path in the tree (``"model/conv1.weight"``).

    Raises:
        TypeError: If the tree holds anything else; the text names the place.

    Example:
        >>> skeleton, tensors = pack({"step": 3, "w": torch.ones(2), "best": float("inf")})
        >>> skeleton
        {'step': 3, 'w': {'$': 'tensor', 'key': 'w'}, 'best': {'$': 'float', 'value': 'inf'}}
        >>> unpack(skeleton, tensors)
        {'step': 3, 'w': tensor([1., 1.]), 'best': inf}
    """
    packer = _Packer()
    return packer.pack(state, ""), packer.tensors


class _Packer:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._keys: dict[tuple[object, ...], str] = {}  # where a tensor lies in memory → its key
        self._alive: list[Tensor] = []  # so that no memory is freed and used again while places are compared

    def pack(self, value: Any, path: str) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {_KIND: "float", "value": repr(value)}
        if kind is list:
            return self._items(value, path)
        if kind is tuple or kind is torch.Size:
            return {_KIND: "tuple", "items": self._items(value, path)}
        if kind in _DICTS:
            return self._dict(value, path)
        if kind in (Tensor, nn.Parameter):
            return self._tensor(value, path)
        if isinstance(value, (np.ndarray, np.generic)):
            return self._array(np.asarray(value), path) | {_KIND: "array" if kind is np.ndarray else "number"}
        if kind is bytes:
            return {_KIND: "bytes", "hex": value.hex()}
        hint = "Store its state_dict() or plain values instead."
        if hasattr(value, "full_tensor"):
            hint = "Gather a sharded tensor with full_tensor()."
        raise TypeError(f"A checkpoint holds plain values and tensors; {_place(path)} is a {kind.__name__}. {hint}")

    def _items(self, values: Any, path: str) -> list[Any]:
        return [self.pack(v, _join(path, i)) for i, v in enumerate(values)]

    def _dict(self, value: dict[Any, Any], path: str) -> Any:
        for key in value:
            if key is not None and type(key) not in (bool, int, float, str):
                raise TypeError(f"Keys in a checkpoint are plain values; {_place(path)} has the key {key!r}.")
        if type(value) is dict and _KIND not in value and all(type(key) is str for key in value):
            return {key: self.pack(v, _join(path, key)) for key, v in value.items()}
        items = [[self.pack(key, path), self.pack(v, _join(path, key))] for key, v in value.items()]
        result = {_KIND: _DICTS[type(value)], "items": items}
        if hasattr(value, "_metadata"):  # of a module's state_dict: the versions of its parts
            result["metadata"] = self.pack(value._metadata, _join(path, "_metadata"))
        return result

    def _tensor(self, value: Tensor, path: str) -> dict[str, Any]:
        value = value.detach()
        if value.layout is not torch.strided or value.is_meta or value.dtype not in _DTYPES:
            raise TypeError(
                f"A checkpoint holds dense tensors of the dtypes of safetensors; {_place(path)} is "
                f"{value.dtype} ({value.layout}, {value.device}). Convert it first."
            )
        memory = (value.data_ptr(), value.device, value.dtype, value.shape, value.stride(), value.is_conj())
        key = self._keys.get(memory)
        if key is None:
            key = self._free_key(path)
            self._keys[memory] = key
            self._alive.append(value)
            self.tensors[key] = torch.empty(value.shape, dtype=value.dtype).copy_(value)
        result: dict[str, Any] = {_KIND: "tensor", "key": key}
        stride = torch.empty_like(value, device="meta").stride()
        if stride != self.tensors[key].stride():
            result["stride"] = list(stride)
        return result

    def _array(self, value: np.ndarray, path: str) -> dict[str, Any]:
        try:
            tensor = torch.from_numpy(value.copy())
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"A checkpoint holds arrays of numbers; {_place(path)} is an array of {value.dtype}."
            ) from error
        return self._tensor(tensor, path)

    def _free_key(self, path: str) -> str:
        """The path, or with a number where another place has the same one; safetensors reserves __metadata__."""
        key, number = path or "state", 1
        while key in self.tensors or key == "__metadata__":
            number += 1
            key = f"{path}#{number}"
        return key


def _join(path: str, key: object) -> str:
    return f"{path}/{key}" if path else str(key)


def _place(path: str) -> str:
    return f"'{path}'" if path else "the state"


def unpack(skeleton: Any, tensors: dict[str, Tensor]) -> Any:
    """The tree that `pack` took apart; its tensors are on the CPU and need no gradient.

    Args:
        skeleton: The JSON value.
        tensors: The tensors by key.

    Returns:
        The tree. Places that shared a tensor share one again.

    Raises:
        ValueError: If the JSON value was not made by `pack`.
    """
    cache: dict[str, Tensor] = {}

    def tensor(node: dict[str, Any]) -> Tensor:
        key = node["key"]
        if key not in cache:
            value = tensors[key]
            if "stride" in node:
                value = torch.empty_strided(value.shape, node["stride"], dtype=value.dtype).copy_(value)
            cache[key] = value
        return cache[key]

    def build(node: Any) -> Any:
        if isinstance(node, list):
            return [build(v) for v in node]
        if not isinstance(node, dict):
            return node
        match node.get(_KIND):
            case None:
                return {key: build(v) for key, v in node.items()}
            case "tensor":
                return tensor(node)
            case "float":
                return float(node["value"])
            case "tuple":
                return tuple(build(node["items"]))
            case "array":
                return tensor(node).numpy()
            case "number":
                return tensor(node).numpy()[()]
            case "bytes":
                return bytes.fromhex(node["hex"])
            case "dict" | "ordered" | "counter" as kind:
                made: Any = next(t for t, name in _DICTS.items() if name == kind)()
                for key, v in node["items"]:
                    made[build(key)] = build(v)
                if "metadata" in node:
                    made._metadata = build(node["metadata"])
                return made
            case kind:
                raise ValueError(f"A checkpoint has no values of the kind {kind!r}; it was made by another program.")

    return build(skeleton)


def to_bytes(state: object) -> bytes:
    """A tree as bytes, to send it to another process; `from_bytes` reads it."""
    skeleton, tensors = pack(state)
    text = dump_json(skeleton)
    return len(text).to_bytes(8, "little") + text + save_tensors(tensors)


def from_bytes(data: bytes) -> Any:
    """The tree that `to_bytes` wrote."""
    end = 8 + int.from_bytes(data[:8], "little")
    return unpack(json.loads(data[8:end]), load_tensors(data[end:]))


def dump_json(value: Any) -> bytes:
    """JSON as always the same bytes: order as given, no spaces, ASCII, no NaN."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
