"""Torch's own kernels as sources: the meta kernel, and the real kernel on zeros, which also confirms errors.

A rule knows in general which calls an operator rejects. Eager differs in details: a kernel that is missing for a dtype
raises nothing for an empty tensor, and the class of the exception depends on the operator. So before an error is
raised, the real operator is run on zeros, if the call is small. Errors are rare, so this costs little. Small unusual
calls (no elements, complex numbers, `out=`, operators without a rule) are compared with eager even if no error was
raised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import cache
from itertools import count
from typing import Any, NoReturn, cast

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
from understudy.ops.shared.dtypes import (
    COMPLEX,
    COMPLEX_HALF,
    FLOAT8,
    MASKS,
    SMALL_COMPLEX,
    UNSIGNED,
    WHOLE,
)
from understudy.ops.traits.caching import uncacheable
from understudy.ops.traits.devices import device_of, writes_by_index
from understudy.ops.traits.writes import may_trust_arguments, written_inputs
from understudy.shapes.node import SymNode
from understudy.shapes.sizes import from_torch, to_torch
from understudy.spec import Changed, New, Outcomes, Same, TensorSpec, Value, View
from understudy.spec.alternatives import Sizes, exclude_other_answers
from understudy.spec.call import Call, flat, flat_numbers, map_structure
from understudy.spec.error_context import MissingKernel, translate, with_context
from understudy.spec.sparse import is_sparse, sparse_on, spec_of_sparse

COPY = torch.ops.aten.copy_.default
META = torch.device("meta")
CPU = torch.device("cpu")


class MetaTensorOfDevice(torch.Tensor):
    """A meta tensor with a `fake_device`, which some of torch's meta functions read."""

    fake_device: torch.device
    fake_mode = None
    __torch_function__ = _torch.no_torch_function
    __torch_dispatch__ = _torch.no_torch_dispatch

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return _torch.torch_fake_tensor_class()


def strided_on(spec: TensorSpec, device: torch.device, zero: bool = False) -> torch.Tensor:
    """A plain tensor with this spec's metadata, on another device."""
    if spec.sparse is not None:
        return sparse_on(spec, device)
    if spec.is_symbolic:
        return _symbolic_on(spec, device)
    extent = spec.offset + 1
    for size, step in zip(spec.shape, spec.stride, strict=True):
        if size == 0:
            extent = spec.offset + (spec.offset > 0)  # it begins within a storage that holds something
            break
        extent = extent + (size - 1) * step
    if zero:  # kernels that take an overlapping out= for contiguous write one element after the other
        extent = max(extent, spec.offset + spec.numel)
    make = torch.zeros if zero else torch.empty
    return _set_bits(make((extent,), dtype=spec.dtype, device=device).as_strided(*spec.numbers), spec)


