"""Operators: their schemas, their kernels, registered fakes and decompositions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch._C import DispatchKey
from torch._library.custom_ops import OPDEFS as _custom_definitions
from torch._library.simple_registry import singleton as _custom_registry
from torch._ops import OpOverload

Answer = TypeVar("Answer")


def returns_nothing(op: object) -> bool:
    return not op._schema.returns


def returned_arguments(op: object) -> list[str] | None:
    """The arguments that an operator returns, one for each result, if it returns only arguments that it writes to."""
    schema = op._schema
    by_alias = {
        tuple(argument.alias_info.before_set): argument.name
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write and str(argument.type) == "Tensor"
    }
    names = [
        by_alias.get(tuple(result.alias_info.before_set)) if result.alias_info is not None else None
        for result in schema.returns
    ]
    found = [name for name in names if name is not None]
    return found if found and len(found) == len(names) else None


def is_decomposed_by_autograd(op: object) -> bool:
    """Whether autograd decomposes this operator, so that it is not expected below autograd."""
    return (
        isinstance(op, OpOverload)
        and has_composite_kernel(op)
        and not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CPU")
    )


def tracks_own_views(op: OpOverload) -> bool:
    """Whether C++ tracks views and writes of this operator itself, not only those of the operators inside it."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "ADInplaceOrView"))


def has_kernel(op: OpOverload, key: str) -> bool:
    """Whether a kernel is registered for just this dispatch key."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key))


def has_autocast_kernel(op: OpOverload, device_type: str) -> bool:
    """Whether autocast casts the arguments of the whole operator. Other devices are cast as CUDA's are."""
    key = "AutocastCPU" if device_type == "cpu" else "AutocastCUDA"
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key))


def has_operator(name: str) -> bool:
    """Whether this release of torch has such an operator: `mm`."""
    return hasattr(torch.ops.aten, name)


def operator_named(name: str) -> Any:
    """`aten::add.Tensor`, or `add.Tensor`."""
    packet, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


# --- operators --------------------------------------------------------------------------------------------


def has_composite_kernel(op: OpOverload) -> bool:
    """Whether eager decomposes this operator on every backend (CompositeImplicitAutograd)."""
    return op.has_kernel_for_dispatch_key(_COMPOSITE)


def decompose(op: OpOverload, *args: object, **kwargs: object) -> Any:
    """Run eager's own decomposition, which is in C++. For symbolic sizes, some operators have another one in Python."""
    if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), _EXPLICIT):
        return op._op_dk(_EXPLICIT, *args, **kwargs)
    if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), _COMPOSITE) and not _has_symbols(
        (args, kwargs)
    ):
        return op._op_dk(_COMPOSITE, *args, **kwargs)
    return op.decompose(*args, **kwargs)


_COMPOSITE = DispatchKey.CompositeImplicitAutograd
_EXPLICIT = DispatchKey.CompositeExplicitAutogradNonFunctional
"""Kernels that call other operators, below a derivative with a formula."""


def _has_symbols(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return any(type(size) is not int for size in value.shape)
    if isinstance(value, (list, tuple)):
        return any(map(_has_symbols, value))
    if isinstance(value, dict):
        return any(map(_has_symbols, value.values()))
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def _lacks_registered_fake(op: OpOverload) -> bool:
    """Whether a custom operator has no fake function yet: `torch.library.custom_op` registers one that raises."""
    definition = _custom_definitions.get(op.name().removesuffix(".default"))
    return definition is not None and definition._abstract_fn is None


def has_meta_kernel(op: OpOverload) -> bool:
    name = op.name()
    return not _lacks_registered_fake(op) and (
        torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, "Meta")
        or DispatchKey.Meta in op.py_kernels
    )


def decomposition_of(op: OpOverload) -> Callable[..., Any] | None:
    from torch._decomp import decomposition_table  # why: slow to load, and seldom needed

    return decomposition_table.get(op)


def python_kernel(op: OpOverload) -> Callable[..., Any]:
    """The kernel of a composite operator in torch's Python dispatcher."""
    # why: registers the kernels; slow to load, and seldom needed
    import torch._decomp  # noqa: F401

    return op.py_kernels[DispatchKey.CompositeImplicitAutograd]


def _return_nothing(*args: object, **kwargs: object) -> None:
    """The fake function of an operator without results."""


def registered_fake(op: OpOverload) -> Callable[..., Any] | None:
    """The fake function registered with `torch.library.register_fake`. An operator without results needs none."""
    if not op._schema.returns and op.namespace not in ("aten", "prims", "prim"):
        return _return_nothing
    if _lacks_registered_fake(op):
        return None
    entry = _custom_registry.find(op.name())
    return entry.fake_impl.kernel if entry.fake_impl.kernel is not None else None


