"""Which parameter a layer has, which matrices it is, and which groups: the one place that knows."""

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from orthocond._checks import check_floating
from orthocond.matrix import matrix_view

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED_CONVOLUTIONS = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)

# The parameters of each kind of layer that are matrices. Attention has one weight for query, key and value, or three.
_MATRICES: tuple[tuple[tuple[type[nn.Module], ...], tuple[str, ...]], ...] = (
    ((nn.Linear, *CONVOLUTIONS, *TRANSPOSED_CONVOLUTIONS), ("weight",)),
    ((nn.MultiheadAttention,), ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")),
)


def groups_of(module: nn.Module, name: str = "weight") -> int:
    """Number of matrices that a weight has as row blocks.

    They are the groups of a convolution, three for the common weight of query, key and value in
    ``nn.MultiheadAttention``, and one for everything else.
    """
    if name == "weight" and isinstance(module, CONVOLUTIONS + TRANSPOSED_CONVOLUTIONS):
        return int(module.groups)
    return 3 if name == "in_proj_weight" and isinstance(module, nn.MultiheadAttention) else 1


def matrices(weight: Tensor, groups: int) -> Tensor:
    """The matrix view ``(groups, rows, columns)``, with the dimension of groups also for one group."""
    view = matrix_view(weight, groups)
    return view if groups > 1 else view.unsqueeze(0)


def own_parametrizations(module: nn.Module) -> None:
    """Separate a copied module from its original, so that its parametrizations can be removed.

    The property that computes a parametrized tensor belongs to the class, which a copy shares with the original. And
    the value is written into the raw tensors, which others may share.
    """
    cls = type(module)
    module.__class__ = type(cls.__name__, cls.__bases__, dict(vars(cls)))
    for parametrization in module.parametrizations.values():  # type: ignore[operator]
        for key, parameter in list(parametrization.named_parameters(recurse=False)):
            setattr(parametrization, key, nn.Parameter(parameter.detach().clone(), parameter.requires_grad))


def find_parameter(module: nn.Module, name: str, caller: str) -> nn.Parameter:
    """Return the parameter that a treatment may act on, else raise what is wrong with it."""
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"{caller} needs a torch.nn.Module; got {type(module).__name__}. Pass the layer, not its weight."
        )
    if parametrize.is_parametrized(module, name):
        raise RuntimeError(
            f"{caller} needs a plain parameter; {name!r} of {type(module).__name__} is already parametrized. Remove "
            f"the parametrization with torch.nn.utils.parametrize.remove_parametrizations(module, {name!r}) first."
        )
    parameter = dict(module.named_parameters(recurse=False)).get(name)
    if parameter is None:
        names = [n for n, p in module.named_parameters(recurse=False) if is_lazy(p) or p.ndim > 1]
        has = f"it has {', '.join(map(repr, names))}" if names else "it has no matrices of its own"
        raise ValueError(
            f"{caller} needs a module with a parameter {name!r}; {type(module).__name__} has none ({has}). Pass the "
            "Linear or convolution itself, and name= if its weight has another name."
        )
    if is_lazy(parameter):
        raise RuntimeError(f"{caller} needs an initialized {name!r}; run one batch through the lazy module first.")
    check_floating(parameter, caller)
    if parameter.ndim < 2 or parameter.numel() == 0:
        raise ValueError(
            f"{caller} needs a non-empty weight of at least two dimensions; {name!r} of {type(module).__name__} has "
            f"shape {tuple(parameter.shape)}. Biases and norm scales are not matrices."
        )
    return parameter


def raw_parameter(module: nn.Module, name: str, caller: str) -> tuple[Tensor, str]:
    """Return the parameter behind ``module.name`` that an optimizer owns, and its name within the module.

    It is the parameter itself, or the original one behind a parametrization.
    """
    found = _raw_parameter(module, name)
    if found is not None:
        return found
    kind = parametrize.type_before_parametrizations(module).__name__
    if parametrize.is_parametrized(module, name):
        raise ValueError(f"{kind}.{name} is parametrized by several parameters; {caller} needs one. Pass that one.")
    raise ValueError(
        f"{caller} needs a module with a parameter {name!r}; {kind} has none. Pass the layer itself, name= if its "
        "weight has another name, or the parameter."
    )


def _raw_parameter(module: nn.Module, name: str) -> tuple[Tensor, str] | None:
    if parametrize.is_parametrized(module, name):
        original = getattr(module.parametrizations[name], "original", None)  # type: ignore[index]
        return None if original is None else (original, f"parametrizations.{name}.original")
    parameter = dict(module.named_parameters(recurse=False)).get(name)
    return None if parameter is None else (parameter, name)


def find_matrices(model: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """All weights of a model that are matrices, each as the path of its module, the module, and the parameter's name.

    They are the weights of linear layers and convolutions, and the input projections of ``nn.MultiheadAttention``.
    Biases, norms, embeddings, recurrent layers and parameters of other modules are not among them, nor is a weight that
    an embedding shares, or one that is parametrized by several parameters.
    """
    embedded = {id(m.weight) for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}
    found = []
    for path, module in model.named_modules():
        for kinds, names in _MATRICES:
            for name in names if isinstance(module, kinds) else ():
                raw = _raw_parameter(module, name)
                if raw is not None and id(raw[0]) not in embedded:
                    found.append((path, module, name))
    return found


def check_full_rank(q: Tensor, caller: str) -> None:
    """Raise a `ValueError` if polar factors ``(groups, m, n)`` left out a direction that had no singular value."""
    size = min(q.shape[-2:])
    rank = round(float(q.square().sum((-2, -1)).min()))
    if rank < size:
        raise ValueError(
            f"{caller} needs a weight of full rank, whose nearest orthogonal matrix is unique; this one has rank "
            f"{rank} of {size}. Initialize it first, for example with torch.nn.init.orthogonal_(module.weight)."
        )
