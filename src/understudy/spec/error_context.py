"""Adds context to errors: the line of the user's code, the operator, the specs, a hint."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from understudy.errors import (
    ArgumentError,
    Context,
    DataDependentOutputException,
    DimensionError,
    DtypeError,
    DynamicOutputShapeException,
    FakeTensorDeviceMismatchError,
    ModeOrderError,
    OperatorError,
    ShapeMismatch,
    UnderstudyError,
    UnsupportedOperatorException,
)
from understudy.lines import is_in_package, is_inside_torch, user_line
from understudy.shapes.node import SymNode
from understudy.spec import TensorSpec
from understudy.spec.call import Call, describe, flat


class OperatorTypeError(OperatorError, TypeError):
    """An error that is a TypeError in eager."""


class OperatorNotImplemented(OperatorError, NotImplementedError):
    """An error that is a NotImplementedError in eager."""


class MissingKernel(UnsupportedOperatorException, OperatorNotImplemented):
    """No kernel of torch takes such tensors: not in eager either."""


OperatorLinAlgError: Any = type(
    "OperatorLinAlgError",
    (OperatorError, torch.linalg.LinAlgError),
    {"__doc__": "An error that is a LinAlgError in eager."},
)


_BY_BUILTIN: tuple[tuple[type[Exception], type[OperatorError]], ...] = (
    (IndexError, DimensionError),
    (ValueError, ArgumentError),
    (TypeError, OperatorTypeError),
    (NotImplementedError, OperatorNotImplemented),
    (torch.linalg.LinAlgError, OperatorLinAlgError),
)
HINTS: tuple[tuple[type[UnderstudyError], str], ...] = (
    (
        DataDependentOutputException,
        "the value is unknown without data. In a mode with a ShapeEnv, .item() returns a symbol; elsewhere, "
        "use torch.where instead of a branch, or move the branch out of the code that runs on stand-ins",
    ),
    (
        DynamicOutputShapeException,
        "the size is unknown without data. In a mode with a ShapeEnv, nonzero, masks and unique return "
        "symbolic sizes; elsewhere, use an operator with a fixed size "
        "(torch.where, nonzero_static, multiplication by the mask)",
    ),
    (FakeTensorDeviceMismatchError, "move one of them with .to(device)"),
    (
        MissingKernel,
        "real tensors fail as well: convert them to a layout or dtype that has a kernel",
    ),
    (
        UnsupportedOperatorException,
        "register a fake implementation with torch.library.register_fake, or a rule on specs with understudy.rule",
    ),
    (ShapeMismatch, "real tensors of these shapes fail as well: make the shapes fit at that line"),
    (DtypeError, "real tensors of these dtypes fail as well: convert one of them with .to(dtype)"),
    (OperatorError, "real tensors fail as well: correct the arguments at that line"),
)


IN_PACKAGES: tuple[tuple[type[UnderstudyError], str], ...] = (
    (
        DataDependentOutputException,
        "a package reads the value, which is unknown without data. In a mode with a ShapeEnv, .item() "
        "returns a symbol; elsewhere, choose options that avoid the read, or run this part on real tensors",
    ),
    (
        DynamicOutputShapeException,
        "a package reads the size, which is unknown without data. In a mode with a ShapeEnv, it is a "
        "symbol; elsewhere, choose options that avoid the read, or run this part on real tensors",
    ),
    (OperatorError, "real tensors fail as well: change the arguments that your line passes to the package"),
)
"""Hints for errors in the code of installed packages, which users can't change."""


IN_DISTRIBUTIONS = (
    "torch.distributions checks the values of its arguments, which are not known without data: pass validate_args=False, or "
    "call torch.distributions.Distribution.set_default_validate_args(False)"
)


def hint_for(error: UnderstudyError) -> str:
    if isinstance(error, DataDependentOutputException) and is_inside_torch("distributions"):
        return IN_DISTRIBUTIONS
    if is_in_package():
        for kind, hint in IN_PACKAGES:
            if isinstance(error, kind) and not isinstance(error, FakeTensorDeviceMismatchError):
                return hint
    return next((hint for kind, hint in HINTS if isinstance(error, kind)), "")


def with_context(error: Exception, call: Call, assumed: Sequence[str] = ()) -> UnderstudyError:
    """The error to raise in place of `error`: ours, with its context. `assumed`: integers that were made up for missing
    data so far."""
    if not isinstance(error, UnderstudyError):
        error = translate(error, call)
    hint = hint_for(error)
    if assumed and isinstance(error, ShapeMismatch):
        hint = ASSUMED_SIZES.format("; ".join(assumed))
    sizes = (
        hints_of_symbols(flat(TensorSpec, call.args, call.kwargs)) if isinstance(error, ShapeMismatch) else ""
    )
    if sizes:
        hint = hint.replace("of these shapes", f"of these shapes ({sizes})")
    context = Context(str(call.op), describe(call.args, call.kwargs), user_line(), hint)
    return error.with_context(context, call.op)


ASSUMED_SIZES = (
    "integers made up for missing data may contradict each other ({}); real tensors may not fail here. Try "
    "answers='worst' (--answers worst), or a policy of your own"
)


def hints_of_symbols(specs: Iterable[TensorSpec]) -> str:
    """The hints of the symbols in these shapes: `batch = 4, seq = 6`."""
    examples: dict[str, int] = {}
    for size in (size for spec in specs for size in spec.shape if type(size) is SymNode):
        env: Any = size.shape_env
        for symbol in getattr(env.simplify(size.value), "symbols", ()):
            if symbol in env.hints and symbol not in env.definitions:
                examples[symbol.name] = env.hints[symbol]
    return ", ".join(f"{name} = {examples[name]}" for name in sorted(examples))


def translate(error: Exception, call: Call) -> UnderstudyError:
    """Convert an exception of torch to one of ours, of the same built-in class."""
    kind = next((ours for builtin, ours in _BY_BUILTIN if isinstance(error, builtin)), OperatorError)
    return kind(f"{call.op}: {error}", func=call.op)


def with_line(error: UnderstudyError, what: str, inputs: object = "", hint: str = "") -> UnderstudyError:
    """Add context to an error outside of an operator call."""
    return error.with_context(Context(what, str(inputs), user_line(), hint or hint_for(error)))


def make_unsized_sparse_error(what: str, inputs: object) -> UnderstudyError:
    """An error for a sparse tensor whose size would follow from its indices."""
    reason = "a sparse tensor without size= derives its size from its indices, which have no data"
    return with_line(DynamicOutputShapeException(reason), what, inputs, "pass size=")


MODE_ORDER_HINT = (
    "leave the modes of a thread in reverse order. Tasks of asyncio and generators share a thread: keep `await` and "
    "`yield` out of the `with` block, or run each task in a thread of its own (asyncio.to_thread)"
)


def refuse_order(entry: object, mode: object, exception: tuple[object, ...]) -> None:
    """Raise because a mode was left that is not the innermost one. Does not replace an exception that is being raised,
    except GeneratorExit."""
    name = type(mode).__name__
    reason = (
        f"{name}.__exit__: this thread has not entered the mode, or has left it"
        if entry is None
        else f"{name}.__exit__: another mode was entered after this one and is still active; this one has ended"
    )
    error = with_line(ModeOrderError(reason), f"{name}.__exit__", "", MODE_ORDER_HINT)
    under_way = exception[1] if len(exception) > 1 else None
    if under_way is None or isinstance(under_way, GeneratorExit):
        raise error
    if hasattr(under_way, "add_note"):
        under_way.add_note(str(error))