def _set_bits(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The tensor with the spec's bits for conjugation and negation."""
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
        return _from_offsets(call, _run(call, stand_in, META))
    except NotImplementedError:
        return NotImplemented
    except RuntimeError as error:
        if any(spec.is_symbolic for spec in call.inputs) and any(words in str(error) for words in NEEDS_INTEGERS):
            return NotImplemented
        raise


def _from_offsets(call: Call, outcomes: Any) -> Any:
    """Outcomes of stand-ins that begin where their storages do, as those for tensors with symbolic sizes."""

    def move(outcome: Any) -> Same | View:
        given, spec = call.inputs[outcome.of], outcome.spec
        if spec is not None and given.is_symbolic:
            spec = spec.as_view(spec.shape, spec.stride, given.offset + spec.offset)
        return Same(outcome.of) if spec is given and isinstance(outcome, Same) else replace(outcome, spec=spec)

    return map_structure(move, (Same, View), outcomes)


NEEDS_INTEGERS = ("with symbolic sizes/strides", "only concrete integers", "called with NO overloaded args")
"""Parts of the messages with which C++ rejects symbolic sizes."""


def with_fixed_sizes(call: Call) -> Call:
    """The call with symbols specialised to their hints, with guards."""
    return _replace_symbols(call, int)


def with_hinted_sizes(call: Call) -> Call:
    """The call with hints in the place of symbols, without guards: the result must not be cached."""
    return _replace_symbols(call, _hint)


def _replace_symbols(call: Call, number: Callable[[Any], int]) -> Call:
    """The call with numbers in the place of symbols."""
    args, kwargs = map_structure(lambda spec: _spec_in_numbers(spec, number), TensorSpec, (call.args, call.kwargs))
    args, kwargs = map_structure(number, SymNode, (args, kwargs))
    return Call.of(call.op, args, kwargs)


def _spec_in_numbers(spec: TensorSpec, number: Callable[[Any], int]) -> TensorSpec:
    if not spec.is_symbolic:
        return spec
    return spec.as_view([number(n) for n in spec.shape], [number(n) for n in spec.stride], number(spec.offset))


def _number_at(sizes: Sizes) -> Callable[[Any], int]:
    return lambda size: int(size.value.evaluate(sizes)) if type(size) is SymNode else int(size)


def run_real_kernel(call: Call) -> Any:
    try:
        return run_on_zeros(call)
    except NotImplementedError as error:
        if _torch.is_builtin_namespace(call.op) and all(spec.device.type == "cpu" for spec in call.inputs):
            raise MissingKernel(f"{call.op}: {str(error).splitlines()[0]}", func=call.op) from error
        raise UnsupportedOperatorException(
            f"{call.op} has neither a rule nor a kernel that could tell: {str(error).splitlines()[0]}",
            func=call.op,
        ) from error


def run_on_zeros(call: Call, make: Callable[[TensorSpec], torch.Tensor] | None = None) -> Any:
    """The outcomes of the real operator on zeros, or on the tensors that `make` returns for the specs in order; its
    errors are raised.

    The state of the random number generator is preserved.
    """
    state = torch.random.get_rng_state()
    # Without an explicit choice torch warns, once in a process, that it does not check indices of sparse tensors.
    is_sparse_call = any(spec.sparse is not None for spec in call.inputs)
    try:
        with torch.sparse.check_sparse_tensor_invariants(enable=False) if is_sparse_call else nullcontext():
            return _run(call, make or (lambda spec: strided_on(spec, CPU, zero=True)), CPU)
    finally:
        torch.random.set_rng_state(state)


def _run(call: Call, stand_in: Any, native: torch.device) -> Any:
    """Call the operator below all modes on tensors that `stand_in` makes for the specs, and return its outcomes."""
    device = result_device(call)
    stand_ins: list[torch.Tensor] = []

    def convert(value: Any) -> Any:
        if type(value) is TensorSpec:
            stand_ins.append(stand_in(value))
            return stand_ins[-1]
        return to_torch(value) if type(value) is SymNode else native

    guard = _torch.NoDispatch()
    try:
        args, kwargs = map_structure(convert, (TensorSpec, SymNode, _torch.Device), (call.args, call.kwargs))
        result = call.op(*args, **kwargs)
        return outcomes_of(result, stand_ins, call, lambda tensor: spec_of_result(tensor, device))
    finally:
        del guard


def result_device(call: Call) -> torch.device:
    asked = call.kwargs.get("device")
    return asked or device_of(call) or CPU


def outcomes_of(result: object, inputs: Sequence[torch.Tensor], call: Call, spec_of: Any) -> Any:
    """The outcomes of a call whose results are tensors: identity tells `Same`, a shared storage tells `View`."""
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


# --- The real operator as a second opinion on errors ------------------------------------------------------------------

SMALL = 1 << 20
"""The largest total size of the inputs, in bytes, with which the real operator is run to confirm an error."""
LARGE_NUMBERS = range(1 << 16, 1 << 50)
"""Integer arguments that, used as sizes, may really allocate memory. Larger ones fail at once."""
MOST_INT32 = 2**31 - 1
"Many kernels store numbers as int32. Slices use larger ones for an open end: `x[1:]`."
STORED = FLOAT8 | UNSIGNED | COMPLEX_HALF
STORED_OR_COMPLEX = STORED | COMPLEX | SMALL_COMPLEX
BUILT_IN = (NotImplementedError, IndexError, ValueError, TypeError, RuntimeError)
NOT_RAISED_BY_EAGER = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
    FakeTensorDeviceMismatchError,
    UnsupportedFakeTensorException,
    UnsupportedMutationAliasingException,
    UnsupportedOperatorException,
)
"""Errors about stand-ins and symbols, which eager never raises."""


