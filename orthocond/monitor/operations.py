"""Every torch function of a forward and every node of its backward: where values stop being finite, who decomposes."""

import inspect
import linecache
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode, resolve_name

from orthocond.monitor.layer_names import named_layers

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parent.parent)

_DECOMPOSITIONS = ("LinalgEighBackward", "LinalgSvdBackward", "LinalgEigBackward")
# These have the same nodes, but use no eigenvectors, and so no differences of eigenvalues in their gradient.
_VALUES_ONLY = ("eigvalsh", "eigvals", "svdvals", "matrix_norm", "norm", "cond")
# What leaves eigenvalues in their places: the power of them that is used in the end is followed through these.
_IN_PLACE = (
    *("clamp", "clamp_min", "clip", "abs", "relu", "maximum", "max", "where", "add", "__add__", "__radd__", "sub"),
    *("__sub__", "to", "float", "double", "contiguous", "unsqueeze", "squeeze", "diag", "diag_embed", "__getitem__"),
    *("flip", "div", "__truediv__"),
)


@dataclass(frozen=True)
class Call:
    """A torch function that a model called.

    Attributes:
        operation: Its name, such as ``"torch.linalg.eigh"``.
        layer: Name of the innermost module whose forward called it; None outside the model, as in the loss.
        location: File and line of the user's code.
        source: That line.
    """

    operation: str
    layer: str | None
    location: str | None
    source: str | None


@dataclass
class DecompositionCall:
    """A decomposition with eigenvectors that autograd differentiates, and what the model does with its eigenvalues."""

    call: Call
    shape: tuple[int, ...]
    matrices: int
    ties: int  # matrices with two eigenvalues that are equal up to rounding
    rank: int | None  # the least one
    power: float | None = None  # power of the eigenvalues that is used; None if it is not known
    ridge: float = 0.0  # what is added to the eigenvalues


