"""Handlers of calls that need tensors, not only their specs: reading values, lifting literals, views within a storage,
zero tensors of forward-mode gradients."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import torch

from understudy import _torch
from understudy._torch import OpOverload
from understudy.errors import (
    ArgumentError,
    Context,
    DataDependentOutputException,
    DynamicOutputShapeException,
    MetadataMismatchError,
    MixedTensorsError,
    UnsupportedMutationAliasingException,
    UnsupportedOperatorException,
)
from understudy.fake.inputs import handler, real_handler
from understudy.fake.native import canonical
from understudy.fake.realise import extent, extent_if_nonempty, make_new, make_zeros, realise
from understudy.fake.tensor import FakeTensor
from understudy.fake.values.answers import answer_equal, answer_item, answer_values, answers_of
from understudy.fake.values.data_dependent import make_symbolic_list, symbolic_item
from understudy.fake.values.determined import DeterminedContents, FilledStorage, read_number, start_contents
from understudy.fake.values.sizes_in_tensors import symbolic_values_of
from understudy.infer.kernels import CPU, run_on_zeros, strided_on, with_fixed_sizes
from understudy.infer.plan import Plan
from understudy.lines import user_line
from understudy.ops.traits.ranges import ValueRange
from understudy.shapes.sizes import (
    fits_in_storage,
    fix_sizes,
    from_torch,
    has_unbacked,
    hint_of,
    is_provably_equal,
)
from understudy.spec import TensorSpec, same_shape
from understudy.spec.call import NUMBER_TYPES, Call, flat, map_structure
from understudy.spec.error_context import hint_for, make_unsized_sparse_error, with_line

if TYPE_CHECKING:
    from understudy.fake.mode import FakeTensorMode

SYMBOLIC_DTYPES: dict[type, Any] = {
    torch.SymInt: torch.int64,
    torch.SymBool: torch.bool,
    torch.SymFloat: None,
}
"""None stands for the default dtype."""
LIFTED_TYPES = NUMBER_TYPES | SYMBOLIC_DTYPES.keys()
WIDE_DTYPES = {float: torch.float64, complex: torch.complex128}
"""In which C++ keeps a number that it has wrapped: views and copies do, arithmetic brings it down to the default dtype."""
COPIES = frozenset({"aten::clone", "aten::_to_copy", "aten::copy"})

# --- values --------------------------------------------------------------------------------------------------


@handler("aten::item")
def item_in_inference_mode(mode: FakeTensorMode, func: Any, args: Any, kwargs: object) -> Any:
    """It arrives whole there. C++ refuses tensors that have not one element, and otherwise reads a value."""
    return mode.decompose(func, args, kwargs)


@handler("aten::_local_scalar_dense")
def item(mode: FakeTensorMode, func: Any, args: Any, kwargs: object) -> Any:
    fake = args[0]
    if (symbols := symbolic_values_of(fake)) is not None and len(symbols.flat) == 1:
        return symbols.flat[0]
    if fake._determined is not None and not fake._spec.shape:
        number = read_number(fake._determined, fake._spec)
        if number is not None:
            return number
    value = mode.value_of(fake)
    if value is not None:
        with _torch.PastDispatch():
            return value.item()
    answer = answer_item(mode, fake)
    if answer is NotImplemented:
        answer = symbolic_item(mode, fake)
    if answer is not NotImplemented:
        return answer
    is_open = mode.allow_scalar_outputs  # symbols are allowed, but there is none for this dtype
    raise _make_no_value_error(fake, func, "reads a value", AS_TWO_SYMBOLS if is_open else "")


@handler("aten::equal")
def equal(mode: FakeTensorMode, func: Any, args: Any, kwargs: object) -> Any:
    a, b = args
    if not same_shape(a._spec.shape, b._spec.shape):
        return False
    first, second = mode.value_of(a), mode.value_of(b)
    if first is not None and second is not None:
        with _torch.no_modes():
            return torch.equal(first, second)
    answer = answer_equal(mode, a, b)
    if answer is not NotImplemented:
        return bool(answer)
    raise _make_no_value_error(a, func, "compares values", AS_A_SYMBOL if mode.allow_scalar_outputs else "")


@handler("aten::is_set_to")
def is_set_to(mode: FakeTensorMode, func: Any, args: Any, kwargs: object) -> bool:
    """Whether two tensors are the same view of the same storage."""
    a, b = (fake._spec for fake in args)
    is_one_storage = _torch.storage_id(args[0]) == _torch.storage_id(args[1])
    return is_one_storage and same_shape((*a.shape, *a.stride, a.offset), (*b.shape, *b.stride, b.offset))


DIM_MOVING_OPS = (
    "t_",
    "transpose_",
    "swapdims_",
    "swapaxes_",
    "squeeze_",
    "squeeze_.dim",
    "squeeze_.dims",
    "unsqueeze_",
)


@handler(*(f"aten::{name}" for name in DIM_MOVING_OPS))
def refuse_moving_base(mode: FakeTensorMode, func: OpOverload, args: Any, kwargs: object) -> Any:
    """Raise if an in-place transpose (or similar) is called on a tensor with a view that autograd differentiates.

    For subclasses, autograd regenerates such a view by repeating the call on the changed base: that would be another view.
    """
    fake, spec = args[0], args[0]._spec
    if not fake.requires_grad or fake._is_view() or not _torch.has_other_tensors(fake):
        return NotImplemented
    for view in gc.get_objects():
        if type(view) is FakeTensor and view.requires_grad and view is not fake and view._base is fake:
            reason = f"{func}: {spec} has a view, {view._spec}, whose gradient would refer to other elements"
            raise with_line(
                UnsupportedMutationAliasingException(reason), str(func), spec,
                "create the view afterwards, delete it before, or use the out-of-place operator (x = x.t())",
            )  # fmt: skip
    return NotImplemented


@handler("aten::_spdiags")
def spdiags(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any) -> Any:
    """The number of stored elements depends on the values of the offsets, which are usually literals."""
    inputs = flat(FakeTensor, args, kwargs)
    offsets = mode.value_of(args[1])
    if offsets is None:
        raise with_line(
            DynamicOutputShapeException("spdiags: the number of stored elements depends on the offsets, which have no data"),
            str(func), ", ".join(str(fake._spec) for fake in inputs),
        )  # fmt: skip
    call = Call.of(func, *map_structure(lambda fake: fake._spec, FakeTensor, (args, kwargs)))
    call = with_fixed_sizes(call)
    outcomes = run_on_zeros(
        call, lambda spec: offsets if spec is call.inputs[1] else strided_on(spec, CPU, zero=True)
    )
    return realise(mode, outcomes, inputs)


@handler(
    "aten::sparse_compressed_tensor.comp_plain_value", "aten::sparse_compressed_tensor.comp_plain_value_size"
)
def compressed_tensor(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any) -> Any:
    """A size that is not given, and whether the indices fit, depend on their values, which are usually literals."""
    inputs = flat(FakeTensor, args, kwargs)
    has_size = len(args) > 3
    is_checked = torch.sparse.check_sparse_tensor_invariants.is_enabled()
    if has_size and not is_checked:
        return NotImplemented
    known = [mode.value_of(fake) for fake in inputs[:2]]
    kwargs = map_structure(canonical, torch.device, kwargs)
    call = Call.of(func, *map_structure(lambda fake: fake._spec, FakeTensor, (args, kwargs)))
    if known[1] is None and not has_size:
        raise make_unsized_sparse_error(str(func), ", ".join(map(str, call.inputs)))
    values = iter((*known, None))

    def make(spec: TensorSpec) -> torch.Tensor:
        value = next(values)
        return strided_on(spec, CPU, zero=True) if value is None else value

    with torch.sparse.check_sparse_tensor_invariants(
        is_checked and all(value is not None for value in known)
    ):
        return realise(mode, run_on_zeros(with_fixed_sizes(call), make), inputs)


AS_TWO_SYMBOLS = "symbols are real numbers: use x.real.item() and x.imag.item()"
AS_A_SYMBOL = "use (a == b).all().item(), which is a symbol; or move the decision out of the code that runs on stand-ins"


def _make_no_value_error(
    fake: FakeTensor, func: OpOverload, what: str, hint: str = ""
) -> DataDependentOutputException:
    error = DataDependentOutputException(f"{func} {what}, and {fake._spec} has no data", func=func)
    error.with_context(Context(str(func), str(fake._spec), user_line(), hint or hint_for(error)), func)
    return error


def tolist(mode: FakeTensorMode, fake: FakeTensor) -> Any:
    if (numbers := symbolic_values_of(fake)) is not None:
        return numbers.as_lists()
    value = mode.value_of(fake)
    if value is None and mode.constant_listeners:
        value = mode.constant_listeners[-1].read_value(fake)
    if value is not None:
        with _torch.no_modes():
            return value.tolist()
    answer = answer_values(mode, fake, "tolist")
    if answer is not None:
        with _torch.no_modes():
            return answer.tolist()
    symbols = make_symbolic_list(mode, fake)
    if symbols is not NotImplemented:
        return symbols
    raise _make_no_value_error(
        fake, torch.ops.aten._local_scalar_dense.default, "(Tensor.tolist) reads values"
    )


def numpy(mode: FakeTensorMode, fake: FakeTensor) -> torch.Tensor | None:
    """The real tensor behind `fake.numpy()`; None if its values are unknown."""
    value = mode.value_of(fake)
    return answer_values(mode, fake, "numpy") if value is None else value


def dynamic_size(
    mode: FakeTensorMode, call: Call, op: OpOverload, least: int, most: int | None
) -> int | torch.SymInt:
    """`ctx.new_dynamic_size(min=..., max=...)` in the fake of a custom operator. The policy for answers gets the upper
    bound that the operator's author gave, or else the number of rows of the arguments."""
    env, answers = mode.shape_env, answers_of(mode)
    if answers is not None and call.inputs and not any(spec.is_symbolic for spec in call.inputs):
        rows = (
            max((int(spec.shape[0]) for spec in call.inputs if spec.shape), default=1)
            if most is None
            else most
        )
        size = answers.ask(
            op.overloadpacket.__name__, call.inputs[0], ValueRange(), least=least, most=max(least, rows)
        )
        if size is not NotImplemented:
            return int(size)
    if env is None or not env.settings.allow_dynamic_output_shape_ops:
        raise DynamicOutputShapeException(f"{op}: the size of the result depends on values", func=op)
    asked = f"{op}: ctx.new_dynamic_size(min={least}, max={most})"
    if isinstance(least, torch.SymInt) or isinstance(most, torch.SymInt):
        raise ArgumentError(f"{asked}: min and max have to be plain integers, not SymInt")
    if least < 0:
        raise ArgumentError(f"{asked}: min has to be greater than or equal to 0, as sizes are")
    return env.create_unbacked_symint(low=least, high=most, what=str(op))


