"""What the processes of one run have to agree on; with one process nothing is sent."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor


def rank() -> int:
    """The number of this process, 0 if there is only one."""
    return dist.get_rank() if _several() else 0


def world_size() -> int:
    """How many processes there are."""
    return dist.get_world_size() if _several() else 1


_acting = False  # whether this process is in an action of `from_rank_0`, for whose end all others wait


def from_rank_0(action: Callable[[], bytes]) -> bytes:
    """What ``action`` returns on rank 0, on every rank; its error, too, so that no rank waits for one that stopped.

    An action may call functions that call this again: they then act alone.
    """
    global _acting
    if _acting or not _several():
        return action()
    error: Exception | None = None
    message = b""
    if rank() == 0:
        _acting = True
        try:
            message = b"+" + action()
        except Exception as e:
            error, message = e, b"-" + f"{type(e).__name__}: {e}".encode()
        finally:
            _acting = False
    size = torch.tensor([len(message)], device=_device())
    dist.broadcast(size, 0)
    data = _as_tensor(message, int(size)).to(_device())
    dist.broadcast(data, 0)
    if error is not None:
        raise error
    message = bytes(data.cpu().numpy())
    if message[:1] == b"-":
        raise RuntimeError(f"Rank 0 failed, so this rank stops: {message[1:].decode()}")
    return message[1:]


def gather(message: bytes) -> list[bytes]:
    """The messages of all ranks, on every rank."""
    if not _several():
        return [message]
    sizes = [torch.zeros(1, dtype=torch.int64, device=_device()) for _ in range(world_size())]
    dist.all_gather(sizes, torch.tensor([len(message)], device=_device()))
    longest = max(int(size) for size in sizes)
    parts = [torch.empty(longest, dtype=torch.uint8, device=_device()) for _ in sizes]
    dist.all_gather(parts, _as_tensor(message, longest).to(_device()))
    return [bytes(part.cpu().numpy())[: int(size)] for part, size in zip(parts, sizes, strict=True)]


def largest(value: int) -> int:
    """The largest of the ranks' values, on every rank."""
    if not _several():
        return value
    result = torch.tensor([value], device=_device())
    dist.all_reduce(result, dist.ReduceOp.MAX)
    return int(result)


def _as_tensor(message: bytes, size: int) -> Tensor:
    return torch.frombuffer(bytearray(message.ljust(size)[:size]), dtype=torch.uint8)


def _several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _device() -> torch.device:
    """Where the backend can send from: the CPU, but for NCCL the GPU."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
