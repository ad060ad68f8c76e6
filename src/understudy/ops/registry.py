"""The operator registry: one record for each operator overload, found by its identity.

    OpFacts     the record: the names of an overload, facts from its schema and tags, and registered facts as attributes
    Slot        one kind of registered fact: an attribute of all records, and the decorator that registers it by name
    record_of   the record of an overload

        @rule("mm")
        def mm(a: TensorSpec, b: TensorSpec) -> TensorSpec: ...

        record_of(torch.ops.aten.mm.default).rule

Names are those of the dispatcher (`aten::add.Tensor`); `aten::` and `.default` may be omitted. A second registration of
the same fact for the same operator is an error. A higher package declares slots of its own (`declare`); it keeps no table
of operator names.

A rule is called with the arguments of the operator call in which every tensor is replaced by its `TensorSpec`, so its
parameters and their defaults are those of the operator's schema. It returns outcomes (bare specs stand for new tensors),
raises an `OperatorError` where eager would raise, or returns `NotImplemented` for a case that it leaves to the next
source. In-place and out= variants need no rule of their own: `variants` derives them from the functional one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, KeysView
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, cast, overload

import torch

from understudy import _torch
from understudy._torch import OpOverload

if TYPE_CHECKING:
    from understudy.ops.communication import Collective
    from understudy.ops.kernel_tables.refusals import KernelRow
    from understudy.ops.traits import flops, ranges, scratch, values
    from understudy.ops.traits.autocast import Casting
    from understudy.ops.traits.kernel_families import Kernel
    from understudy.ops.traits.writes import PlainWrite
    from understudy.spec import TensorSpec


Fact = TypeVar("Fact")
Rule = Callable[..., object]
Function = Callable[..., Any]
Registered = TypeVar("Registered", bound=Callable[..., object])


def full_name(op: OpOverload | str) -> str:
    """`mm`, `aten::mm` and `aten::mm.default` are all `aten::mm`."""
    name = op if isinstance(op, str) else op.name()
    name = name.removesuffix(".default")
    return name if "::" in name else f"aten::{name}"


RECORDS: dict[int, OpFacts] = {}
"""Records by the id() of their overloads. Hot code reads `RECORDS.get(id(op)) or record_of(op)`."""
_slots: list[Slot[Any]] = []


class Slot(Generic[Fact]):
    """One kind of fact about operators: an attribute of `OpFacts`, None where nothing is registered.

    `of_packets`: facts are registered for all overloads of a name at once; `of_in_place`: and for its in-place form.
    `derive`: computes the fact from the record when it is first read, where nothing is registered.
    """

    def __init__(
        self, *, of_packets: bool = False, of_in_place: bool = False,
        derive: Callable[[OpFacts], Fact | None] | None = None,
    ) -> None:  # fmt: skip
        self.attribute = ""
        self.of_packets = of_packets
        self.of_in_place = of_in_place
        self._derive = derive
        self._by_name: dict[str, Fact] = {}

    def __set_name__(self, owner: type[OpFacts], name: str) -> None:
        self.attribute = name
        _slots.append(self)

    @overload
    def __get__(self, record: None, owner: object) -> Slot[Fact]: ...
    @overload
    def __get__(self, record: OpFacts, owner: object) -> Fact | None: ...
    def __get__(self, record: OpFacts | None, owner: object) -> Any:
        """The slot, of the class. Records have the fact in their `__dict__`; this is called where it is not there yet."""
        return self if record is None else self._fill(record)

    def __call__(self, *ops: OpOverload | str) -> Callable[[Registered], Registered]:
        """A decorator that registers a function for these operators, and returns it unchanged."""

        def register(function: Registered) -> Registered:
            self.register(cast("Fact", function), *ops)
            return function

        return register

    def register(self, fact: Fact, *ops: OpOverload | str) -> None:
        for name in map(full_name, ops):
            if name in self._by_name:
                raise ValueError(
                    f"{self.attribute} of {name} is already registered: {self._by_name[name]!r}; remove one of the two"
                )
            self._by_name[name] = fact
        self._refill()

    def mark(self: Slot[bool], *ops: OpOverload | str) -> None:
        """Register True for these operators."""
        self.register(True, *ops)

    def register_all(self, facts: dict[str, Fact]) -> None:
        for name, fact in facts.items():
            self.register(fact, name)

    def replace(self, fact: Fact | None, *ops: OpOverload | str) -> None:
        """Replace the registered fact; None removes it. For facts that users register."""
        for name in map(full_name, ops):
            self._by_name.pop(name, None)
            if fact is not None:
                self._by_name[name] = fact
        self._refill()

    def by_name(self, name: str) -> Fact:
        """The fact registered under this name."""
        return self._by_name[full_name(name)]

    def __contains__(self, op: OpOverload | str) -> bool:
        """Whether something is registered under exactly this name."""
        return full_name(op) in self._by_name

    @property
    def names(self) -> KeysView[str]:
        """The full names under which something is registered, as a live view."""
        return self._by_name.keys()

    def items(self) -> Iterable[tuple[str, Fact]]:
        return self._by_name.items()

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def _fill(self, record: OpFacts) -> Fact | None:
        name = record.packet_name if self.of_packets else record.name
        fact = self._by_name.get(name)
        if fact is None and self.of_in_place:
            fact = self._by_name.get(name.removesuffix("_"))
        if fact is None and self._derive is not None:
            fact = self._derive(record)
        record.__dict__[self.attribute] = fact
        return fact

    def _refill(self) -> None:
        """Update records that exist. Derived facts are computed again when they are read: they may depend on this one."""
        for record in RECORDS.values():
            for slot in _slots:
                if slot is self or slot._derive is not None:
                    record.__dict__.pop(slot.attribute, None)


class HiddenWrites(NamedTuple):
    """Arguments that are written to if another argument, `switch`, is true."""

    switch: str
    written: tuple[str, ...]


class OpFacts:
    """The record of one overload: everything that is known of it."""

    def __init__(self, op: OpOverload) -> None:
        self.op = op  # kept alive: records are found by id(), which must not be reused
        self.name = full_name(op)
        self.packet: str = op.overloadpacket.__name__
        """The name without the overload: `add` of `aten::add.Tensor`."""
        self.packet_name = f"{op.namespace}::{self.packet}"
        self.is_builtin = _torch.is_builtin_namespace(op)

    # --- from the schema and the tags

    @cached_property
    def is_pointwise(self) -> bool:
        return torch.Tag.pointwise in self.op.tags

    @cached_property
    def is_random(self) -> bool:
        return torch.Tag.nondeterministic_seeded in self.op.tags

    @cached_property
    def is_mutable(self) -> bool:
        """Whether the schema declares a write to an argument."""
        return _torch.is_mutable(self.op)

    @cached_property
    def is_view(self) -> bool:
        """Whether, by its schema, a result aliases an argument that it does not write to."""
        returned = (result.alias_info for result in self.op._schema.returns)
        return any(alias is not None and not alias.is_write for alias in returned)

    @cached_property
    def changes_metadata(self) -> bool:
        """Whether it changes the shape or strides of an argument in place."""
        return torch.Tag.inplace_view in self.op.tags

    @cached_property
    def has_out(self) -> bool:
        """Whether it has `out=` arguments, which it may resize."""
        return _torch.has_out(self.op)

    @cached_property
    def is_data_dependent(self) -> bool:
        """Whether it returns a data-dependent value."""
        return torch.Tag.data_dependent_output in self.op.tags or self.reads_value is not None

    @cached_property
    def has_dynamic_shape(self) -> bool:
        """Whether the sizes of its results are data-dependent."""
        return torch.Tag.dynamic_output_shape in self.op.tags or self.dynamic_shape is not None

    @cached_property
    def may_write(self) -> bool:
        """Whether some of its calls write to an argument."""
        return self.is_mutable or self.hidden_writes is not None

    @cached_property
    def follows_from_inputs(self) -> bool:
        """Whether the values of its results follow from those of its inputs."""
        return self.op.namespace in ("aten", "prims") and not self.is_random and self.undetermined is None

    @cached_property
    def lacks_cpu_kernel(self) -> bool:
        """Whether it is an operator of torch without a CPU kernel."""
        return self.op.namespace in ("aten", "prims") and not _torch.has_cpu_kernel(self.op)

    @cached_property
    def is_composite(self) -> bool:
        """Whether eager decomposes it on every backend (CompositeImplicitAutograd)."""
        return _torch.has_composite_kernel(self.op)

    @cached_property
    def is_decomposed(self) -> bool:
        """Whether autograd decomposes this operator of torch: its views and writes are those of the inner operators."""
        is_decomposed = self.is_builtin and _torch.is_decomposed_by_autograd(self.op)
        return is_decomposed and not _torch.tracks_own_views(self.op)

    # --- where results come from

    rule: Slot[Rule] = Slot()
    """A pure function from specs to outcomes."""
    user_rule: Slot[Rule] = Slot()
    """A rule of the user, which takes precedence over every other source."""
    effective_rule: Slot[Rule] = Slot()
    """The user's rule, ours, or one derived from the functional variant (`ops/variants.py`)."""
    decomposition: Slot[Rule] = Slot()
    """A decomposition for symbolic sizes. It may return `NotImplemented` to leave a call to C++."""
    exact_out: Slot[bool] = Slot()
    """`out=` must have the dtype of the result."""
    reads_value: Slot[str] = Slot(of_packets=True)
    """The value that it reads, where it has no tag for that."""
    dynamic_shape: Slot[str] = Slot(of_packets=True)
    """Sizes of results that depend on values, where it has no tag for that."""

    # --- writes and aliases

    hidden_writes: Slot[HiddenWrites] = Slot(of_packets=True)
    """Writes that the schema does not declare."""
    kept_values: Slot[dict[str, str]] = Slot(of_packets=True)
    """Written arguments whose values stay the same, with the reason."""
    is_own_tensor: Slot[bool] = Slot()
    """Returns a view that C++ makes as a separate tensor: an inference tensor if inference mode is enabled."""
    writes_apart: Slot[bool] = Slot()
    """Refuses to write into a tensor that shares memory with one that it reads."""
    reads_along: Slot[tuple[int, ...]] = Slot()
    """Positions of inputs that it reads in step with its writes, and may write over."""
    reads_before: Slot[tuple[int, ...]] = Slot(of_packets=True)
    """Positions of inputs that it reads before it writes."""
    writes_in_order: Slot[bool] = Slot(of_packets=True)
    """Refuses to write to memory that it reads in another order."""
    read_shape: Slot[Callable[[int, TensorSpec], TensorSpec]] = Slot(of_packets=True)
    """The input at a position as its kernel sees it when it compares the order of elements."""
    trusts_arguments: Slot[str] = Slot(of_packets=True)
    """Why its kernel must not run on arguments that may not fit."""
    checks_arguments: Slot[bool] = Slot(of_packets=True)
    """A private operator whose kernel checks its arguments."""
    plain_write: Slot[PlainWrite] = Slot()
    """Where autograd writes in place with plain tensors."""
    gives_zeros: Slot[bool] = Slot(of_packets=True)
    """Makes a tensor of zeros."""

    # --- values

    undetermined: Slot[str] = Slot(of_packets=True)
    """Why the values of its results do not follow from its inputs."""
    unread_inputs: Slot[int] = Slot(of_packets=True)
    """The number of its first inputs whose values it does not read."""
    index_bounds: Slot[values.Bounds] = Slot(of_packets=True)
    """Arguments that are indices."""
    refused_values: Slot[values.RefusedValues] = Slot(of_packets=True)
    """Values of an argument that it refuses."""
    value_range: Slot[ranges.Rule] = Slot(of_packets=True)
    """The range of the values of its results."""
    followed_through: Slot[bool] = Slot(of_packets=True)
    """Ranges of small float tensors are tracked through it: it selects or rearranges elements."""
    followed_at_any_size: Slot[bool] = Slot(of_packets=True)
    """The range of its results is tracked at any size."""
    extremes: Slot[Callable[..., tuple[Any, Any] | None]] = Slot(of_packets=True)
    """The least and the greatest value of a tensor that is filled with one number, or counts. They may be symbols."""

    # --- devices and autocast

    may_mix: Slot[str] = Slot(of_packets=True)
    """Why its inputs may be on several devices."""
    reads_by_index: Slot[bool] = Slot(of_packets=True)
    """It reads by indices, which may be on the CPU: eager moves them."""
    writes_by_index: Slot[bool] = Slot(of_packets=True)
    """It writes by indices, which may be on any device: eager moves them. The written values come last."""
    kernel_row: Slot[KernelRow] = Slot()
    """The dtypes that its CPU kernel refuses (`ops/kernel_tables`)."""
    accepts_meta: Slot[str] = Slot()
    """Why its other tensors may be on the meta device."""
    takes_no_cpu_scalar: Slot[str] = Slot(of_packets=True)
    """Why a 0-d CPU tensor may not be mixed with tensors of other devices."""
    casting: Slot[Casting] = Slot()
    """What autocast does to its arguments, as registered for CUDA; `cat` and `stack` promote without a copy."""
    caller_in_kernel: Slot[str] = Slot()
    """The composite operator whose kernel calls it. Autocast is enabled inside that kernel."""
    accelerator_path: Slot[Function] = Slot()
    """Its decomposition on an accelerator."""
    has_cuda_kernel: Slot[bool] = Slot()
    """Composite only in builds for the CPU."""

    # --- plans, recipes and nodes

    uncacheable: Slot[str] = Slot(of_packets=True)
    """Why its plans are not kept."""
    pure: Slot[bool] = Slot()
    """A custom operator whose results depend on its arguments only: see `understudy.mark_pure`."""
    uncached: Slot[str] = Slot()
    """Why its plans are not kept, for any reason: derived from the two above (`ops/traits/caching.py`)."""
    ignores_floats: Slot[bool] = Slot(of_packets=True)
    """Its outcomes do not depend on the values of plain floats, which optimizers change at each step."""
    has_recipe_if_static: Slot[bool] = Slot()
    """A composite whose operators are remembered for plain sizes."""
    has_recipe: Slot[bool] = Slot()
    """A composite whose operators are remembered for symbolic sizes: C++ decomposes it by its arguments only."""
    has_recipe_if_strided: Slot[bool] = Slot()
    """The same, for tensors that are not contiguous: for others, C++ compares no sizes."""
    needs_recipe: Slot[bool] = Slot()
    """A composite that compares so many sizes that replaying it through the dispatcher is faster."""
    whole_result: Slot[Function] = Slot()
    """The result for ordinary operands, when no other mode observes the inner operators: a function of specs that returns
    the spec of a new tensor, a `ViewOfNew`, or `NotImplemented`. Ordinary: one floating-point dtype, and masks, on one
    device, with plain sizes of at least 1."""
    unrecorded: Slot[str] = Slot()
    """Why its calls are not recorded as nodes."""
    recorded_as: Slot[OpOverload] = Slot()
    """The operator that its nodes call instead."""

    # --- work, memory and communication

    macs: Slot[flops.Formula] = Slot(of_packets=True, of_in_place=True)
    """Its multiply-adds."""
    operations: Slot[int] = Slot(of_packets=True, of_in_place=True)
    """Operations for each element of the largest operand."""
    moves: Slot[bool] = Slot(of_packets=True, of_in_place=True)
    """True: it only moves or makes elements. False: not even that."""
    reads_part: Slot[bool] = Slot(of_packets=True, of_in_place=True)
    """Reads no more elements of its first tensors than its results or other arguments have."""
    kernel_family: Slot[str] = Slot(of_packets=True, of_in_place=True)
    """The family of its CUDA kernels, where it does not follow from the kind of its work."""
    kernel_products: Slot[Callable[..., list[Kernel]]] = Slot(of_packets=True, of_in_place=True)
    """The products that it runs."""
    kernel_passes: Slot[float] = Slot(of_packets=True, of_in_place=True)
    """How often its kernel reads its operands, where that is not once."""
    scratch: Slot[scratch.Formula] = Slot(of_packets=True)
    """Memory of its CUDA kernel besides the results."""
    host_scratch: Slot[Callable[..., int]] = Slot(of_packets=True)
    """Bytes that its CPU kernel needs besides the results, where they are many: a function of the specs of the results and
    the arguments of the call. Small temporaries are not counted."""
    accumulator: Slot[Callable[[TensorSpec], int]] = Slot(of_packets=True)
    """Bytes of one partial result of a reduction."""
    keeps_whole: Slot[bool] = Slot(of_packets=True)
    """Its reduced result keeps the memory of the unreduced one."""
    makes_results_late: Slot[bool] = Slot(of_packets=True)
    """Its results get their memory after a part of its scratch memory."""
    result_order: Slot[tuple[int, ...]] = Slot()
    """Positions of its results in the order in which they get their memory."""
    uses_blas: Slot[bool] = Slot(of_packets=True)
    """Computed by cuBLAS on CUDA devices."""
    collective: Slot[Collective] = Slot()
    """A collective of torch.distributed."""

    if TYPE_CHECKING:  # slots that higher packages declare
        handler: Slot[Function]
        real_handler: Slot[Function]
        answer_from_values: Slot[Function]
        elements_rule: Slot[Function]
        functional_form: Slot[Function]
        view_inverse: Slot[Function]

    def list_facts(self) -> dict[str, object]:
        """All that is registered for this operator or derived, by the names of the slots."""
        found = ((slot.attribute, getattr(self, slot.attribute)) for slot in _slots)
        return {name: fact for name, fact in found if fact is not None}