# --- literals ------------------------------------------------------------------------------------------------


@real_handler("aten::lift_fresh", "aten::lift_fresh_copy", "aten::lift")
def lift(mode: FakeTensorMode, func: object, args: Any, kwargs: object) -> Any:
    """`torch.tensor([1, 2])`: torch makes a real tensor, and passes it to this operator."""
    real = args[0]
    fake = make_new(mode, _spec_of_dense(real))
    if real.device.type == "cpu":
        with _torch.PastDispatch():
            mode.remember_literal(fake, real.detach().clone(memory_format=torch.preserve_format))
    return fake


@real_handler("aten::detach_")
def detach_literal_on_meta(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any) -> Any:
    """`torch.tensor([1], device="meta")` is a real tensor, whose graph C++ drops. In inference mode, that is a dispatch."""
    if args[0].device.type != "meta":
        return NotImplemented
    with _torch.PastDispatch():
        return func(*args, **kwargs)


def by_lifted_numbers(
    mode: FakeTensorMode, func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]
) -> Any:
    """A call in which all tensors are replaced by numbers: the same call with CPU tensors.

    C++ wraps Python numbers into tensors, and passes them to Python as numbers again.
    """
    if not args or type(args[0]) not in LIFTED_TYPES or any(type(value) is FakeTensor for value in args):
        return NotImplemented
    if not _torch.takes_tensor(func, 0):
        return NotImplemented

    def lift(position: int, value: object) -> Any:
        if type(value) not in LIFTED_TYPES or not _torch.takes_tensor(func, position):
            return value
        if type(value) in SYMBOLIC_DTYPES:
            dtype = SYMBOLIC_DTYPES[type(value)] or torch.get_default_dtype()
            spec = TensorSpec((), dtype=dtype, device=torch.device("cpu"))
            fake = make_new(mode, spec)
            fake._determined = start_contents(
                torch.ops.aten.scalar_tensor.default, (value,), {"dtype": dtype}, spec
            )
            return fake
        with _torch.PastDispatch():
            real = torch.tensor(value, dtype=WIDE_DTYPES.get(type(value)) if keeps_dtype else None)
        fake = make_new(mode, _spec_of_dense(real))
        mode.remember_literal(fake, real)
        return fake

    keeps_dtype = func.is_view or func.name() in COPIES
    lifted = tuple([lift(position, value) for position, value in enumerate(args)])
    return mode.__torch_dispatch__(func, (), lifted, kwargs)