def fake_context(op: OpOverload, make_size: Callable[..., object], shape_env: object) -> Any:
    """A context in which `torch.library.get_ctx()` works, for registered fakes."""
    import torch._library.fake_impl as fake_impl  # why: only for custom operators

    class FakeImplContext:
        _shape_env = shape_env

        def create_unbacked_symint(self, *, min: int = 2, max: int | None = None) -> Any:
            return self.new_dynamic_size(min=min, max=max)

        def new_dynamic_size(self, *, min: int = 0, max: int | None = None) -> Any:
            return make_size(op, min, max)

    return fake_impl.set_ctx_getter(lambda: FakeImplContext())


def is_builtin_namespace(op: OpOverload) -> bool:
    return op.namespace in ("aten", "prims", "prim")


def memoise_by_operator(ask: Callable[[OpOverload], Answer]) -> Callable[[OpOverload], Answer]:
    """Memoise by the operator's id(): hashing an operator is slow."""
    answers: dict[int, tuple[OpOverload, Answer]] = {}

    @functools.wraps(ask)
    def answer(op: OpOverload) -> Answer:
        entry = answers.get(id(op))
        if entry is None:
            entry = answers[id(op)] = op, ask(op)  # kept alive: found by id(), which must not be reused
        return entry[1]

    return answer


@memoise_by_operator
def written_arguments(op: OpOverload) -> tuple[tuple[int, str], ...]:
    """Position and name of each argument that is written to by the schema."""
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


@memoise_by_operator
def has_cpu_kernel(op: OpOverload) -> bool:
    """Whether it has a CPU kernel; constructors of sparse tensors have one registered for the sparse result."""
    keys = ("CPU", "SparseCPU", "SparseCsrCPU")
    return any(torch._C._dispatch_has_computed_kernel_for_dispatch_key(op.name(), key) for key in keys)


@memoise_by_operator
def argument_names(op: OpOverload) -> tuple[str, ...]:
    return tuple(argument.name for argument in op._schema.arguments)


def is_mutable(op: OpOverload) -> bool:
    """Whether the schema declares a write to an argument."""
    return bool(op._schema.is_mutable)


def has_out(op: OpOverload) -> bool:
    """Whether it has `out=` arguments, which it may resize."""
    return any(argument.is_out for argument in op._schema.arguments)


def number_list_positions(op: OpOverload) -> tuple[int, ...]:
    """The positions of arguments that are lists of numbers: C++ accepts a single number there."""
    return tuple(
        position
        for position, argument in enumerate(op._schema.arguments)
        if str(argument.type) in _NUMBER_LISTS
    )


_NUMBER_LISTS = ("List[int]", "Optional[List[int]]", "List[float]", "Optional[List[float]]")


def returns_list(op: OpOverload) -> bool:
    """Whether it returns one list of tensors."""
    returns = op._schema.returns
    return len(returns) == 1 and isinstance(returns[0].type, torch.ListType)


def takes_tensor(op: OpOverload, position: int) -> bool:
    arguments = op._schema.arguments
    return position < len(arguments) and isinstance(arguments[position].type, torch.TensorType)


@memoise_by_operator
def schema_info(op: OpOverload) -> Any:
    return torch._C._SchemaInfo(op._schema)


def allows_numbers_as_tensors(op: OpOverload) -> bool:
    return torch._C._should_allow_numbers_as_tensors(op.overloadpacket.__name__)


@memoise_by_operator
def is_decomposed_in_aten(op: OpOverload) -> bool:
    """Whether torch's decomposition of an operator is in `torch._decomp` (the others are in `torch._refs`)."""
    import torch._decomp as decompositions  # why: slow to load, and seldom needed

    function = decompositions.decomposition_table[op]
    is_there = hasattr(decompositions.decompositions, function.__name__)
    return function.__module__.startswith(decompositions.__name__) and is_there


def contains_tensors(type_: Any) -> bool:
    """Whether a type of a schema is a tensor, or a container of tensors."""
    is_tensor = type_.isSubtypeOf(torch._C.TensorType.get())
    return bool(is_tensor) or any(contains_tensors(part) for part in type_.containedTypes())


def is_tensor_type(kind: Any) -> bool:
    """Whether a type of a schema is that of one tensor."""
    return kind is torch._C.TensorType.get()


def aten_operators() -> Iterator[OpOverload]:
    """All operators of the namespace `aten`."""
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        if namespace == "aten":
            yield getattr(getattr(torch.ops.aten, name), schema.overload_name or "default")


def takes_positional_device(op: OpOverload) -> bool:
    """Whether an operator on tensors takes a device in a place, not only by name."""
    device = torch._C.OptionalType(torch._C.DeviceObjType.get())
    arguments = op._schema.arguments
    return any(
        not argument.kwarg_only and argument.type.isSubtypeOf(device) for argument in arguments
    ) and any(contains_tensors(part.type) for part in (*arguments, *op._schema.returns))
