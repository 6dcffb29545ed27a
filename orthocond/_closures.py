"""Steps of an optimizer that compute the gradient themselves, by a closure that is passed to them."""

from collections.abc import Callable
from typing import Any

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def after_closure(args: tuple[Any, ...], kwargs: dict[str, Any], then: Callable[[int], None]) -> Arguments | None:
    """Let something happen inside ``optimizer.step(closure)``, when the gradient is there and not yet used.

    Args:
        args: Positional arguments of the step, the optimizer first, as a hook before it gets them.
        kwargs: Its arguments by name.
        then: Called after each call of the closure, with the number of its calls in this step.

    Returns:
        The arguments for the step, which the hook returns; None if it has no closure.
    """
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):
        return None
    calls = 0

    def closure_and_more() -> Any:
        nonlocal calls
        loss = closure()
        calls += 1
        then(calls)
        return loss

    if len(args) > 1:
        return (args[0], closure_and_more, *args[2:]), kwargs
    return args, kwargs | {"closure": closure_and_more}