def judge_refusal(call: Call, error: Exception) -> Outcomes:
    """The outcomes of the call if eager accepts it; otherwise raise the error, also as the CPU's built-in class."""
    on_cpu = call.on(CPU)
    if isinstance(error, NOT_RAISED_BY_EAGER) or _has_context(error) or not can_run_eager(on_cpu):
        raise error
    try:
        answer = run_on_zeros_or_ones(with_hinted_sizes(on_cpu), lambda: strided_zeros)
    except NOT_RAISED_BY_EAGER:
        raise error from None
    except BUILT_IN as refusal:
        if on_cpu is not call and isinstance(refusal, NotImplementedError):
            raise error from None  # another device may have a kernel for it
        raise_as(error, refusal, call)
    if on_cpu is not call or (isinstance(answer, Value) and written_inputs(call)):
        raise error  # another device is not the CPU; and writes can't be seen in a result
    with_fixed_sizes(call)
    return answer


def check_against_eager(call: Call, outcomes: Outcomes, is_by_rule: bool) -> Outcomes:
    """Compare our outcomes of an unusual call with eager's, which are used if they differ."""
    if is_by_rule and not _is_unusual_call(call):
        return outcomes
    if not can_run_eager(call):
        return outcomes
    is_symbolic = is_symbolic_call(call)
    try:
        answer = run_on_zeros_or_ones(with_hinted_sizes(call) if is_symbolic else call, lambda: strided_zeros)
    except (*NOT_RAISED_BY_EAGER, torch.linalg.LinAlgError):
        return outcomes
    except BUILT_IN as refusal:
        raise translate(refusal, call) from None
    if not is_symbolic:
        return outcomes if isinstance(outcomes, Changed) else answer
    if not _are_outcomes(outcomes, answer, call, _hint):
        with_fixed_sizes(call)
        return answer
    if not is_by_rule or _is_rare(call):
        exclude_other_answers((call.args, call.kwargs), lambda sizes: _does_eager_agree(call, outcomes, sizes))
    return outcomes


def _does_eager_agree(call: Call, outcomes: Outcomes, sizes: Sizes) -> bool:
    """Whether the real operator does at other sizes what the outcomes say.

    What it does with a rare call depends on sizes in ways that rules do not know: a kernel that is missing for a dtype is
    not missed by a tensor without elements, another one only by an operand of one element, and `out=` without elements may
    take strides of its own."""
    number = _number_at(sizes)
    try:
        answer = run_on_zeros_or_ones(_replace_symbols(call, number), lambda: strided_zeros)
    except (*NOT_RAISED_BY_EAGER, torch.linalg.LinAlgError, ArithmeticError):
        return True  # ArithmeticError: there are no such sizes
    except BUILT_IN:
        return False
    return _are_outcomes(outcomes, answer, call, number)


def _are_outcomes(outcomes: Outcomes, answer: Any, call: Call, number: Callable[[Any], int]) -> bool:
    """Whether outcomes of a call, with numbers in the place of symbols, are those of the real operator. What is no tensor,
    and what is changed by an operator that returns nothing, is not compared."""
    if isinstance(outcomes, (tuple, list)):
        if not isinstance(answer, (tuple, list)) or len(outcomes) != len(answer):
            return False
        return all(_are_outcomes(ours, real, call, number) for ours, real in zip(outcomes, answer, strict=True))
    if isinstance(outcomes, (Changed, Value)):
        return True
    if type(answer) is not type(outcomes) or getattr(answer, "of", None) != getattr(outcomes, "of", None):
        return False
    given = call.inputs[outcomes.of] if isinstance(outcomes, Same) else None
    ours, real = (cast("TensorSpec", each.spec or given) for each in (outcomes, answer))
    return _spec_in_numbers(ours, number) is _spec_in_numbers(real, number)


