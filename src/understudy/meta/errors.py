"""Errors of a torch-level trace."""

from __future__ import annotations

from torch.fx import Node

from understudy.errors import Context, UnderstudyError
from understudy.lines import user_line


class MetaTraceError(UnderstudyError, RuntimeError):
    """A traced value was used in a data-dependent way. `node` is the value's node."""

    node: Node | None = None

    def __str__(self) -> str:
        where = [f"  node:    {self.node.format_node()}"] if self.node is not None else []
        return "\n".join([self.reason, *where, *self.context.lines()])


HINT = (
    "use torch.where instead of a branch, give an example of the argument in meta_args, fix it in concrete_args, "
    "or keep the function whole with torch.fx.wrap"
)


def make_refused_error(reason: str, asked: str, shown: str, node: Node) -> MetaTraceError:
    """An error for a data-dependent use of the value of `node`, whose metadata is `shown`."""
    error = MetaTraceError(reason, context=Context(asked, shown, user_line(), HINT))
    error.node = node
    return error


def make_unregistered_error(reason: str, what: str) -> MetaTraceError:
    """An error for a module with parameters that is not part of the traced module."""
    hint = "register it: make it in __init__, and assign it to an attribute of the traced module there"
    return MetaTraceError(reason, context=Context(what, "…", user_line(), hint))


def make_gradient_error(reason: str, asked: str, name: object) -> MetaTraceError:
    """An error for the gradient of a parameter, which there is not at torch's level."""
    hint = "capture the program with make_fx, or a whole training step with capture_step: their graphs have gradients"
    return MetaTraceError(reason, context=Context(asked, str(name), user_line(), hint))


def make_left_over_error(asked: str) -> MetaTraceError:
    """An error for a value that is used after its trace."""
    hint = (
        "something kept it when the program was traced, as a cache does. Empty that, and fill it before the next trace by "
        "running the program once"
    )
    reason = "a value of a trace that is over is used, and there is nothing behind it"
    return MetaTraceError(reason, context=Context(asked, "a value of a trace", user_line(), hint))
