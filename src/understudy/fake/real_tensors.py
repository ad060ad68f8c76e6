"""Real tensors beside stand-ins: `FakeTensorMode(propagate_real_tensors=True)`.

    a stand-in ──► outcomes, as always ──► compared with the real results ──► x.real_tensor
    x.real_tensor ──► the real operator ──┘                               └──► the value of each new symbol

Each operator also runs on the real tensors of its inputs, where all of them have one. A read of data is answered by
them: with a plain number or size; in a mode with a `ShapeEnv` by an unbacked symbol whose real value decides where nothing
else does (and is checked when the graph runs). It is for those who ask for it: kernels run, and the cache is off.

Real tensors are copies, so that writes do not reach the tensors of the program; views of one storage share one copy.
Those of a device that is not there are on the CPU.
"""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any

import torch

from understudy import _torch
from understudy.errors import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    MetadataMismatchError,
    UnderstudyError,
)
from understudy.fake.native import canonical
from understudy.fake.realise import convert_sparse, make_new
from understudy.fake.tensor import FakeTensor
from understudy.shapes.algebra.expr import Expr
from understudy.shapes.node import SymNode
from understudy.spec import TensorSpec
from understudy.spec.call import flat, map_structure
from understudy.spec.error_context import with_line
from understudy.spec.sparse import is_sparse

if TYPE_CHECKING:
    from understudy.fake.mode import FakeTensorMode

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
CPU = torch.device("cpu")
HINT = (
    "correct the fake implementation of the operator: the function registered with torch.library.register_fake, or the "
    "understudy.rule; or report it, if the operator is torch's own"
)


class _Outermost(threading.local):
    """Whether an operator of this thread is being answered: those inside a composite run as parts of it."""

    is_running = False


_outermost = _Outermost()


class UnknownReal(Exception):
    """An argument has no real value."""