def _is_rare(call: Call) -> bool:
    """Whether what eager does may depend on small sizes: dtypes with few kernels, fractions for integers, sizes that are 0
    at hand, `out=`."""
    record = record_of(call.op)
    dtypes = {spec.dtype for spec in call.inputs}
    if record.has_out or not dtypes.isdisjoint(STORED):
        return True
    if not record.is_pointwise and _has_fractions(flat((int, float, complex), call.args, call.kwargs), dtypes):
        return True
    return any(type(size) is SymNode and size.hint == 0 for spec in call.inputs for size in spec.shape)


def run_on_zeros_or_ones(call: Call, new_maker: Callable[[], Callable[[TensorSpec], torch.Tensor]]) -> Outcomes:
    """Run on zeros, then on ones and on identities: kernels may reject zeros (as a divisor, say) and singular matrices. If
    all fail, raise the error for zeros.

    `new_maker()` returns the function that makes the tensors of one run.
    """
    try:
        return run_on_zeros(call, new_maker())
    except (*NOT_RAISED_BY_EAGER, torch.linalg.LinAlgError):
        raise
    except BUILT_IN as error:
        refusal = error
    for fill in (_with_ones, _with_identities):
        with suppress(*BUILT_IN):
            return run_on_zeros(call, _filled_by(fill, new_maker()))
    raise refusal from None


def _filled_by(fill: Callable[[torch.Tensor], torch.Tensor], make: Callable[[TensorSpec], torch.Tensor]) -> Any:
    return lambda spec: fill(make(spec))


def _is_unusual_call(call: Call) -> bool:
    """Dtypes that are for storing numbers, complex, whole or mixed; no elements; tensors to write to."""
    if copies_alike(call):
        return False
    record = record_of(call.op)
    dtype = call.kwargs.get("dtype")
    if record.has_out or (dtype is not None and (dtype in STORED or record.is_mutable)):
        return True
    first = call.inputs[0].dtype if call.inputs else torch.float32
    is_mixed = False
    for spec in call.inputs:
        if spec.dtype in STORED_OR_COMPLEX or (_is_empty_by_hints(spec) if spec.is_symbolic else 0 in spec.shape):
            return True
        is_mixed = is_mixed or spec.dtype is not first
    if record.is_view and not is_mixed:
        return False  # views are given no numbers but sizes
    numbers = flat_numbers((*call.args, *call.kwargs.values()))
    if not record.is_pointwise and (is_mixed or first in WHOLE or _has_fractions(numbers, {first})):
        return True
    return any(type(part) is int and abs(part) > MOST_INT32 for part in numbers)


def copies_alike(call: Call) -> bool:
    """Whether a tensor is copied into one of the same layout: if they share memory, eager does nothing at all."""
    return call.op is COPY and call.inputs[0] is call.inputs[-1]


def is_symbolic_call(call: Call) -> bool:
    """Whether it has symbolic sizes, or symbolic numbers as arguments."""
    return any(spec.is_symbolic for spec in call.inputs) or bool(flat(SymNode, call.args, call.kwargs))


def _is_empty_by_hints(spec: TensorSpec) -> bool:
    return any((size.hint if type(size) is SymNode else size) == 0 for size in spec.shape)


def _has_fractions(numbers: list[complex], dtypes: set[torch.dtype]) -> bool:
    """Whether Python floats meet tensors of integers, or complex numbers meet tensors that are not complex."""
    if not numbers:
        return False
    are_whole = bool(dtypes) and not any(dtype.is_floating_point for dtype in dtypes)
    return any(isinstance(part, complex) or (are_whole and isinstance(part, float)) for part in numbers)


