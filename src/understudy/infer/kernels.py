"""Torch's own kernels as sources of answers: the meta kernel, the real one on zeros; and that as the judge of refusals.

A rule knows in general what an operator refuses; eager knows it of each call: a kernel that is missing for a dtype is not
missed by an empty tensor, and which built-in exception says so differs from operator to operator. Refusals are rare, so
asking costs nothing that anybody would notice. Small calls that are out of the ordinary (no elements, complex numbers,
`out=`, operators without a rule of ours) are rare, too: there, eager is asked about what would be taken as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any, NoReturn

import torch

from understudy import _torch
from understudy.errors import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorDeviceMismatchError,
    GuardOnDataDependentSymNode,
    UnderstudyError,
    UnsupportedFakeTensorException,
    UnsupportedMutationAliasingException,
    UnsupportedOperatorException,
)
from understudy.ops.registry import record_of
from understudy.ops.shared.dtypes import COMPLEX_HALF, FLOAT8, UNSIGNED
from understudy.ops.traits.caching import uncacheable
from understudy.ops.traits.devices import device_of
from understudy.ops.traits.writes import may_trust_arguments, written_inputs
from understudy.shapes.node import SymNode
from understudy.shapes.sizes import from_torch, to_torch
from understudy.spec import Changed, New, Outcomes, Same, TensorSpec, Value, View
from understudy.spec.call import Call, flat, map_structure
from understudy.spec.error_context import translate, with_context
from understudy.spec.sparse import is_sparse, sparse_on, spec_of_sparse

META = torch.device("meta")
CPU = torch.device("cpu")


class MetaTensorOfDevice(torch.Tensor):
    """A plain meta tensor that remembers which device it stands for: some of torch's meta functions ask."""

    fake_device: torch.device
    fake_mode = None
    __torch_function__ = _torch.no_torch_function
    __torch_dispatch__ = _torch.no_torch_dispatch

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return _torch.torch_fake_tensor_class()


def strided_on(spec: TensorSpec, device: torch.device, zero: bool = False) -> torch.Tensor:
    """A tensor of torch's own with this spec's metadata, on another device."""
    if spec.sparse is not None:
        return sparse_on(spec, device)
    if spec.is_symbolic:
        return _symbolic_on(spec, device)
    extent = spec.offset + 1
    for size, step in zip(spec.shape, spec.stride, strict=True):
        if size == 0:
            extent = spec.offset
            break
        extent = extent + (size - 1) * step
    make = torch.zeros if zero else torch.empty
    tensor = make((extent,), dtype=spec.dtype, device=device).as_strided(*spec.numbers)
    if spec.conj:
        _torch.set_conj(tensor, True)
    if spec.neg:
        _torch.set_neg(tensor, True)
    return tensor


def _symbolic_on(spec: TensorSpec, device: torch.device) -> torch.Tensor:
    if device.type != "meta":
        raise UnsupportedOperatorException("the real kernel can't run on symbolic sizes")
    shape, stride = [to_torch(size) for size in spec.shape], [to_torch(size) for size in spec.stride]
    return torch.empty_strided(shape, stride, dtype=spec.dtype, device=device)


def spec_of_result(tensor: torch.Tensor, device: torch.device) -> TensorSpec:
    if is_sparse(tensor):
        return spec_of_sparse(tensor, device)
    if tensor.layout is not torch.strided:
        raise UnsupportedOperatorException(f"a result of layout {tensor.layout} can't be described")
    shape, stride = map(from_torch, tensor.shape), map(from_torch, tensor.stride())
    return TensorSpec(
        tuple(shape), tuple(stride), from_torch(tensor.storage_offset()), dtype=tensor.dtype, device=device,
        conj=tensor.is_conj(), neg=tensor.is_neg(),
    )  # fmt: skip


def run_meta_kernel(call: Call) -> Any:
    def stand_in(spec: TensorSpec) -> torch.Tensor:
        tensor = _torch.make_subclass(MetaTensorOfDevice, strided_on(spec, META))
        tensor.fake_device = spec.device
        return tensor

    try:
        return _run(call, stand_in, META)
    except NotImplementedError:
        return NotImplemented
    except RuntimeError as error:
        if any(spec.is_symbolic for spec in call.inputs) and any(words in str(error) for words in NEEDS_INTEGERS):
            return NotImplemented
        raise


