"""Values that follow from the program alone: literals, `arange`, `zeros`, … and what is computed from them.

Nothing is computed until somebody asks. Each storage with determined contents has one `DeterminedContents`, shared by the
tensors on it; its `content` is an expression that never changes once made, so a later write can't spoil an earlier
answer: a write gives the storage a new expression, or, if what is written is not determined, none.

    content = LiteralStorage(real)               a real tensor's storage
            | FilledStorage(spec, value)         a storage that holds one number everywhere
            | CallResult(event, position, spec)  the storage of a tensor that a call gave, or wrote to
    event   = DeterminedCall(op, args, …)        an operator call on tensors with such contents

A storage of which nothing is known has no `DeterminedContents`, and never gets one: memory as it was found stays unknown,
even if a write fills all of it.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from understudy import _torch
from understudy.errors import MetadataMismatchError
from understudy.infer.plan import Plan
from understudy.spec import TensorSpec
from understudy.spec.call import flat, map_structure

if TYPE_CHECKING:
    from understudy._torch import OpOverload
    from understudy.fake.tensor import FakeTensor

default_dtype = torch.get_default_dtype
DEEPEST = 48
"""Expressions deeper than this are computed at once, so that a counter in a long loop stays small. Of larger tensors, and of
gradients (those of a sum are ones, and so on), nothing is known from there on."""
MOST_COMPUTED = 1 << 16


class DeterminedContents:
    """What is known of one storage. `content` is None once something undetermined was written to it."""

    __slots__ = ("content", "literal")
    is_zeros = False
    """Whether it is of one of the tensors without memory that stand for zeros (`DeterminedZeros`)."""

    def __init__(self, content: Any, literal: bool = False) -> None:
        self.content = content
        self.literal = literal

    def forget(self) -> None:
        self.content = None


class LiteralStorage:
    __slots__ = ("real",)
    depth = 0

    def __init__(self, real: torch.Tensor) -> None:
        self.real = real

    def storage(self) -> torch.Tensor:
        return self.real


class FilledStorage:
    """The storage of a tensor that covers it, filled with one number."""

    __slots__ = ("_real", "spec", "value")
    depth = 0

    def __init__(self, spec: TensorSpec, value: Any) -> None:
        self.spec, self.value = spec, value
        self._real: torch.Tensor | None = None

    def storage(self) -> torch.Tensor:
        if self._real is None:
            spec = self.spec
            with _torch.PastDispatch():
                real = torch.empty_strided(*spec.numbers[:2], dtype=spec.dtype, device=CPU)
                self._real = real.fill_(self.value)
        return self._real


class StoragePart:
    """A tensor on known contents, as it was when it was used. `owner` tells storages apart."""

    __slots__ = ("content", "owner", "spec")

    def __init__(self, content: Any, spec: TensorSpec, owner: int = 0) -> None:
        self.content = content
        self.spec = spec
        self.owner = owner

    def real(self) -> torch.Tensor:
        return on_storage(self.content.storage(), self.spec)

    def copy_on(self, storages: dict[int, torch.Tensor]) -> torch.Tensor:
        """On a copy of the storage, one for all tensors that share it."""
        storage = storages.get(self.owner)
        if storage is None:
            storage = storages[self.owner] = copied_storage(self.content.storage())
        return on_storage(storage, self.spec)


class UnreadPart(StoragePart):
    """A tensor whose values are not read."""

    __slots__ = ()

    def __init__(self, spec: TensorSpec) -> None:
        super().__init__(NOTHING, spec)

    def real(self) -> torch.Tensor:
        return torch.empty((), dtype=self.spec.dtype, device=CPU).expand(self.spec.numbers.shape)

    def copy_on(self, storages: dict[int, torch.Tensor]) -> torch.Tensor:
        return torch.empty_strided(*self.spec.numbers[:2], dtype=self.spec.dtype, device=CPU)


CPU = torch.device("cpu")
PLAIN: dict[type, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
SYMBOLIC = tuple(PLAIN)
NOTHING = LiteralStorage(torch.empty(0))
_computing = threading.RLock()


class DeterminedCall:
    """An operator call on parts. What it gives is computed once, for all that ask, and then how is forgotten."""

    __slots__ = ("_tensors", "args", "default_dtype", "depth", "is_write", "kwargs", "op")

    def __init__(self, op: Any, args: Any, kwargs: Any, is_write: bool, has_parts: bool = True) -> None:
        self.op, self.args, self.kwargs, self.is_write = op, args, kwargs, is_write
        self.default_dtype = default_dtype()
        self.depth = 1
        if has_parts:
            self.depth += max((part.content.depth for part in flat(StoragePart, args, kwargs)), default=0)
        self._tensors: list[torch.Tensor] | None = None

    def tensors(self) -> list[torch.Tensor]:
        """What the call returned; if it wrote in place, its inputs as they were afterwards."""
        if self._tensors is None:
            with _computing, _torch.ReplayOnRealTensors(self.default_dtype):
                if self._tensors is None:
                    self._tensors = self._written() if self.is_write else self._results()
                    self.op = self.args = self.kwargs = None
                    self.depth = 0
        return self._tensors

    def _arguments(self) -> object:
        """With the numbers that symbols stand for: where a tensor may be, C++ takes a symbol for any number."""
        return map_structure(_number, SYMBOLIC, (self.args, self.kwargs))

    def _results(self) -> list[torch.Tensor]:
        args, kwargs = map_structure(lambda part: part.real(), StoragePart, self._arguments())
        return [output.detach() for output in flat(torch.Tensor, (self.op(*args, **_on_cpu(kwargs)),), {})]

    def _written(self) -> list[torch.Tensor]:
        storages: dict[int, torch.Tensor] = {}
        targets: list[torch.Tensor] = []

        def own(part: StoragePart) -> torch.Tensor:
            targets.append(part.copy_on(storages))
            return targets[-1]

        args, kwargs = map_structure(own, StoragePart, self._arguments())
        self.op(*args, **_on_cpu(kwargs))
        return targets


def _number(symbol: object) -> Any:
    """From here on, it is what it is at hand, and the guards say so."""
    return PLAIN[type(symbol)](symbol)


class CallResult:
    """The storage of one of the tensors of an event, laid out as its spec says."""

    __slots__ = ("_real", "event", "position", "spec")

    def __init__(self, event: DeterminedCall, position: int, spec: TensorSpec) -> None:
        self.event, self.position, self.spec = event, position, spec
        self._real: torch.Tensor | None = None

    @property
    def depth(self) -> int:
        return self.event.depth

    def storage(self) -> torch.Tensor:
        if self._real is None:
            op = self.event.op
            tensor = self.event.tensors()[self.position]
            if not self.event.is_write:
                check_result(op, tensor, self.spec)
            with _torch.PastDispatch():
                self._real = tensor if self.event.is_write else _laid_out(tensor, self.spec)
        return self._real


def _on_cpu(kwargs: dict[str, object]) -> dict[str, Any]:
    return {name: CPU if isinstance(v, torch.device) else v for name, v in kwargs.items()}


def copied_storage(real: torch.Tensor) -> torch.Tensor:
    """A tensor on a copy of the storage of `real`, with the same geometry."""
    if real.untyped_storage().nbytes() == real.numel() * real.itemsize:
        return real.clone()
    fresh = torch.empty(0, dtype=real.dtype, device=CPU)
    storage = real.untyped_storage().clone()
    return fresh.set_(storage, real.storage_offset(), real.shape, real.stride())


def check_result(op: object, real: torch.Tensor, spec: TensorSpec) -> None:
    """A value of another dtype or shape than was said must not be viewed as what was said: that reads beyond it."""
    if real.dtype is not spec.dtype or tuple(real.shape) != spec.shape:
        name = str(op) if op is not None else "an operator"
        shown = f"{str(real.dtype).removeprefix('torch.')}{list(real.shape)}"
        raise MetadataMismatchError(f"{name} was said to give {spec}, and gives {shown}: a rule is wrong, please report it")


def on_storage(real: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The real tensor with this spec's geometry on the storage of `real`."""
    with _torch.PastDispatch():
        if spec.dtype is real.dtype:
            view = real.as_strided(*spec.numbers)
        else:
            view = torch.empty(0, dtype=spec.dtype, device=CPU)
            if spec.numel and (end := _end_of(spec)) > real.untyped_storage().nbytes():
                raise MetadataMismatchError(f"{spec} reaches to byte {end} of {real.untyped_storage().nbytes()}")
            shape, stride, offset = spec.numbers
            view.set_(real.untyped_storage(), offset, shape, stride)
        if spec.conj != view.is_conj():
            _torch.set_conj(view, spec.conj)
        if spec.neg != view.is_neg():
            _torch.set_neg(view, spec.neg)
        return view