def strided_zeros(spec: TensorSpec) -> torch.Tensor:
    return strided_on(spec, CPU, zero=True)


def _with_identities(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.ndim >= 2:
        tensor.diagonal(dim1=-2, dim2=-1).fill_(1)
    return tensor


def _with_ones(tensor: torch.Tensor) -> torch.Tensor:
    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    whole.copy_(torch.ones((), dtype=torch.int64))
    return tensor


def answer_for_shared(call: Call, inputs: Sequence[Any], outcomes: Outcomes | None = None) -> Outcomes | None:
    """What the real operator does with tensors that share memory as these do; None if it is what the outcomes say.

    With symbolic sizes, there are guards against small sizes at which it refuses, and its answer is for these sizes only."""
    call = _with_current_specs(call, inputs)
    if not can_run_eager(call):
        return None
    if not is_symbolic_call(call):
        return _run_on_shared(call, inputs)
    answer = _run_on_shared(with_hinted_sizes(call), inputs)
    is_compared = outcomes is not None and answer is not None
    if is_compared and not _are_outcomes(_of_first_positions(outcomes, inputs), answer, call, _hint):
        with_fixed_sizes(call)
        return answer
    if len({_torch.storage_id(tensor) for tensor in inputs}) < len(inputs):
        exclude_other_answers((call.args, call.kwargs), lambda sizes: _is_taken_shared(call, inputs, sizes))
    return None


def _with_current_specs(call: Call, inputs: Sequence[Any]) -> Call:
    """The call of a plan on these tensors: the plan may come from an environment with other symbols."""
    current = iter(inputs)
    args, kwargs = map_structure(lambda _: next(current)._spec, TensorSpec, (call.args, call.kwargs))
    return Call.of(call.op, args, kwargs)


def try_values(call: Call, inputs: Sequence[Any], positions: tuple[int, ...]) -> None:
    """Raise if the real operator refuses the values of the inputs at these positions; the others are zeros. Nothing is
    tried if a value is not known."""
    values = {position: inputs[position].fake_mode.value_without_guards(inputs[position]) for position in positions}
    if not any(value is None for value in values.values()):
        try_call(_with_current_specs(call, inputs), values)


def try_call(call: Call, values: Mapping[int, torch.Tensor | None]) -> None:
    """Raise if the real operator refuses the call with these values; the other inputs are zeros."""
    counted = count()

    def make(spec: TensorSpec) -> torch.Tensor:
        value = values.get(next(counted))
        return strided_zeros(spec) if value is None else value

    try:
        run_on_zeros(with_hinted_sizes(call), make)
    except NOT_RAISED_BY_EAGER:
        return
    except BUILT_IN as refusal:
        raise with_context(refusal, call) from None


def _of_first_positions(outcomes: Any, inputs: Sequence[Any]) -> Any:
    """The outcomes with the first position of a tensor that is given more than once."""
    first = {id(tensor): position for position, tensor in reversed(list(enumerate(inputs)))}
    return map_structure(lambda outcome: replace(outcome, of=first[id(inputs[outcome.of])]), (Same, View), outcomes)


def _is_taken_shared(call: Call, inputs: Sequence[Any], sizes: Sizes) -> bool:
    try:
        _run_on_shared(_replace_symbols(call, _number_at(sizes)), inputs)
    except ArithmeticError:
        return True  # there are no such sizes
    except BUILT_IN:
        return False
    return True


def _run_on_shared(call: Call, inputs: Sequence[Any]) -> Outcomes | None:
    """None if the real operator refuses because of values."""
    held = [_torch.native_storage(tensor).nbytes() for tensor in inputs]
    needed = max(*(_bytes(spec) for spec in call.inputs), *(size for size in held if size <= SMALL), 0)

    def new_maker() -> Callable[[TensorSpec], torch.Tensor]:
        storages: dict[int, torch.Tensor] = {}
        made: dict[int, torch.Tensor] = {}
        tensors = iter(inputs)

        def make(spec: TensorSpec) -> torch.Tensor:
            fake = next(tensors)
            if id(fake) not in made:
                fresh = torch.zeros(needed, dtype=torch.uint8)
                made[id(fake)] = _view_of(spec, storages.setdefault(_torch.storage_id(fake), fresh))
            return made[id(fake)]

        return make

    try:
        return run_on_zeros_or_ones(call, new_maker)
    except torch.linalg.LinAlgError:
        return None
    except BUILT_IN as refusal:
        if "ZeroDivisionError" in str(refusal):
            return None  # a storage that has grown holds anything
        raise with_context(refusal, call) from None


def _view_of(spec: TensorSpec, storage: torch.Tensor) -> torch.Tensor:
    tensor = torch.empty(0, dtype=spec.dtype)
    shape, stride, offset = spec.numbers
    return _set_bits(tensor.set_(storage.untyped_storage(), offset, shape, stride), spec)


def can_run_eager(call: Call) -> bool:
    """Whether the real operator can be run on zeros: the device exists, the inputs are small, no index is out of bounds."""
    op = call.op
    if not _torch.is_builtin_namespace(op) or torch.Tag.inplace_view in op.tags or record_of(op).has_dynamic_shape:
        return False
    if uncacheable.of(op) is not None or may_trust_arguments(op):
        return False
    inputs = call.inputs
    if any(not spec.is_symbolic and spec.numel * spec.itemsize > SMALL for spec in inputs):
        return False
    if writes_by_index.of(op) is not None and any(spec.dtype in MASKS for spec in inputs[1:-1]):
        return False  # whether the values fit depends on how many elements of the mask are true
    devices = [spec.device for spec in inputs if spec.layout is torch.strided]
    if len(devices) < len(inputs) or any(device.type != "cpu" for device in (*devices, call.kwargs.get("device") or CPU)):
        return False
    numbers = [*flat(int, call.args, call.kwargs), *flat(SymNode, call.args, call.kwargs)]
    sizes = [size for spec in inputs for size in (*spec.shape, *spec.stride, spec.offset)]
    if any(type(number) is SymNode and not number.has_hint() for number in (*numbers, *sizes)):
        return False
    if any(type(number) is int and abs(number) in LARGE_NUMBERS for number in numbers):
        return False
    return sum(_bytes(spec) for spec in inputs) <= SMALL


def _bytes(spec: TensorSpec) -> int:
    """The size of its storage in bytes, or of its elements if they overlap; with hints for symbols."""
    extent, count = _hint(spec.offset) + 1, 1
    for size, step in zip(spec.shape, spec.stride, strict=True):
        extent += max(_hint(size) - 1, 0) * _hint(step)
        count *= _hint(size)
    return max(extent, _hint(spec.offset) + count) * spec.itemsize


def _hint(size: Any) -> int:
    return int(size.hint) if type(size) is SymNode else int(size)


def _has_context(error: Exception) -> bool:
    """Whether the error comes from an inner operator, for which eager was asked already."""
    return isinstance(error, UnderstudyError) and bool(error.context.op)


def raise_as(error: Exception, refusal: Exception, call: Call) -> NoReturn:
    """Raise our error, also as the built-in class of eager's error."""
    ours = error if isinstance(error, UnderstudyError) else translate(error, call)
    built_in = next(kind for kind in BUILT_IN if isinstance(refusal, kind))
    if isinstance(ours, built_in):
        raise ours from error.__cause__
    kind: Any = type(ours)
    raise _combine_classes(kind, built_in)(ours.reason, func=ours.func) from error.__cause__


@cache
def _combine_classes(ours: type[UnderstudyError], built_in: type[Exception]) -> Any:
    return type(ours.__name__, (ours, built_in), {"__doc__": ours.__doc__, "__module__": ours.__module__})