NEEDS_INTEGERS = ("with symbolic sizes/strides", "only concrete integers", "called with NO overloaded args")
"""How C++ says that it wants to read sizes as plain integers."""


def with_fixed_sizes(call: Call) -> Call:
    """The call at the sizes at hand, which are assumed from now on."""
    return _with_numbers(call, int)


def with_sizes_at_hand(call: Call) -> Call:
    """The call at the sizes at hand, of which nothing is assumed: for a question whose answer is not kept."""
    return _with_numbers(call, _hint)


def _with_numbers(call: Call, number: Callable[[Any], int]) -> Call:
    def in_numbers(spec: TensorSpec) -> TensorSpec:
        if not spec.is_symbolic:
            return spec
        return spec.as_view([number(n) for n in spec.shape], [number(n) for n in spec.stride], number(spec.offset))

    args, kwargs = map_structure(in_numbers, TensorSpec, (call.args, call.kwargs))
    args, kwargs = map_structure(number, SymNode, (args, kwargs))
    return Call.of(call.op, args, kwargs)


def run_real_kernel(call: Call) -> Any:
    try:
        return run_on_zeros(call)
    except NotImplementedError as error:
        raise UnsupportedOperatorException(
            f"{call.op} has neither a rule nor a kernel that could tell: {str(error).splitlines()[0]}",
            func=call.op,
        ) from error


def run_on_zeros(call: Call, make: Callable[[TensorSpec], torch.Tensor] | None = None) -> Any:
    """What the real operator does, or raises, on tensors of zeros, or on those that `make` gives for the specs in order.

    The state of the random numbers stays.
    """
    state = torch.random.get_rng_state()
    # Without an explicit choice torch warns, once in a process, that it does not check indices of sparse tensors.
    unchecked = torch.sparse.check_sparse_tensor_invariants(enable=False)
    try:
        with unchecked if any(spec.sparse is not None for spec in call.inputs) else nullcontext():
            return _run(call, make or (lambda spec: strided_on(spec, CPU, zero=True)), CPU)
    finally:
        torch.random.set_rng_state(state)


def _run(call: Call, stand_in: Any, native: torch.device) -> Any:
    """Call the operator on stand-ins, past every mode, and say what it did."""
    device = result_device(call)
    stand_ins: list[torch.Tensor] = []

    def place(spec: TensorSpec) -> torch.Tensor:
        stand_ins.append(stand_in(spec))
        return stand_ins[-1]

    guard = _torch.NoDispatch()
    try:
        args = map_structure(place, TensorSpec, call.args)
        kwargs = map_structure(place, TensorSpec, call.kwargs)
        args, kwargs = map_structure(lambda _: native, torch.device, (args, kwargs))
        args, kwargs = map_structure(to_torch, SymNode, (args, kwargs))
        result = call.op(*args, **kwargs)
        return outcomes_of(result, stand_ins, call, lambda tensor: spec_of_result(tensor, device))
    finally:
        del guard


def result_device(call: Call) -> torch.device:
    asked = call.kwargs.get("device")
    return asked or device_of(call) or CPU


def outcomes_of(result: object, inputs: Sequence[torch.Tensor], call: Call, spec_of: Any) -> Any:
    """Read outcomes off the tensors that a call gave, by identity and by storage."""
    if isinstance(result, tuple):
        return tuple(outcomes_of(part, inputs, call, spec_of) for part in result)
    if isinstance(result, list):
        return [outcomes_of(part, inputs, call, spec_of) for part in result]
    if not isinstance(result, torch.Tensor):
        return Value(result)
    spec = spec_of(result)
    for position, tensor in enumerate(inputs):
        if tensor is result:
            return Same(position) if spec is call.inputs[position] else Same(position, spec)
    if spec.layout is not torch.strided:
        return New(spec)
    storage = _torch.storage_id(result)
    for position, tensor in enumerate(inputs):
        if tensor.layout is torch.strided and _torch.storage_id(tensor) == storage:
            return View(position, spec)
    return New(spec)


# --- The real operator as the judge of refusals ------------------------------------------------------------------