def dispatch(mode: FakeTensorMode, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """One operator call: its answer, with real tensors for the stand-ins in it."""
    if _outermost.is_running or isinstance(func, _torch.HigherOrderOperator):
        return mode._dispatch_any(func, types, args, kwargs)
    _outermost.is_running = True
    try:
        return _dispatch_outermost(mode, func, types, args, kwargs)
    finally:
        _outermost.is_running = False


def _dispatch_outermost(mode: FakeTensorMode, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    real_call = _find_real_arguments(args, kwargs)
    inputs = flat(FakeTensor, args, kwargs)
    result: Any = None
    refusal: UnderstudyError | None = None
    try:
        result = mode._dispatch_any(func, types, args, kwargs)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        if real_call is None:
            raise
        refusal = error
    if result is NotImplemented or real_call is None:
        return result
    with _torch.no_modes(), _torch.inference_mode(False), _torch.grad_mode(False):
        real = func(*real_call[0], **real_call[1])
    if refusal is None:
        try:
            _compare(mode, func, inputs, flat(torch.Tensor, *real_call), result, real)
        except MetadataMismatchError:
            if not any(_torch.switches("generate_fake_kernels_from_real_mismatches")):
                raise
        else:
            return result
    device = inputs[0]._spec.device if inputs else None
    return map_structure(lambda tensor: make_from_real(mode, tensor, device), torch.Tensor, real)


# --- real values of arguments ------------------------------------------------------------------------------------------


def _find_real_arguments(args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """The arguments with real tensors and plain numbers; None if one of them has no real value."""
    try:
        real: tuple[Any, Any] = map_structure(
            _find_real, (torch.Tensor, *SYMBOLIC), (tuple(args), dict(kwargs))
        )
    except UnknownReal:
        return None
    used = {tensor.device.type for tensor in flat(torch.Tensor, *real)} | {"cpu", "meta"}
    return map_structure(lambda device: device if device.type in used else CPU, torch.device, real)


def _find_real(value: Any) -> Any:
    if isinstance(value, SYMBOLIC):
        number = real_number(value)
        if number is None:
            raise UnknownReal
        return number
    if type(value) is not FakeTensor:
        return value
    if value.real_tensor is None or value.real_tensor.device.type == "meta":
        raise UnknownReal
    return value.real_tensor


def real_number(value: Any) -> Any:
    """The number that a symbolic one is for the real tensors; None if that is not known."""
    node = value if type(value) is SymNode else getattr(value, "node", None)
    if type(node) is SymNode:
        return node.shape_env.decisions.get_real_value(node.value)
    return value if node is None else node.hint


# --- results -------------------------------------------------------------------------------------------------------------


def make_from_real(mode: FakeTensorMode, real: torch.Tensor, device: torch.device | None) -> FakeTensor:
    """A stand-in with the metadata of a real result."""
    if is_sparse(real):
        fake = convert_sparse(mode, real)
    else:
        where = canonical(real.device if device is None else device)
        spec = TensorSpec(
            tuple(real.shape), real.stride(), real.storage_offset(), dtype=real.dtype, device=where
        )
        fake = make_new(mode, spec)
    fake.real_tensor = real
    return fake


def _compare(mode: FakeTensorMode, func: Any, inputs: Any, real_inputs: Any, result: Any, real: Any) -> None:
    """Compare an answer with the real result, part by part, and give each stand-in its real tensor."""
    parts, real_parts = (_torch.tree_flatten(value)[0] for value in (result, real))
    if len(parts) != len(real_parts):
        raise _make_error(func, inputs, f"{len(parts)} results", f"{len(real_parts)} results")
    for part, real_part in zip(parts, real_parts, strict=True):
        if type(part) is FakeTensor and isinstance(real_part, torch.Tensor):
            _compare_tensor(func, inputs, real_inputs, part, real_part)
            part.real_tensor = real_part
        elif isinstance(part, SYMBOLIC):
            if not learn_real_value(part, real_part):
                raise _make_error(func, inputs, f"{part} = {real_number(part)}", str(real_part))
        elif isinstance(part, (int, float, bool)) and not _is_same_number(part, real_part):
            raise _make_error(func, inputs, repr(part), repr(real_part))


def _is_same_number(a: Any, b: Any) -> bool:
    return a == b or (isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b))


def _compare_tensor(func: Any, inputs: Any, real_inputs: Any, fake: FakeTensor, real: torch.Tensor) -> None:
    spec = fake._spec
    is_as_expected = (
        spec.dtype is real.dtype
        and spec.layout is real.layout
        and len(spec.shape) == real.dim()
        and all(learn_real_value(size, number) for size, number in zip(spec.shape, real.shape, strict=True))
    )
    if is_as_expected and spec.layout is torch.strided:
        if (
            spec.device.type == real.device.type and real.numel()
        ):  # kernels of other devices have other strides
            strides = zip(spec.stride, real.stride(), real.shape, strict=True)
            is_as_expected = all(size == 1 or learn_real_value(a, b) for a, b, size in strides)
        shared = [_torch.storage_id(fake) == _torch.storage_id(other) for other in inputs]
        is_shared = [_torch.storage_id(real) == _torch.storage_id(other) for other in real_inputs]
        if is_as_expected and real.numel() and shared != is_shared and len(shared) == len(is_shared):
            theirs, ours = ("shares memory with " + _list_inputs(flags) for flags in (is_shared, shared))
            raise _make_error(func, inputs, f"{spec}, which {ours}", f"one that {theirs}")
    if not is_as_expected:
        found = TensorSpec(tuple(real.shape), real.stride(), dtype=real.dtype, device=canonical(real.device))
        raise _make_error(func, inputs, str(spec), str(found))


def _list_inputs(flags: list[bool]) -> str:
    shared = [str(position) for position, flag in enumerate(flags) if flag]
    return f"tensor {', '.join(shared)} of the inputs" if shared else "no input"


def learn_real_value(value: Any, real: Any) -> bool:
    """Give a new symbol its real value. Returns whether a known number is as expected."""
    node = value if type(value) is SymNode else getattr(value, "node", None)
    if type(node) is not SymNode:
        return bool(value == real)
    known = real_number(node)
    if known is not None:
        return _is_same_number(known, real)
    symbol = node.value
    env = node.shape_env
    if isinstance(symbol, Expr) and symbol.is_symbol:
        env.real_values[symbol] = real
    elif node.kind is bool and symbol in env.truths:
        env.real_values[env.truths[symbol]] = int(real)
    elif getattr(symbol, "unbacked_symbol", None) is not None:
        env.real_values[symbol.unbacked_symbol] = real
    return True  # of an expression of several new symbols, each gets its value elsewhere


def _make_error(func: Any, inputs: Any, ours: str, theirs: str) -> UnderstudyError:
    specs = ", ".join(str(fake._spec) for fake in inputs)
    return with_line(
        MetadataMismatchError(f"{func}: the stand-in of the result is {ours}, and the real result is {theirs}"),
        str(func), specs, HINT,
    )  # fmt: skip