def _spec_of_dense(real: torch.Tensor) -> TensorSpec:
    return TensorSpec(tuple(real.shape), real.stride(), dtype=real.dtype, device=canonical(real.device))


@handler("aten::lift_fresh", "aten::lift")
def lift_fake(mode: FakeTensorMode, func: object, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
    return args[0]


# --- queries from C++ -------------------------------------------------------------------------------------------


@handler("prim::device")
def device(mode: FakeTensorMode, func: object, args: Any, kwargs: object) -> Any:
    return args[0]._spec.device


@handler("prim::layout")
def layout(mode: FakeTensorMode, func: object, args: Any, kwargs: object) -> Any:
    return args[0].layout


@handler("aten::is_pinned")
def is_pinned(mode: FakeTensorMode, func: object, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
    return False


@handler("aten::_pin_memory", "aten::pin_memory")
def pin_memory(
    mode: FakeTensorMode, func: object, args: tuple[object, ...], kwargs: dict[str, object]
) -> Any:
    return mode.__torch_dispatch__(torch.ops.aten.clone.default, (), (args[0],), {})


@handler("aten::record_stream")
def record_stream(
    mode: FakeTensorMode, func: object, args: tuple[object, ...], kwargs: dict[str, object]
) -> Any:
    return None


# --- higher-order operators ----------------------------------------------------------------------------------


def by_higher_order(
    mode: FakeTensorMode, func: object, args: tuple[object, ...], kwargs: dict[str, object]
) -> Any:
    """Run a higher-order operator: by our record, or by the implementation that torch registered for fake modes."""
    if not isinstance(func, _torch.HigherOrderOperator):
        return NotImplemented
    registered = _torch.registered_higher_order_fake(func)
    if registered is not None:
        with mode:
            return registered(*args, **kwargs)
    implementation = func.python_key_table.get(_torch.torch_fake_mode_class())
    if implementation is None:
        raise UnsupportedOperatorException(
            f"the higher-order operator {func} has no fake implementation (py_impl)", func=func
        )
    return implementation(mode, *args, **kwargs)


# --- views within their storage --------------------------------------------------------------------------------


@handler("aten::as_strided_")
def moved_within_storage(mode: FakeTensorMode, func: object, args: Any, kwargs: Any) -> Any:
    """The size of a storage is known by the sizes of its tensor: they are fixed if the tensor ends elsewhere afterwards."""
    answer = check_view_in_storage(mode, func, args, kwargs)
    fake, spec = args[0], args[0]._spec
    if spec.is_symbolic and not fake._is_view() and spec.sparse is None:
        shape, stride = ([from_torch(number) for number in numbers] for numbers in args[1:3])
        offset = from_torch(args[3] if len(args) > 3 else kwargs.get("storage_offset"))
        if not is_provably_equal(
            extent_if_nonempty(spec.as_view(shape, stride, offset)), extent_if_nonempty(spec)
        ):
            fix_sizes(spec.shape)
    return answer


@handler("aten::as_strided", "aten::as_strided_copy", "aten::as_strided_copy.out")
def check_view_in_storage(mode: FakeTensorMode, func: object, args: Any, kwargs: Any) -> Any:
    fake, shape, stride = args[:3]
    offset = args[3] if len(args) > 3 else kwargs.get("storage_offset")
    return _check_view(func, fake, shape, stride, offset, _torch.native_storage(fake).nbytes())


@handler("aten::as_strided_scatter")
def check_scatter_in_storage(mode: FakeTensorMode, func: object, args: Any, kwargs: Any) -> Any:
    """It writes into a copy of the whole storage; for a tensor that overlaps itself, into a copy of its elements."""
    fake, _, shape, stride = args[:4]
    spec = fake._spec
    offset = args[4] if len(args) > 4 else kwargs.get("storage_offset")
    steps = zip(spec.shape, spec.stride, strict=True)
    is_expanded = any(type(step) is int and step == 0 and size > 1 for size, step in steps)
    if is_expanded and spec.is_symbolic:
        return _check_symbolic_view(func, fake, spec.like(), (shape, stride, offset), 0)
    storage_elements = spec.numel * spec.itemsize if is_expanded else _torch.native_storage(fake).nbytes()
    return _check_view(func, fake, shape, stride, offset, storage_elements)


def _check_view(
    func: object, fake: FakeTensor, shape: Any, stride: Any, offset: object, storage_elements: int
) -> Any:
    """Raise if a view reaches beyond its storage. Rules do not know the size of storages."""
    numbers = (*shape, *stride, 0 if offset is None else offset)
    if fake._spec.sparse is not None or len(shape) != len(stride):
        return NotImplemented
    base: Any = fake._base if fake._is_view() else fake
    if type(base) is not FakeTensor:
        return NotImplemented
    if base._spec.is_symbolic or fake._spec.is_symbolic or any(type(number) is not int for number in numbers):
        return _check_symbolic_view(func, fake, base._spec, (shape, stride, offset), storage_elements)
    if any(number < 0 for number in numbers):
        return NotImplemented  # the rule raises the error
    view = fake._spec.as_view(shape, stride, offset)
    can_represent = fake._spec.numel == 0 or extent(fake._spec) * view.itemsize <= storage_elements
    if can_represent and storage_elements < extent(view) * view.itemsize and view.numel != 0:
        raise _make_storage_error(func, fake, view, storage_elements)
    return NotImplemented


def _check_symbolic_view(
    func: object, fake: FakeTensor, base: TensorSpec, geometry: tuple[Any, Any, Any], storage_elements: int
) -> Any:
    """The storage of a stand-in with symbolic sizes has no fixed size, and that of an input the size of the example: a
    guard keeps the view within the base tensor."""
    shape, stride = ([from_torch(number) for number in numbers] for numbers in geometry[:2])
    offset = from_torch(geometry[2])
    if has_unbacked(*shape, *stride, offset or 0, *fake._spec.shape, *base.shape):
        return NotImplemented
    view = fake._spec.as_view(shape, stride, offset)
    needed, own = extent_if_nonempty(view) * view.itemsize, extent_if_nonempty(base) * base.itemsize
    is_empty = 0 in map(hint_of, shape)
    own_at_hand = 0 if 0 in map(hint_of, base.shape) else hint_of(own)
    if is_empty or hint_of(needed) <= own_at_hand:
        fits_in_storage(needed, view.shape, own, base.shape)
    elif hint_of(needed) > (storage_elements or own_at_hand):
        raise _make_storage_error(func, fake, view, storage_elements or own_at_hand)
    elif hint_of(needed) > hint_of(own):
        # It fits into a storage that is larger than the tensor; with symbolic sizes that is not known.
        fix_sizes((*view.shape, *view.stride, view.offset, *base.shape))
    return NotImplemented


def _make_storage_error(func: Any, fake: FakeTensor, view: TensorSpec, storage_elements: int) -> Exception:
    error = ArgumentError(
        f"{func.overloadpacket.__name__}: {view} is out of bounds: it reaches to byte "
        f"{hint_of(extent_if_nonempty(view)) * view.itemsize:,}, the storage of {fake._spec} has {storage_elements:,}"
    )
    return with_line(
        error, str(func), f"{fake._spec}, {list(view.shape)}, {list(view.stride)}, {view.offset}"
    )


@handler("aten::_sparse_mm_reduce_impl_backward")
def sparse_mm_reduce_backward(
    mode: FakeTensorMode, func: object, args: Any, kwargs: dict[str, object]
) -> Any:
    """The real kernel does not check its indices, which are unknown: it must not run on zeros."""
    sparse, _, weight, _, _, (of_sparse, of_weight) = args
    return (
        make_new(mode, sparse._spec) if of_sparse else None,
        make_new(mode, weight._spec.like()) if of_weight else None,
    )


# --- checks --------------------------------------------------------------------------------------------------


def crosscheck(call: Call, cached: Plan, fresh: Plan) -> None:
    if cached != fresh:
        raise MetadataMismatchError(
            f"the cache and a fresh inference differ for {call}:\n"
            f"  cached {cached.outcomes}\n  fresh  {fresh.outcomes}",
            func=call.op,
        )


# --- forward-mode gradients: their storage is like that of their tensor, and those of constants are ZeroTensors -----


def _storage_elements(fake: FakeTensor) -> Any:
    """How many elements the storage holds: with symbolic sizes, as many as the tensor that it was made for."""
    if type(fake._determined) is ZeroTensorContents:
        return 1
    base = fake._base if fake._is_view() else fake
    spec = base._spec if type(base) is FakeTensor else fake._spec
    if not spec.is_symbolic:
        return _torch.native_storage(fake).nbytes() // fake._spec.itemsize
    elements = extent_if_nonempty(spec)
    return (
        elements if spec.itemsize == fake._spec.itemsize else elements * spec.itemsize // fake._spec.itemsize
    )


@handler("aten::_has_same_storage_numel")
def has_same_storage_numel(mode: FakeTensorMode, func: object, args: Any, kwargs: object) -> bool:
    first, second = (_storage_elements(fake) for fake in args)
    return is_provably_equal(first, second) or (not has_unbacked(first, second) and bool(first == second))


@handler("aten::_new_zeros_with_same_feature_meta")
def zeros_with_same_storage(mode: FakeTensorMode, func: object, args: Any, kwargs: Any) -> Any:
    """Zeros in the dtype of the first, with the layout and the storage of the second behind the batch dimensions."""
    spec, wanted = args[0]._spec, args[1]._spec
    if not (spec.is_symbolic or wanted.is_symbolic) or wanted.sparse is not None:
        return NotImplemented
    shape, stride = wanted.shape, wanted.stride
    step: Any = _storage_elements(args[1])
    for size in reversed(spec.shape[: kwargs.get("self_num_batch_dims", 0)]):
        shape, stride, step = (size, *shape), (step, *stride), step * size
    return make_new(mode, TensorSpec(shape, stride, wanted.offset, dtype=spec.dtype, device=spec.device))


class DeterminedZeros(DeterminedContents):
    """The contents of a ZeroTensor: views of it are ZeroTensors as well."""

    __slots__ = ()
    is_zeros = True


class ZeroTensorContents(DeterminedContents):
    """For a stand-in without the ZeroTensor key that is a ZeroTensor when the graph runs: one element, expanded. C++ stores
    more of them before it makes them the tangent of a tensor, and multiplies them from then on: 0 * inf is NaN."""

    __slots__ = ()


@handler("aten::_efficientzerotensor")
def zero_tensor(mode: Any, func: OpOverload, args: Any, kwargs: Any) -> FakeTensor:
    """With symbolic sizes, C++ would specialise them for such a tensor. Inside torch.func.jvp ordinary zeros work as
    well; outside, C++ may read the value.

    Always answered here, never by a plan: a cached plan would be used by modes of the other kind.
    """
    spec = TensorSpec(
        tuple([from_torch(size) for size in args[0]]),
        dtype=kwargs.get("dtype") or torch.get_default_dtype(),
        device=canonical(kwargs.get("device") or torch.get_default_device()),
    )
    has_symbols = mode.shape_env is not None and not mode.static_shapes
    if spec.is_symbolic or (has_symbols and _torch.is_inside_jvp()):
        fake = make_new(mode, spec)
        fake._determined = ZeroTensorContents(None)
        return fake
    return make_zeros(mode, spec, DeterminedZeros(FilledStorage(spec, 0)))


def spec_of_function_result(call: Call, result: torch.Tensor) -> TensorSpec:
    """The spec of a tensor that a registered fake function or a decomposition returned."""
    if type(result) is not FakeTensor:
        raise MixedTensorsError(
            f"{call.op}: expected a stand-in from its fake implementation, got a real {type(result).__name__} of shape "
            f"{list(result.shape)}; make the result from the arguments, as in torch.empty_like(x) or x.new_empty(...)",
            func=call.op,
        )
    return result._spec
