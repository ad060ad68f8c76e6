"""The operator registry: one record for each operator overload, found by its identity.

    Operator    the record: the names of an overload, what its schema and tags say, and its facts
    Trait       one kind of fact (a rule, a decomposition, whether inputs may be on several devices, …), registered by name
    rule        the trait that most operators have: a pure function from specs to outcomes

        @rule("mm")
        def mm(a: TensorSpec, b: TensorSpec) -> TensorSpec: ...

Names are those of the dispatcher (`aten::add.Tensor`); `aten::` may be left out, and so may `.default`. A fact is registered
once: a second registration of the same fact for the same operator is an error. A higher package may define its own
`Trait`; it keeps no table of operator names.

A rule is called with the arguments of the operator call in which every tensor is replaced by its `TensorSpec`, so its
parameters and their defaults are those of the operator's schema. It returns outcomes (bare specs stand for new tensors),
raises an `OperatorError` where eager would raise, or returns `NotImplemented` for a case that it leaves to the next
source. In-place and out= variants need no rule of their own: `variants` derives them from the functional one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, KeysView
from functools import cached_property
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar, cast

import torch

from understudy import _torch
from understudy._torch import OpOverload

Fact = TypeVar("Fact")
Rule = Callable[..., object]
Registered = TypeVar("Registered", bound=Callable[..., object])


def full_name(op: OpOverload | str) -> str:
    """`mm`, `aten::mm` and `aten::mm.default` are all `aten::mm`."""
    name = op if isinstance(op, str) else op.name()
    name = name.removesuffix(".default")
    return name if "::" in name else f"aten::{name}"


class Operator:
    """The record of one overload. Facts of a `Trait` are looked up once, and memoised here."""

    def __init__(self, op: OpOverload) -> None:
        self.op = op  # kept alive: records are found by id(), which must not be reused
        self.name = full_name(op)
        self.packet: str = op.overloadpacket.__name__
        """The name without the overload: `add` of `aten::add.Tensor`."""
        self.is_builtin = _torch.is_builtin_namespace(op)
        self.facts: dict[Trait[Any], Any] = {}

    @cached_property
    def is_pointwise(self) -> bool:
        return torch.Tag.pointwise in self.op.tags

    @cached_property
    def is_random(self) -> bool:
        return torch.Tag.nondeterministic_seeded in self.op.tags

    @cached_property
    def is_mutable(self) -> bool:
        """Whether the schema says that it writes to an argument."""
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
        return torch.Tag.data_dependent_output in self.op.tags or reads_value.of(self.op) is not None

    @cached_property
    def has_dynamic_shape(self) -> bool:
        """Whether the sizes of its results are data-dependent."""
        return torch.Tag.dynamic_output_shape in self.op.tags or dynamic_shape.of(self.op) is not None

    @cached_property
    def may_write(self) -> bool:
        """Whether some of its calls write to an argument."""
        return self.is_mutable or hidden_writes.of(self.op) is not None

    @cached_property
    def is_composite(self) -> bool:
        """Whether eager decomposes it on every backend (CompositeImplicitAutograd)."""
        return _torch.has_composite_kernel(self.op)

    @cached_property
    def is_decomposed(self) -> bool:
        """Whether it is an operator of torch that autograd decomposes, and which views and writes it makes is told by those
        inside it."""
        is_decomposed = self.is_builtin and _torch.is_decomposed_by_autograd(self.op)
        return is_decomposed and not _torch.tracks_own_views(self.op)

    def facts_by_title(self) -> dict[str, object]:
        """All that is registered for this operator, by the titles of the traits."""
        found = ((trait, trait.of(self.op)) for trait in Trait.all)
        return {trait.title: fact for trait, fact in found if fact is not None}


_records: dict[int, Operator] = {}


def record_of(op: OpOverload) -> Operator:
    """The record of an overload. Found by identity: the hash of an overload is a Python function."""
    record = _records.get(id(op))
    if record is None:
        record = _records[id(op)] = Operator(op)
    return record


class Trait(Generic[Fact]):
    """One kind of fact about operators.

    `of_packets`: facts are registered for all overloads of a name at once. `derive`: computes the fact of an operator
    for which nothing is registered; the other traits that it reads are listed in `derived_from`.
    """

    all: ClassVar[list[Trait[Any]]] = []

    def __init__(
        self, title: str, *, of_packets: bool = False, derive: Callable[[OpOverload], Fact | None] | None = None,
        derived_from: tuple[Trait[Any], ...] = (),
    ) -> None:  # fmt: skip
        self.title = title
        self._of_packets = of_packets
        self._derive = derive
        self._by_name: dict[str, Fact] = {}
        self._dependents: list[Trait[Any]] = []
        for trait in derived_from:
            trait._dependents.append(self)
        Trait.all.append(self)

    def __call__(self, *ops: OpOverload | str) -> Callable[[Registered], Registered]:
        """A decorator that registers a function for these operators, and returns it unchanged."""

        def register(function: Registered) -> Registered:
            self.register(cast("Fact", function), *ops)
            return function

        return register

    def register(self, fact: Fact, *ops: OpOverload | str) -> None:
        for name in map(full_name, ops):
            if name in self._by_name:
                raise ValueError(f"{self.title} of {name} is registered already: {self._by_name[name]!r}")
            self._by_name[name] = fact
        self._clear_memo()

    def mark(self: Trait[bool], *ops: OpOverload | str) -> None:
        """Register True for these operators."""
        self.register(True, *ops)

    def register_all(self, facts: dict[str, Fact]) -> None:
        for name, fact in facts.items():
            self.register(fact, name)

    def replace(self, fact: Fact | None, *ops: OpOverload | str) -> None:
        """Register a fact in the place of an earlier one; None removes it. For facts that users register."""
        for name in map(full_name, ops):
            self._by_name.pop(name, None)
            if fact is not None:
                self._by_name[name] = fact
        self._clear_memo()

    def of(self, op: OpOverload) -> Fact | None:
        record = _records.get(id(op)) or record_of(op)
        try:
            return record.facts[self]
        except KeyError:
            name = f"{op.namespace}::{record.packet}" if self._of_packets else record.name
            fact = self._by_name.get(name)
            if fact is None and self._derive is not None:
                fact = self._derive(op)
            record.facts[self] = fact
            return fact

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

    def _clear_memo(self) -> None:
        for record in _records.values():
            record.facts.pop(self, None)
        for dependent in self._dependents:
            dependent._clear_memo()


rule: Trait[Rule] = Trait("rule")
user_rule: Trait[Rule] = Trait("rule of the user, before every other source")

# Facts that schemas and tags lack.

reads_value: Trait[str] = Trait("a value that is read, without a tag that says so", of_packets=True)
reads_value.register("whether the one element is zero", "is_nonzero")

dynamic_shape: Trait[str] = Trait("sizes that depend on values, without a tag that says so", of_packets=True)
dynamic_shape.register(
    "as many entries as there are values that are not zero",
    "_to_sparse", "_to_sparse_csr", "_to_sparse_csc", "_to_sparse_bsr", "_to_sparse_bsc", "to_sparse",
)  # fmt: skip


class HiddenWrites(NamedTuple):
    """Arguments that are written to if another argument, `switch`, is true."""

    switch: str
    written: tuple[str, ...]


hidden_writes: Trait[HiddenWrites] = Trait("writes that the schema does not tell of", of_packets=True)
hidden_writes.register(
    HiddenWrites("training", ("running_mean", "running_var")),
    "batch_norm", "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "_batch_norm_impl_index",
)  # fmt: skip
hidden_writes.register(HiddenWrites("use_input_stats", ("running_mean", "running_var")), "instance_norm")
