"""Errors of a torch-level trace."""

from __future__ import annotations

from torch.fx import Node

from understudy.errors import Context, UnderstudyError
from understudy.lines import user_line


class MetaTraceError(UnderstudyError, RuntimeError):
    """A program can't be traced further: it reads data, or uses a value that can't be in the graph. `node` is the node of
    the value."""

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
    """An error for the gradient of a parameter, which a torch-level graph does not have."""
    hint = "capture the program with make_fx, or a whole training step with capture_step: their graphs have gradients"
    return MetaTraceError(reason, context=Context(asked, str(name), user_line(), hint))


def make_left_over_error(asked: str) -> MetaTraceError:
    """An error for a proxy that is used after its trace."""
    hint = "if a cache holds it, clear the cache, and run the program once before the next trace"
    reason = "expected values of this trace, got one of an earlier trace"
    return MetaTraceError(reason, context=Context(asked, "a value of a trace", user_line(), hint))


def make_unknown_error(call: str, why: str) -> MetaTraceError:
    """An error for a call whose metadata could not be computed, in a strict trace."""
    hint = "compute it in understudy.manual_meta_overrides, or trace with strict=False"
    return MetaTraceError(
        f"Could not compute metadata for {call}: {why}", context=Context(line=user_line(), hint=hint)
    )