SMALL = 1 << 20
"""Bytes that the inputs of a call may have for the real operator to be asked."""
LARGE_NUMBERS = range(1 << 16, 1 << 50)
"""Numbers that, as sizes, ask for memory that may be there. What asks for more is refused at once."""
MOST_INT32 = 2**31 - 1
"What many kernels keep numbers in. Views take larger ones for no end: `x[1:]`."
STORED = FLOAT8 | UNSIGNED | COMPLEX_HALF
BUILT_IN = (NotImplementedError, IndexError, ValueError, TypeError, RuntimeError)
NOT_EAGERS = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
    FakeTensorDeviceMismatchError,
    UnsupportedFakeTensorException,
    UnsupportedMutationAliasingException,
    UnsupportedOperatorException,
)
"""Errors about stand-ins, of which eager knows nothing."""


def judge_refusal(call: Call, error: Exception) -> Outcomes:
    """What the call does after all; or the error again, as the built-in exception that eager raises."""
    if isinstance(error, NOT_EAGERS) or _has_context(error) or not can_ask(call):
        raise error
    try:
        answer = run_on_zeros_or_ones(with_sizes_at_hand(call), lambda: strided_zeros)
    except NOT_EAGERS:
        raise error from None
    except BUILT_IN as refusal:
        raise_as(error, refusal, call)
    if isinstance(answer, Value) and written_inputs(call):
        raise error  # it returns nothing that would tell what it wrote
    with_fixed_sizes(call)
    return answer


def check_against_eager(call: Call, outcomes: Outcomes, is_by_rule: bool) -> Outcomes:
    """What eager says of a call that is out of the ordinary, where our answer may not know all of its kernel's whims."""
    if is_by_rule and not _is_unusual(call):
        return outcomes
    if not can_ask(call):
        return outcomes
    is_symbolic = any(spec.is_symbolic for spec in call.inputs) or bool(flat(SymNode, call.args, call.kwargs))
    try:
        answer = run_on_zeros_or_ones(with_sizes_at_hand(call) if is_symbolic else call, lambda: strided_zeros)
    except (*NOT_EAGERS, torch.linalg.LinAlgError):
        return outcomes
    except BUILT_IN as refusal:
        raise translate(refusal, call) from None
    # Of symbolic sizes, eager's answer holds at those at hand only, while its refusal refuses the example.
    return outcomes if is_symbolic or isinstance(outcomes, Changed) else answer


def run_on_zeros_or_ones(call: Call, new_maker: Callable[[], Callable[[TensorSpec], torch.Tensor]]) -> Outcomes:
    """A kernel may refuse zeros, as a probability or a divisor, and take ones. Raises what it says of zeros.

    `new_maker`: what makes zeros for the specs of one run, in order.
    """
    try:
        return run_on_zeros(call, new_maker())
    except (*NOT_EAGERS, torch.linalg.LinAlgError):
        raise
    except BUILT_IN as error:
        refusal = error
    make = new_maker()
    try:
        return run_on_zeros(call, lambda spec: _with_ones(make(spec)))
    except BUILT_IN:
        raise refusal from None


def _is_unusual(call: Call) -> bool:
    """Dtypes that are for storing numbers, or complex, or mixed; no elements; tensors to write to."""
    inputs = call.inputs
    dtypes = {spec.dtype for spec in inputs}
    if _torch.has_out_arguments(call.op) or call.kwargs.get("dtype") in STORED:
        return True
    if any(dtype in STORED or dtype.is_complex for dtype in dtypes):
        return True
    if not record_of(call.op).is_pointwise and (len(dtypes) > 1 or _has_fractions(call, dtypes)):
        return True
    if not record_of(call.op).is_view and any(abs(number) > MOST_INT32 for number in flat(int, call.args, call.kwargs)):
        return True
    return any(0 in spec.shape if not spec.is_symbolic else _is_empty_at_hand(spec) for spec in inputs)


def _is_empty_at_hand(spec: TensorSpec) -> bool:
    return any((size.hint if type(size) is SymNode else size) == 0 for size in spec.shape)


def _has_fractions(call: Call, dtypes: set[torch.dtype]) -> bool:
    """Whether floats are given beside tensors of integers, or complex numbers beside any that are not."""
    if flat(complex, call.args, call.kwargs):
        return True
    are_whole = bool(dtypes) and not any(dtype.is_floating_point for dtype in dtypes)
    return are_whole and bool(flat(float, call.args, call.kwargs))


def strided_zeros(spec: TensorSpec) -> torch.Tensor:
    return strided_on(spec, CPU, zero=True)


