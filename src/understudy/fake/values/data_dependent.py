"""Data-dependent operators: answered from determined values, or with unbacked symbols.

Inference sees only specs, and raises for them. The mode then calls `answer`: if the tensors that matter have determined
values, the result is computed: `x[torch.tensor([True, False, True])]` has two rows. If not, and the mode has a shape
environment, the size is an unbacked symbol.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from understudy import _torch
from understudy._torch import OpOverload
from understudy.errors import ArgumentError, DimensionError, DtypeError, ShapeMismatch, UnderstudyError
from understudy.fake.inputs import handler
from understudy.fake.realise import convert_sparse, make_new
from understudy.fake.tensor import FakeTensor
from understudy.fake.values.answers import answer_item, answer_size, answers_of, is_in_composite
from understudy.fake.values.determined import MOST_COMPUTED, has_no_elements
from understudy.fake.values.ranges import range_of, store_ranges
from understudy.ops.indexing.advanced import check_masks
from understudy.ops.nn.losses import ctc_losses
from understudy.ops.registry import Slot, declare, record_of
from understudy.ops.shared.dims import wrap_dim
from understudy.ops.shared.dtypes import (
    BOOL,
    INTEGERS,
    MASKS,
    UNSIGNED,
    check_any_dtype,
)
from understudy.ops.traits.ranges import counts_of, range_of_dtype
from understudy.shapes.sizes import from_torch, has_unbacked, to_torch
from understudy.shapes.torch_api.names import promise_range
from understudy.spec import TensorSpec, broadcast_shapes, contiguous_strides, product, same_shape
from understudy.spec.call import flat, map_structure
from understudy.spec.error_context import with_line
from understudy.spec.sparse import is_sparse

if TYPE_CHECKING:
    from understudy.fake.mode import FakeTensorMode

aten = torch.ops.aten

answer_from_values: Slot[Callable[..., Any]] = declare("answer_from_values", Slot())
"""The result of a call, from the determined values of some of its inputs."""


def answer(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any) -> Any:
    """The result of the call, or `NotImplemented` if it depends on values that are not determined."""
    inputs = flat(FakeTensor, args, kwargs)
    is_determined = bool(inputs) and all(map(is_known, inputs)) and not _torch.written_arguments(func)
    is_composite = _torch.has_composite_kernel(func)  # it arrives whole in inference mode
    if is_determined and not is_composite:
        return _compute_on_values(mode, func, args, kwargs, inputs)
    special = record_of(func).answer_from_values
    if special is not None:
        return special(mode, *args, **kwargs)
    if is_composite:  # it may read determined values inside
        return mode.decompose(func, args, kwargs)
    return NotImplemented


def is_known(fake: FakeTensor) -> bool:
    is_determined = fake._determined is not None and fake._determined.content is not None
    return is_determined or has_no_elements(fake._spec)


def is_computed(fake: FakeTensor) -> bool:
    """Whether the values are determined, not many, and the same for all sizes of the inputs."""
    known = fake._determined
    if known is None or known.content is None or fake._spec.is_symbolic or fake._spec.numel > MOST_COMPUTED:
        return False
    return not known.content.has_symbols


def _compute_on_values(
    mode: FakeTensorMode, func: Any, args: Any, kwargs: Any, inputs: list[FakeTensor]
) -> object:
    """Run the operator on the determined values."""
    real_args, real_kwargs = map_structure(mode.value_of, FakeTensor, (tuple(args), dict(kwargs)))
    with _torch.no_modes(), _torch.grad_mode(False):
        result = func(*real_args, **real_kwargs)
    device = inputs[0]._spec.device
    return map_structure(lambda real: _make_determined(mode, real, device), torch.Tensor, result)


def _make_determined(mode: FakeTensorMode, real: torch.Tensor, device: torch.device) -> Any:
    if is_sparse(real):
        with _torch.no_modes():  # a recorder would be given the real parts
            fake = convert_sparse(mode, real)
        return fake.to(device)
    spec = TensorSpec(tuple(real.shape), real.stride(), dtype=real.dtype, device=device)
    fake = make_new(mode, spec)
    mode.remember_literal(fake, real)
    return fake


# --- calls whose result size depends on only some of the tensors --------------------------------------------------


def _find_true_positions(mode: FakeTensorMode, mask: FakeTensor) -> list[FakeTensor] | None:
    """The positions at which a mask is true: one tensor for each dimension."""
    if not is_known(mask):
        return None
    found = answer(mode, aten.nonzero.default, (mask,), {})
    return list(aten.unbind.int(found, 1))


def check_masks_of_fakes(func: object, fake: FakeTensor, indices: Any) -> None:
    specs = [None if entry is None else entry._spec for entry in indices]
    try:
        check_masks(str(func), fake._spec, specs)
    except DimensionError as error:
        raise with_line(error, str(func), ", ".join(map(str, (fake._spec, specs)))) from None


@answer_from_values("index.Tensor")
def _index(mode: FakeTensorMode, x: FakeTensor, indices: list[FakeTensor | None]) -> torch.Tensor:
    """Masks among the indices become positions."""
    check_masks_of_fakes(aten.index.Tensor, x, indices)
    expanded: list[FakeTensor | None] = []
    for index in indices:
        if index is None or index.dtype not in MASKS:
            expanded.append(index)
            continue
        positions = _find_true_positions(mode, index)
        if positions is None:
            return NotImplemented
        expanded.extend(positions)
    with mode:
        return aten.index.Tensor(x, expanded)


@answer_from_values("masked_select")
def _masked_select(mode: FakeTensorMode, x: FakeTensor, mask: FakeTensor) -> Any:
    if not is_known(mask):
        return NotImplemented
    with mode:
        x, mask = torch.broadcast_tensors(x, mask)
        return aten.index.Tensor(x, [mask])


@answer_from_values("bincount")
def _bincount(
    mode: FakeTensorMode, x: FakeTensor, weights: FakeTensor | None = None, minlength: int = 0
) -> Any:
    if not is_known(x) or weights is None:
        return NotImplemented
    bins: Any = answer(mode, aten.bincount.default, (x, None, minlength), {})
    return make_new(mode, bins._spec.like(dtype=_dtype_of_bins(weights)))


@answer_from_values("allclose")
def _allclose(mode: FakeTensorMode, a: FakeTensor, b: FakeTensor, *args: Any, **kwargs: Any) -> Any:
    with mode:
        close: Any = torch.isclose(a, b, *args, **kwargs).all()
    answer = answer_item(mode, close, "allclose")
    return answer if answer is NotImplemented else bool(answer)


@answer_from_values("is_nonzero")
def _is_nonzero(mode: FakeTensorMode, x: FakeTensor) -> Any:
    answer = answer_item(mode, x)
    return answer if answer is NotImplemented or x._spec.numel != 1 else bool(answer)


@answer_from_values("_pack_padded_sequence")
def _pack_padded_sequence(mode: FakeTensorMode, x: FakeTensor, lengths: FakeTensor, batch_first: bool) -> Any:
    spec = x._spec
    known = mode.value_of(lengths)
    if known is None:
        if answers_of(mode) is None:
            return NotImplemented
        longest = int(spec.shape[1 if batch_first else 0])
        answer = answer_size(mode, aten._pack_padded_sequence.default, lengths, 1, longest)
        with _torch.PastDispatch():
            known = torch.full(lengths._spec.numbers.shape, answer, dtype=torch.int64, device="cpu")
    with _torch.no_modes(), _torch.grad_mode(False):
        steps = torch.empty(spec.numbers.shape[:2])
        data, sizes = aten._pack_padded_sequence.default(steps, known, batch_first)
    packed = make_new(mode, spec.like((data.shape[0], *spec.shape[2:])))
    return packed, readable(mode, sizes)


def readable(mode: FakeTensorMode, real: torch.Tensor) -> FakeTensor:
    """A stand-in with real memory: C++ reads the sizes of packed sequences without a dispatch."""
    with _torch.PastDispatch():
        fake: Any = _torch.make_subclass(FakeTensor, real.clone())
    fake._spec = TensorSpec(tuple(real.shape), dtype=real.dtype, device=real.device)
    fake.fake_mode = mode
    mode.remember_literal(fake, real)
    return fake


def convert_lengths_to_tensors(args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[Any, Any]:
    """The arguments of `torch.ctc_loss` with lists of lengths converted to tensors: C++ would convert them without a
    dispatch, and their values would be lost."""

    def as_tensor(value: object) -> object:
        is_list = isinstance(value, (list, tuple)) and all(
            type(part) in (int, torch.SymInt) for part in value
        )
        return torch.tensor(value, dtype=torch.int64) if is_list else value

    return tuple(map(as_tensor, args)), {name: as_tensor(value) for name, value in kwargs.items()}


@answer_from_values("_ctc_loss", "_ctc_loss.Tensor")
def _ctc_loss(
    mode: FakeTensorMode, log_probs: FakeTensor, targets: FakeTensor, input_lengths: Any, target_lengths: Any,
    blank: int = 0, zero_infinity: bool = False,
) -> tuple[object, ...]:  # fmt: skip
    counts = [
        len(x) if isinstance(x, (list, tuple)) else x._spec.numel for x in (input_lengths, target_lengths)
    ]
    of_inputs, of_targets = (_read_lengths(mode, lengths) for lengths in (input_lengths, target_lengths))
    if of_targets is None:
        return NotImplemented
    losses = ctc_losses(log_probs._spec, targets._spec, counts, of_inputs or (), of_targets, blank)
    return tuple(make_new(mode, spec) for spec in losses)


def _read_lengths(mode: FakeTensorMode, lengths: object) -> Any:
    """None if they are not determined."""
    if not isinstance(lengths, FakeTensor):
        return lengths
    return [from_torch(length) for length in mode.tolist(lengths)] if is_known(lengths) else None


# --- Data-dependent operators in modes with a shape environment: the answer is a symbol -------------------------
# The same read of the same tensor gives the same symbol, until the tensor is written to or the mode's epoch changes
# (`FakeTensor.nonzero_memo` and its siblings).


def symbolic_item(mode: FakeTensorMode, fake: FakeTensor) -> Any:
    """`.item()`: a symbol of the tensor's kind; NotImplemented if the mode has no symbols. The number, if it is constant."""
    if mode.constant_listeners and (real := mode.constant_listeners[-1].read_value(fake)) is not None:
        with _torch.no_modes():
            return real.item()
    env = mode.shape_env
    if env is None or not env.settings.allow_scalar_outputs or is_in_composite():
        return NotImplemented
    if fake.item_memo is None:
        dtype, what = fake._spec.dtype, f".item() of {fake._spec}"
        if dtype is torch.bool:
            fake.item_memo = memo = env.create_unbacked_symbool(what=what)
        elif dtype.is_floating_point:
            low, high = _bounds_of_float(fake)
            fake.item_memo = memo = env.create_unbacked_symfloat(low=low, high=high, what=what)
        elif dtype.is_complex:
            return NotImplemented
        else:
            low, high = _bounds_of_item(fake)
            fake.item_memo = memo = env.create_unbacked_symint(low=low, high=high, what=what)
        return memo if fake.item_memo is None else fake.item_memo
    return fake.item_memo