class OperationLog(TorchFunctionMode):
    """Context that follows the torch functions which a model calls.

    Attributes:
        nan: The first call whose result held NaN.
        infinity: The first call whose result held an infinity.
        failed: The last call that raised.
        broken_gradient: The first call whose gradient is not finite and reaches a parameter.
        decompositions: Calls of ``eigh`` or ``svd`` that take part in the gradient.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.nan: Call | None = None
        self.infinity: Call | None = None
        self.failed: Call | None = None
        self.broken_gradient: Call | None = None
        self.decompositions: list[DecompositionCall] = []
        self._names = {id(module): name for name, module in named_layers(model).items()}
        self._modules: list[nn.Module] = []
        self._made_by: dict[Any, Call] = {}  # node of the graph: the call that made it
        self._eigenvalues: dict[int, tuple[Tensor, DecompositionCall, float]] = {}  # by id: itself, whose, its power

    def __enter__(self) -> Self:
        self._handles = [
            register_module_forward_pre_hook(lambda module, args: self._modules.append(module)),
            register_module_forward_hook(self._leave),
        ]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for handle in self._handles:
            handle.remove()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        while self._modules and self._modules.pop() is not module:
            pass  # a module whose forward raised, and somebody caught it
        nodes = list(self._new_nodes([t.grad_fn for t in tensors_in(output) if t.grad_fn is not None]))
        if nodes:  # of a custom autograd.Function, which is no call that a mode sees
            self._made_by.update(dict.fromkeys(nodes, Call("", self._names.get(id(module)), None, None)))

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            output = function(*args, **kwargs)
        except Exception:
            self.failed = self._call(function)[0]
            raise
        results = [t for t in tensors_in(output) if t.is_floating_point()]
        if results:
            self._record(function, args, kwargs, results)
        return output

    def _record(self, function: Any, args: Any, kwargs: Any, results: list[Tensor]) -> None:
        nodes = list(self._new_nodes([t.grad_fn for t in results if t.grad_fn is not None]))
        name = _name(function)
        tensors = list(tensors_in((args, kwargs)))
        self._follow_power(name.rpartition(".")[2], args, results)
        # A constant that is written somewhere, such as the infinities of a mask, is not computed; and what comes from
        # values that are not finite does not begin here.
        inputs = [t for t in tensors if t.is_floating_point() and all(t is not r for r in results)]
        computed = tensors and not any(word in name for word in ("empty", "full", "fill", "__get__"))
        kinds = [
            kind
            for kind in ("nan", "infinity")
            if computed and getattr(self, kind) is None and _holds(results, kind) and not _holds(inputs, kind)
        ]
        decomposes = any(n.name().startswith(_DECOMPOSITIONS) for n in nodes)
        if not (nodes or kinds):
            return
        call, ours = self._call(function)
        self._made_by.update(dict.fromkeys(nodes, call))
        for kind in kinds:
            setattr(self, kind, call)
        if decomposes and not ours and name.rpartition(".")[2] not in _VALUES_ONLY:
            self._add_decomposition(call, tensors[0], results)

    def _new_nodes(self, stack: list[Any]) -> Iterator[Any]:
        """Nodes of the graph that no earlier call made."""
        seen = set()
        while stack:
            node = stack.pop()
            if node not in self._made_by and node not in seen and not hasattr(node, "variable"):
                seen.add(node)
                yield node
                stack += [n for n, _ in node.next_functions if n is not None]

    def _call(self, function: Any) -> tuple[Call, bool]:
        """The call that is being made, and whether this library makes it."""
        layer = next((self._names[id(m)] for m in reversed(self._modules) if id(m) in self._names), None)
        frame = inspect.currentframe()
        ours = False
        while frame is not None:
            file = frame.f_code.co_filename
            if file != __file__ and not file.startswith(_TORCH):
                if not file.startswith(_OURS):
                    break
                ours = True
            frame = frame.f_back
        if frame is None:
            return Call(_name(function), layer, None, None), ours
        path = Path(frame.f_code.co_filename)
        shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        source = linecache.getline(str(path), frame.f_lineno).strip() or None
        return Call(_name(function), layer, f"{shown}:{frame.f_lineno}", source), ours

    def _add_decomposition(self, call: Call, matrix: Tensor, results: list[Tensor]) -> None:
        found = DecompositionCall(call, tuple(matrix.shape), matrix[..., 0, 0].numel(), 0, None)
        self.decompositions.append(found)
        values = [t for t in results if t.ndim == matrix.ndim - 1]
        if len(values) != 1:
            return
        self._eigenvalues[id(values[0])] = values[0], found, 1.0
        ordered = values[0].detach().double().sort(-1).values
        rounding = max(matrix.shape[-2:]) * torch.finfo(matrix.dtype).eps * ordered.abs().amax(-1, keepdim=True)
        found.ties = int((ordered.diff(dim=-1) <= rounding).any(-1).sum())
        found.rank = int((ordered > rounding).sum(-1).min())

    def _follow_power(self, name: str, args: Any, results: list[Tensor]) -> None:
        """Find out whether the model takes the root of the eigenvalues, or its inverse."""
        place = next((i for i, a in enumerate(args[:2]) if id(a) in self._eigenvalues), None)
        if place is None or len(results) != 1:
            return
        _, found, power = self._eigenvalues[id(args[place])]
        other = args[1 - place] if len(args) > 1 else None
        if name in ("sqrt", "rsqrt", "reciprocal", "__rtruediv__", "__rdiv__"):
            power *= {"sqrt": 0.5, "rsqrt": -0.5}.get(name, -1.0)
        elif name in ("pow", "__pow__") and isinstance(other, (int, float)):
            power *= other
        elif name in ("div", "__truediv__") and place == 1:
            power = -power
        elif name not in _IN_PLACE:
            return
        elif "add" in name and power == 1 and isinstance(other, (int, float)):
            found.ridge += other
        if power != 1:
            found.power = power
        self._eigenvalues[id(results[0])] = results[0], found, power

    # Backward

    def gradients(self, loss: Tensor, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """Differentiate without touching ``.grad``, nor the hooks that wait for it; sets `broken_gradient`."""
        broken: dict[Any, bool] = {}  # nodes that returned what is not finite: whether they were given it

        def watch(node: Any) -> Any:
            def after(returned: Any, received: Any) -> None:
                if not _finite(returned):
                    broken[node] = not _finite(received)

            return node.register_hook(after)

        handles = [watch(node) for node in self._made_by]
        try:
            found: list[Tensor | None] = list(torch.autograd.grad(loss.sum(), parameters, allow_unused=True))
        finally:
            for handle in handles:
                handle.remove()
        reached = {id(p) for p, g in zip(parameters, found, strict=True) if not _finite([g])}
        for node, was_given in broken.items():
            if not was_given and _leads_to(node, broken, reached):
                self.broken_gradient = self._named_after(node)
                break
        return found

    def _named_after(self, node: Any) -> Call:
        """The call that made a node, under the name of the function whose backward the node is."""
        call = self._made_by[node]
        name = node.name().partition("Backward")[0]
        if isinstance(node, BackwardCFunction):  # a custom autograd.Function, of which no line is known
            return Call(name, call.layer, None, None)
        known = {"LinalgEigh": "torch.linalg.eigh", "LinalgSvd": "torch.linalg.svd", "LinalgEig": "torch.linalg.eig"}
        if name in known or name.lower() not in call.operation.replace("_", "").lower():
            operation = known.get(name, name)
            if operation != call.operation:
                operation += f" in {call.operation}"
            return Call(operation, call.layer, call.location, call.source)
        return call


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in a nest of tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def _holds(tensors: list[Tensor], kind: str) -> bool:
    test = torch.isnan if kind == "nan" else torch.isinf
    return any(bool(test(t.detach()).any()) for t in tensors)


def _finite(tensors: Iterable[Tensor | None]) -> bool:
    return all(bool(t.detach().isfinite().all()) for t in tensors if t is not None)


def _leads_to(start: Any, nodes: Container[Any], parameters: Container[int]) -> bool:
    """Whether a way through these nodes ends at one of the parameters, given by id."""
    stack, seen = [start], set()
    while stack:
        node = stack.pop()
        if hasattr(node, "variable"):
            if id(node.variable) in parameters:
                return True
        elif node in nodes and node not in seen:
            seen.add(node)
            stack += [n for n, _ in node.next_functions if n is not None]
    return False


def _name(function: Any) -> str:
    return resolve_name(function) or getattr(function, "__name__", repr(function))