def record_of(op: OpOverload) -> OpFacts:
    """The record of an overload. Found by identity: the hash of an overload is a Python function."""
    record = RECORDS.get(id(op))
    if record is None:
        record = RECORDS[id(op)] = OpFacts(op)
    return record


def declare(name: str, slot: Slot[Fact]) -> Slot[Fact]:
    """Add a slot of a higher package to all records, as an attribute of this name."""
    if name in vars(OpFacts):
        raise ValueError(f"records already have an attribute {name!r}; choose another name")
    setattr(OpFacts, name, slot)
    slot.__set_name__(OpFacts, name)
    return slot


def derives(
    slot: Slot[Fact],
) -> Callable[[Callable[[OpFacts], Fact | None]], Callable[[OpFacts], Fact | None]]:
    """A decorator for the function that computes a fact from the record, where nothing is registered."""

    def register(function: Callable[[OpFacts], Fact | None]) -> Callable[[OpFacts], Fact | None]:
        if slot._derive is not None:
            raise ValueError(
                f"{slot.attribute} is already derived by {slot._derive!r}; remove one of the two"
            )
        slot._derive = function
        return function

    return register


rule, user_rule = OpFacts.rule, OpFacts.user_rule
OpFacts.reads_value.register("whether the one element is zero", "is_nonzero")
OpFacts.dynamic_shape.register(
    "one entry per non-zero value",
    "_to_sparse", "_to_sparse_csr", "_to_sparse_csc", "_to_sparse_bsr", "_to_sparse_bsc", "to_sparse",
)  # fmt: skip
OpFacts.hidden_writes.register(
    HiddenWrites("training", ("running_mean", "running_var")),
    "batch_norm", "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "_batch_norm_impl_index",
)  # fmt: skip
OpFacts.hidden_writes.register(
    HiddenWrites("use_input_stats", ("running_mean", "running_var")), "instance_norm"
)