def _bounds_of_item(fake: FakeTensor) -> tuple[int | None, int | None]:
    """Bounds of an integer that follow from the program: `argmax` is an index, a sum of a mask is a count."""
    found, limits = range_of(fake), range_of_dtype(fake._spec.dtype)
    low = None if found.low <= limits.low else math.ceil(found.low)
    return low, None if found.high >= limits.high else math.floor(found.high)


def _bounds_of_float(fake: FakeTensor) -> tuple[int | None, int | None]:
    """The same of a float: a step counter is not negative."""
    found = range_of(fake)
    low, high = (None if math.isinf(end) or found.may_be_nan else end for end in (found.low, found.high))
    return low if low is None else math.floor(low), high if high is None else math.ceil(high)


def _answers_sizes(mode: FakeTensorMode) -> bool:
    """Whether data-dependent sizes are answered, by a policy or as symbols."""
    return mode.shape_env is not None or mode.answers is not None


def fresh_size(
    mode: FakeTensorMode, func: object, fake: FakeTensor, *question: object, low: int = 0, high: object = None
) -> Any:
    """The data-dependent size of an operator's result on this tensor; NotImplemented if the mode answers none, or if the
    values are determined: `answer` runs the operator on them.

    `question` names what is counted: the same question on the same tensor has the same answer.
    """
    env = None if is_in_composite() else mode.shape_env
    most = high if type(high) is int else None
    if mode.answers is not None and not fake._spec.is_symbolic:
        if is_known(fake):
            return NotImplemented
        found = fake.recall_size(question)
        if found is None:
            found = answer_size(mode, func, fake, low, most)
            fake.remember_size(question, found)
        return found
    if env is None or not env.settings.allow_dynamic_output_shape_ops or is_computed(fake):
        return NotImplemented
    if most is not None and most <= low:
        return most
    found = fake.recall_size(question)
    if found is None:
        found = env.create_unbacked_symint(low=low, high=most, what=f"{func} of {fake._spec}")
        fake.remember_size(question, found)
    return from_torch(found)