def _with_ones(tensor: torch.Tensor) -> torch.Tensor:
    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    whole.copy_(torch.ones((), dtype=torch.int64))
    return tensor


def answer_for_shared(call: Call, inputs: Sequence[Any]) -> Outcomes | None:
    """What the real operator does with tensors that share memory as these do, at the sizes at hand."""
    current = iter(inputs)  # a plan may come from a capture with other symbols
    args, kwargs = map_structure(lambda _: next(current)._spec, TensorSpec, (call.args, call.kwargs))
    call = with_fixed_sizes(Call.of(call.op, args, kwargs))
    needed = max(_bytes(spec) for spec in call.inputs)

    def new_maker() -> Callable[[TensorSpec], torch.Tensor]:
        storages: dict[int, torch.Tensor] = {}
        made: dict[int, torch.Tensor] = {}
        tensors = iter(inputs)

        def make(spec: TensorSpec) -> torch.Tensor:
            fake = next(tensors)
            if id(fake) not in made:
                fresh = torch.zeros(needed, dtype=torch.uint8)
                made[id(fake)] = _on_shared(spec, storages.setdefault(_torch.storage_id(fake), fresh))
            return made[id(fake)]

        return make

    try:
        return run_on_zeros_or_ones(call, new_maker)
    except torch.linalg.LinAlgError:
        return None  # it is about values
    except BUILT_IN as refusal:
        raise with_context(refusal, call) from None


def _on_shared(spec: TensorSpec, storage: torch.Tensor) -> torch.Tensor:
    tensor = torch.empty(0, dtype=spec.dtype)
    shape, stride, offset = spec.numbers
    tensor.set_(storage.untyped_storage(), offset, shape, stride)
    if spec.conj:
        _torch.set_conj(tensor, True)
    if spec.neg:
        _torch.set_neg(tensor, True)
    return tensor


def can_ask(call: Call) -> bool:
    """Whether the real operator can be run on zeros: of this build, on few elements, and without reading beyond them."""
    op = call.op
    if not _torch.is_builtin_namespace(op) or torch.Tag.inplace_view in op.tags or record_of(op).has_dynamic_shape:
        return False
    if uncacheable.of(op) is not None or may_trust_arguments(op):
        return False
    inputs = call.inputs
    if any(spec.device.type != "cpu" or spec.layout is not torch.strided for spec in inputs) or _is_elsewhere(call):
        return False
    numbers = [*flat(int, call.args, call.kwargs), *flat(SymNode, call.args, call.kwargs)]
    sizes = [size for spec in inputs for size in (*spec.shape, *spec.stride, spec.offset)]
    if any(type(number) is SymNode and not number.has_hint() for number in (*numbers, *sizes)):
        return False
    if any(type(number) is int and abs(number) in LARGE_NUMBERS for number in numbers):
        return False
    return sum(_bytes(spec) for spec in inputs) <= SMALL


def _is_elsewhere(call: Call) -> bool:
    device = call.kwargs.get("device")
    return device is not None and device.type != "cpu"


def _bytes(spec: TensorSpec) -> int:
    """Of the storage that it reaches into, at the sizes at hand."""
    extent = _hint(spec.offset) + 1
    for size, step in zip(spec.shape, spec.stride, strict=True):
        extent += max(_hint(size) - 1, 0) * _hint(step)
    return extent * spec.itemsize


def _hint(size: Any) -> int:
    return int(size.hint) if type(size) is SymNode else int(size)


def _has_context(error: Exception) -> bool:
    """Whether it comes from an operator that this one is made of, which was asked about already."""
    return isinstance(error, UnderstudyError) and bool(error.context.op)


def raise_as(error: Exception, refusal: Exception, call: Call) -> NoReturn:
    """Our words, and the built-in class of eager's refusal."""
    ours = error if isinstance(error, UnderstudyError) else translate(error, call)
    built_in = next(kind for kind in BUILT_IN if isinstance(refusal, kind))
    if isinstance(ours, built_in):
        raise ours from error.__cause__
    kind: Any = type(ours)
    raise _class_of_both(kind, built_in)(ours.reason, func=ours.func) from error.__cause__


@cache
def _class_of_both(ours: type[UnderstudyError], built_in: type[Exception]) -> Any:
    return type(ours.__name__, (ours, built_in), {"__doc__": ours.__doc__, "__module__": ours.__module__})