def _end_of(spec: TensorSpec) -> Any:
    """Where its last element ends, in bytes from the start of the storage."""
    last = sum((size - 1) * step for size, step in zip(spec.shape, spec.stride, strict=True))
    return (spec.offset + last + 1) * spec.itemsize


def _laid_out(real: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """`real`, on a storage laid out as the spec says."""
    if real.stride() == spec.stride and real.storage_offset() == spec.offset:
        return real
    fresh = torch.empty_strided(*spec.numbers[:2], dtype=real.dtype, device=CPU)
    return fresh.copy_(real)


# --- one operator call -----------------------------------------------------------------------------------------


def start_contents(
    op: OpOverload, args: tuple[object, ...], kwargs: dict[str, object], spec: TensorSpec
) -> DeterminedContents | None:
    """What is known of the one tensor that a call without tensors gives."""
    if _has_numbers_of_data(args, kwargs):
        return None
    return DeterminedContents(CallResult(DeterminedCall(op, args, kwargs, False, has_parts=False), 0, spec))


def before_call(plan: Plan, args: Any, kwargs: Any, inputs: list[object]) -> tuple[object, ...] | None:
    """The arguments with each tensor replaced by its contents as they are now; None if not all are determined."""
    unread = plan.count_unread() if plan.determined else None
    for position, fake in enumerate(inputs):
        if _content(fake) is None and (unread is None or plan.written or position >= unread):
            _drop_parameters(inputs)
            return None
    if unread is None or _has_numbers_of_data(args, kwargs):
        return None
    return map_structure(_part, torch.Tensor, (tuple(args), dict(kwargs)))


def _has_numbers_of_data(args: Any, kwargs: Any) -> bool:
    return any(not symbol.node.has_hint() for symbol in flat(SYMBOLIC, args, kwargs))


def _content(fake: Any) -> Any:
    known = fake._known
    if known is None:
        return None
    if known.content is None:
        fake._known = None  # from now on the hot path need not ask
    return known.content


def _part(fake: FakeTensor) -> StoragePart:
    known = fake._known
    return UnreadPart(fake._spec) if known is None else StoragePart(known.content, fake._spec, id(known))


def _drop_parameters(inputs: list[Any]) -> None:
    """A parameter that meets undetermined values is in use, and its first values are of no interest any more.

    Following them would send every call that it takes part in past the hot path.
    """
    for fake in inputs:
        if fake._known is not None and getattr(fake, "_is_param", False):
            fake._known.forget()
            fake._known = None


def after_call(op: object, plan: Plan, before: Any, inputs: list[Any], results: list[Any]) -> None:
    """Keep account of what is known: of inputs that were written to, and of results on storages of their own."""
    event = None if before is None else DeterminedCall(op, before[0], before[1], bool(plan.written))
    if event is not None and event.depth > DEEPEST:
        if _torch.is_in_backward() or any(fake._spec.numel > MOST_COMPUTED for fake in (*inputs, *results)):
            event = None
        else:
            event.tensors()
    if event is None:
        for position in plan.written:
            fake = inputs[position]
            if fake._known is not None:
                fake._known.forget()
                fake._known = None
        return
    if plan.written:
        for position in plan.written:
            fake = inputs[position]
            fake._known.content = CallResult(event, position, fake._spec)
        return
    is_literal = bool(inputs) and all(fake._known is not None and fake._known.literal for fake in inputs)
    for position, fake in enumerate(results):
        if fake._known is None:
            fake._known = DeterminedContents(CallResult(event, position, fake._spec), is_literal)