@contextmanager
def add_context(func: object, *fakes: FakeTensor | None) -> Iterator[None]:
    """Add the call and the user's line to errors raised inside."""
    try:
        yield
    except UnderstudyError as error:
        specs = ", ".join(str(fake._spec) for fake in fakes if fake is not None)
        raise with_line(error, str(func), specs) from None


@handler("aten::nonzero")
def nonzero(mode: FakeTensorMode, func: object, args: Any, kwargs: dict[str, object]) -> object:
    spec = args[0]._spec
    count = fresh_size(mode, func, args[0], "nonzero", high=spec.numel)
    if count is NotImplemented:
        return NotImplemented
    args[0].nonzero_memo = to_torch(count)
    stride = (1, count) if spec.device.type == "cpu" else None
    return make_new(mode, TensorSpec((count, spec.ndim), stride, dtype=torch.int64, device=spec.device))


@handler("aten::masked_select")
def masked_select(mode: FakeTensorMode, func: object, args: Any, kwargs: object) -> Any:
    fake, mask = args
    with add_context(func, fake, mask):
        if mask._spec.dtype is not torch.bool:
            raise DtypeError(f"masked_select: expected a mask of dtype b8, got {mask._spec}")
        shape = broadcast_shapes(fake._spec.shape, mask._spec.shape)
    # If the mask is broadcast, its true elements are repeated.
    times = () if same_shape(shape, mask._spec.shape) else (shape,)
    count = fresh_size(mode, func, mask, "nonzero", *times, high=product(shape))
    return NotImplemented if count is NotImplemented else make_new(mode, fake._spec.like((count,)))


@handler("aten::index.Tensor", "aten::index_put", "aten::index_put_", "aten::_unsafe_index.Tensor")
def index(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Masks among the indices are replaced by the positions at which they are true.

    A write by one mask needs no handler: the number of positions is not the size of a tensor."""
    indices = args[1]
    if not _answers_sizes(mode) or not any(i is not None and i.dtype in MASKS for i in indices):
        return NotImplemented
    check_masks_of_fakes(func, args[0], indices)
    expanded: list[Any] = []
    # `index_put` returns the shape of its input: the number of positions does not matter.
    is_put = "index_put" in func.name()
    if is_put and sum(entry is not None for entry in indices) == 1:
        return NotImplemented
    has_symbols = is_put and mode.shape_env is not None
    ignored = mode.shape_env.ignore_fresh_unbacked_symbols() if has_symbols else nullcontext()
    with mode, ignored:
        for entry in indices:
            is_mask = entry is not None and entry.dtype in MASKS
            expanded.extend(entry.nonzero().unbind(1) if is_mask else [entry])
        return func(args[0], expanded, *args[2:], **kwargs)


@handler(
    "aten::_unique",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::unique_dim_consecutive",
)
def unique(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any) -> tuple[object, ...]:
    fake, spec = args[0], args[0]._spec
    names = _torch.argument_names(func)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    dim = given.get("dim")
    with add_context(func, fake):
        if dim is not None:
            if not spec.ndim:
                raise DimensionError(f"unique: {spec} has no dimension {dim}")
            dim = wrap_dim(dim, spec.ndim)
    if (
        _answers_sizes(mode)
        and dim is not None
        and not has_unbacked(spec.shape[dim])
        and spec.shape[dim] == 0
    ):
        # Without elements, the kernel returns a new contiguous tensor.
        integers = spec.like((0,), dtype=torch.int64)
        return make_new(mode, spec.like()), make_new(mode, integers), make_new(mode, integers)
    if (
        _answers_sizes(mode)
        and dim is not None
        and any(not has_unbacked(size) and size == 0 for size in spec.shape)
    ):
        raise with_line(ShapeMismatch(f"{func}: expected slices with elements, got {spec}"), str(func), spec)
    among = spec.numel if dim is None else spec.shape[dim]
    if (
        mode.answers is not None
        and dim is None
        and not spec.is_symbolic
        and spec.dtype in INTEGERS | BOOL | UNSIGNED
    ):
        values = range_of(fake)
        among = min(among, int(values.high - values.low + 1))
    is_consecutive = "consecutive" in func.name()
    count = fresh_size(mode, func, fake, is_consecutive, "unique", dim, high=among)
    if count is NotImplemented:
        return NotImplemented
    setattr(fake, "unique_consecutive_memo" if is_consecutive else "unique_memo", to_torch(count))
    distinct = spec.like((count,)) if dim is None else _replace_dim(spec, dim % spec.ndim, count)
    inverse_shape = spec.shape if dim is None else (spec.shape[dim],)
    integers = spec.like((0,), dtype=torch.int64)
    counted = spec if dim is None else spec.like((spec.shape[dim],))
    is_flat = dim is None or (func.name() == "aten::unique_consecutive" and spec.ndim == 1)
    gives_all = not is_flat and spec.device.type == "cpu"  # even if they were not requested
    results = (
        make_new(mode, distinct),
        make_new(
            mode, integers.like(inverse_shape) if gives_all or given.get("return_inverse") else integers
        ),
        _make_counts(
            mode, counted, integers.like((count,)) if gives_all or given.get("return_counts") else integers
        ),
    )
    return results[:2] if func.name() == "aten::_unique" else results


def _replace_dim(spec: TensorSpec, dim: int, count: Any) -> TensorSpec:
    """The spec with `count` slices along `dim`: the kernel stacks them in front, then moves the dimension."""
    others = [i for i in range(spec.ndim) if i != dim]
    stacked = contiguous_strides((count, *(spec.shape[i] for i in others)))
    shape, stride = list(spec.shape), list(stacked[1:])
    shape[dim] = count
    stride.insert(dim, stacked[0])
    return spec.like(shape, stride=stride)


@handler("aten::repeat_interleave.Tensor")
def repeat_interleave(mode: FakeTensorMode, func: object, args: Any, kwargs: Any) -> Any:
    repeats = args[0]
    with add_context(func, repeats):
        if repeats._spec.ndim != 1:
            raise ShapeMismatch(f"repeat_interleave: expected repeats of one dimension, got {repeats._spec}")
        check_any_dtype("repeat_interleave", repeats._spec, (torch.int64, torch.int32))
    size = kwargs.get("output_size")
    if size is not None:
        count = from_torch(size)
    else:
        count = fresh_size(mode, func, repeats, "sum", high=_largest_total(mode, repeats))
    return NotImplemented if count is NotImplemented else make_new(mode, repeats._spec.like((count,)))


def _largest_total(mode: FakeTensorMode, repeats: FakeTensor) -> int | None:
    """The largest possible sum of `repeats`; None if it is unbounded."""
    high = range_of(repeats).high
    if answers_of(mode) is None or repeats._spec.is_symbolic:
        return None
    return int(repeats._spec.numel) * (int(high) if high < 1 << 20 else 1)


@handler("aten::bincount")
def bincount(mode: FakeTensorMode, func: object, args: Any, kwargs: Any) -> Any:
    fake = args[0]
    weights = args[1] if len(args) > 1 else kwargs.get("weights")
    least = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
    with add_context(func, fake, weights):
        _check_counted(fake._spec, None if weights is None else weights._spec, least)
    if fake._spec.shape[0] == 0:  # eager skips the other checks
        return make_new(mode, fake._spec.like((least,), dtype=torch.int64))
    count = fresh_size(mode, func, fake, "bins", least, low=least)
    if count is NotImplemented:
        return NotImplemented
    made = fake._spec.like((count,), dtype=_dtype_of_bins(weights))
    return _make_counts(mode, fake._spec, made) if weights is None else make_new(mode, made)


def _make_counts(mode: FakeTensorMode, counted: TensorSpec, spec: TensorSpec) -> FakeTensor:
    """How many of the elements are in each of several groups."""
    made = make_new(mode, spec)
    if not counted.is_symbolic and not spec.is_symbolic:
        store_ranges(counts_of(counted, spec.numel), [made], is_written=False)
    return made


def _dtype_of_bins(weights: FakeTensor | None) -> torch.dtype:
    return (
        torch.int64 if weights is None else torch.float32 if weights.dtype is torch.float32 else torch.float64
    )


def _check_counted(spec: TensorSpec, weights: TensorSpec | None, least: int) -> None:
    check_any_dtype("bincount", spec, INTEGERS)
    if least < 0:
        raise ArgumentError(f"bincount: minlength must not be negative, got {least}")
    if spec.ndim != 1:
        raise ShapeMismatch(f"bincount: expected a tensor of one dimension, got {spec}")
    if spec.shape[0] == 0:
        return
    if weights is not None and (weights.ndim != 1 or weights.shape[0] != spec.shape[0]):
        raise ShapeMismatch(f"bincount: expected one weight for each element of {spec}, got {weights}")


@handler("aten::_ctc_loss.Tensor")
def ctc_loss(mode: FakeTensorMode, func: object, args: Any, kwargs: object) -> Any:
    """Returns the losses, and a table with 2n + 1 columns, n being the longest target."""
    log_probs, _, input_lengths, target_lengths = args[:4]
    if not _answers_sizes(mode) or is_known(target_lengths) or log_probs._spec.ndim != 3:
        return NotImplemented
    with add_context(func, *args[:4]):
        for lengths in (input_lengths._spec, target_lengths._spec):
            if lengths.ndim != 1 or lengths.shape[0] != log_probs._spec.shape[1]:
                raise ShapeMismatch(
                    f"ctc_loss: expected one length for each entry of the batch of {log_probs._spec}, got {lengths}"
                )
    targets = args[1]._spec
    longest = targets.shape[-1] if targets.ndim == 2 else targets.numel
    columns = fresh_size(mode, func, target_lengths, "columns", low=1, high=2 * longest + 1)
    if columns is NotImplemented:
        return NotImplemented
    spec = log_probs._spec
    length, batch, _ = spec.shape
    return make_new(mode, spec.like((batch,))), make_new(mode, spec.like((batch, length, columns)))


def make_symbolic_list(mode: FakeTensorMode, fake: FakeTensor) -> Any:
    """`tolist()`: a symbol for each element. Lists have a length, so symbolic sizes are specialised."""
    if mode.shape_env is None:
        return NotImplemented
    for size in fake._spec.shape:
        int(size)
    with mode:
        return _nested_list(fake)


def _nested_list(fake: torch.Tensor) -> Any:
    return [_nested_list(part) for part in fake.unbind()] if fake.ndim else fake.item()


@handler("aten::sym_constrain_range")
def constrain_number(mode: FakeTensorMode, func: OpOverload, args: Any, kwargs: Any) -> Any:
    """The program promises a range for a data-dependent number."""
    if isinstance(args[0], (int, torch.SymInt)):
        promise_range(args[0], kwargs.get("min"), kwargs.get("max"), is_checked_by_operator=True)


@handler("aten::sym_constrain_range_for_size")
def constrain_size(mode: FakeTensorMode, func: Any, args: object, kwargs: Any) -> Any:
    """As `constrain_number`, for a size, which is at least 0."""
    constrain_number(mode, func, args, {**kwargs, "min": max(kwargs.get("min") or 0, 0)})
