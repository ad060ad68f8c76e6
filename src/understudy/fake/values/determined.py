"""Values that follow from the program alone: literals, `arange`, `zeros`, … and results computed from them.

Values are computed lazily, when they are read. Each storage with determined contents has one `DeterminedContents`,
shared by the tensors on it; its `content` is an immutable expression, so a later write can't change an earlier answer:
a write gives the storage a new expression, or None if the written values are not determined.

    content = LiteralStorage(real)               the storage of a real tensor
            | FilledStorage(spec, value)         a storage that holds one number everywhere
            | CallResult(event, position, spec)  the storage of a tensor that a call returned, or wrote to
    event   = DeterminedCall(op, args, …)        an operator call on tensors with such contents

A storage with unknown contents has no `DeterminedContents`, and never gets one, even if a write fills all of it.
"""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch

from understudy import _torch
from understudy._torch import OpOverload
from understudy.errors import MetadataMismatchError
from understudy.infer.plan import Plan
from understudy.ops.registry import record_of
from understudy.shapes.sizes import from_torch, is_provably_equal
from understudy.spec import TensorSpec
from understudy.spec.call import flat, map_structure

if TYPE_CHECKING:
    from understudy.fake.tensor import FakeTensor

default_dtype = torch.get_default_dtype
DEEPEST_EXPRESSION = 48
"""Expressions deeper than this are computed at once, so that a counter in a long loop stays small. Large tensors and
gradients (those of a sum are ones, and so on) are no longer tracked at this depth."""
MOST_COMPUTED = 1 << 16
MOST_READABLE = 16
"""The values of a program's constants up to this many elements are determined: it may branch on a flag in a buffer."""


class DeterminedContents:
    """The contents of one storage. `content` is None once undetermined values were written to it."""

    __slots__ = ("content", "counting_mode", "extremes", "literal", "storage", "watch")
    is_zeros = False
    """Whether these are the contents of a ZeroTensor (`DeterminedZeros`)."""

    def __init__(self, content: Any, literal: bool = False) -> None:
        self.content = content
        self.literal = literal
        self.extremes: tuple[Any, Any, Any] | None = None
        """For integers in a tensor of symbolic size, without a content: the least, the greatest, and how many there are."""
        self.watch: int | None = None
        """A unique number until the next write, if a range of values depends on there being none."""
        self.counting_mode: Any = None
        """The mode that counts writes, if tensors on the storage have version counters of their own: see
        `record_for_alias`."""
        self.storage: weakref.ref[torch.UntypedStorage] | None = None
        """The storage whose writes are counted then; None for sparse tensors."""

    @property
    def is_empty(self) -> bool:
        return self.content is None and self.watch is None and self.extremes is None

    def forget(self) -> None:
        self.content = self.extremes = self.watch = None
        if self.counting_mode is not None:
            count_hidden_write(self.counting_mode, None if self.storage is None else self.storage())

    def begin_watch(self) -> int:
        """For tensors made for inference, which count no writes: see `ranges.py`."""
        self.watch = next(_watches)
        return self.watch


_watches = itertools.count()


def record_for_alias(fake: Any) -> DeterminedContents:
    """The record of a storage for another tensor on it whose writes the version counter of `fake` does not count, such as
    `fake.data`."""
    record: DeterminedContents = fake._determined or DeterminedContents(None)
    record.counting_mode = fake.fake_mode
    storage = storage_of(fake)
    record.storage = None if storage is None else weakref.ref(storage)
    return record


def storage_of(fake: Any) -> Any:
    return (
        _torch.native_storage(fake)
        if fake._spec.layout is torch.strided and fake._spec.sparse is None
        else None
    )


def count_hidden_write(mode: Any, storage: Any) -> None:
    """Count a write that no version counter counts. The storage has the number of the last one; the mode has the sum."""
    mode.uncounted_writes += 1
    if storage is not None:
        storage.last_hidden_write = mode.uncounted_writes


def is_counted_apart(fake: Any) -> bool:
    """Whether its version counter does not count the writes of others to its storage."""
    known = getattr(fake, "_determined", None)
    return known is not None and known.counting_mode is not None


class LiteralStorage:
    __slots__ = ("real",)
    depth = 0
    has_symbols = False

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

    @property
    def has_symbols(self) -> bool:
        return self.spec.is_symbolic

    def storage(self) -> torch.Tensor:
        if self._real is None:
            spec = self.spec
            with _torch.PastDispatch():
                real = torch.empty_strided(*spec.numbers[:2], dtype=spec.dtype, device=CPU)
                self._real = real.fill_(self.value)
        return self._real


class NumberStorage(FilledStorage):
    """The storage of a tensor without dimensions; `value` is exactly the number that a read returns."""

    __slots__ = ()


class StoragePart:
    """A tensor on determined contents, as it was when a call used it. `owner` identifies the storage."""

    __slots__ = ("content", "owner", "spec")

    def __init__(self, content: Any, spec: TensorSpec, owner: int = 0) -> None:
        self.content = content
        self.spec = spec
        self.owner = owner

    def real(self) -> torch.Tensor:
        return on_storage(self.content.storage(), self.spec)

    def copy_on(self, storages: dict[int, torch.Tensor]) -> torch.Tensor:
        """The real tensor on a copy of the storage; tensors that share a storage share the copy."""
        storage = storages.get(self.owner)
        if storage is None:
            storage = storages[self.owner] = copy_storage(self.content.storage())
        return on_storage(storage, self.spec)


class UnreadPart(StoragePart):
    """A tensor whose values the call does not read."""

    __slots__ = ()

    def __init__(self, spec: TensorSpec) -> None:
        super().__init__(EMPTY_STORAGE, spec)

    def real(self) -> torch.Tensor:
        return torch.empty((), dtype=self.spec.dtype, device=CPU).expand(self.spec.numbers.shape)

    def copy_on(self, storages: dict[int, torch.Tensor]) -> torch.Tensor:
        return torch.empty_strided(*self.spec.numbers[:2], dtype=self.spec.dtype, device=CPU)


CPU = torch.device("cpu")
PLAIN_TYPE_OF: dict[type, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
SYMBOLIC = tuple(PLAIN_TYPE_OF)
EMPTY_STORAGE = LiteralStorage(torch.empty(0))
_computing = threading.RLock()


class DeterminedCall:
    """An operator call on `StoragePart`s. Its results are computed once; the arguments are then dropped."""

    __slots__ = ("_has_symbols", "_tensors", "args", "default_dtype", "depth", "is_write", "kwargs", "op")

    def __init__(self, op: Any, args: Any, kwargs: Any, is_write: bool, depth: int = 1) -> None:
        self.op, self.args, self.kwargs, self.is_write = op, args, kwargs, is_write
        self.default_dtype = default_dtype()
        self.depth = depth
        self._tensors: list[torch.Tensor] | None = None
        self._has_symbols: bool | None = None

    @property
    def has_symbols(self) -> bool:
        """Whether computing it would specialise a symbol: an argument, or a size of a tensor, at any depth."""
        if self._tensors is not None:
            return False
        if self._has_symbols is None:
            parts = flat(StoragePart, self.args, self.kwargs)
            self._has_symbols = bool(flat(SYMBOLIC, self.args, self.kwargs)) or any(
                part.spec.is_symbolic or part.content.has_symbols for part in parts
            )
        return self._has_symbols

    def tensors(self) -> list[torch.Tensor]:
        """The results of the call; if it writes in place, its inputs after the call."""
        if self._tensors is None:
            with _computing:
                if _torch.replays_on_real_tensors(
                    self.default_dtype
                ):  # an argument of a call that is computed
                    self._compute()
                else:
                    with _torch.ReplayOnRealTensors(self.default_dtype):
                        self._compute()
        assert self._tensors is not None
        return self._tensors

    def _compute(self) -> None:
        if self._tensors is None:
            self._tensors = self._run_in_place() if self.is_write else self._run()
            self.op = self.args = self.kwargs = None
            self.depth = 0

    def _arguments(self) -> object:
        """The arguments with the numbers that symbols stand for: C++ accepts no symbols where a tensor is expected."""
        return map_structure(_number, SYMBOLIC, (self.args, self.kwargs))

    def _run(self) -> list[torch.Tensor]:
        args, kwargs = map_structure(lambda part: part.real(), StoragePart, self._arguments())
        return [
            output.detach()
            for output in flat(torch.Tensor, (self.op(*args, **_with_cpu_device(kwargs)),), {})
        ]

    def _run_in_place(self) -> list[torch.Tensor]:
        storages: dict[int, torch.Tensor] = {}
        targets: list[torch.Tensor] = []

        def copy_part(part: StoragePart) -> torch.Tensor:
            targets.append(part.copy_on(storages))
            return targets[-1]

        args, kwargs = map_structure(copy_part, StoragePart, self._arguments())
        self.op(*args, **_with_cpu_device(kwargs))
        return targets


def _number(symbol: object) -> Any:
    """Specialise a symbol to its hint, with a guard."""
    return PLAIN_TYPE_OF[type(symbol)](symbol)


class CallResult:
    """The storage of one of the tensors of a call, with the layout of its spec."""

    __slots__ = ("_real", "event", "position", "spec")

    def __init__(self, event: DeterminedCall, position: int, spec: TensorSpec) -> None:
        self.event, self.position, self.spec = event, position, spec
        self._real: torch.Tensor | None = None

    @property
    def depth(self) -> int:
        return self.event.depth

    @property
    def has_symbols(self) -> bool:
        return self.spec.is_symbolic or self.event.has_symbols

    def storage(self) -> torch.Tensor:
        if self._real is None:
            op = self.event.op
            tensor = self.event.tensors()[self.position]
            if not self.event.is_write:
                check_result(op, tensor, self.spec)
            with _torch.PastDispatch():
                self._real = tensor if self.event.is_write else _lay_out(tensor, self.spec)
        return self._real


COUNTED: dict[tuple[object, ...], Any] = {}
"""Memoised results of in-place operators on single numbers: all step counters of an optimizer have the same value."""
MOST_COUNTED = 1 << 12


def read_number(known: DeterminedContents, spec: TensorSpec) -> Any:
    """The number in a 0-dimensional tensor that in-place operators computed from a literal; None for other contents."""
    content = known.content
    if type(content) is NumberStorage and content.spec is spec:
        return content.value
    if type(content) is not CallResult or not content.event.is_write or content.event.op is None:
        return None
    event = content.event
    part, *others = event.args
    if event.kwargs or not isinstance(part, StoragePart) or part.spec is not spec or content.position:
        return None
    before = _number_before(part)
    if before is None or before != before or not all(type(number) in (int, float) for number in others):
        return None
    # Zeros have a sign, and True equals 1: the key has the text and the type.
    numbers = [(type(number), number or repr(number)) for number in (before, *others)]
    key = (event.op, spec.dtype, event.default_dtype, *numbers)
    after = COUNTED.get(key)
    if after is None:
        tensor = event.tensors()[0]
        with _torch.PastDispatch():
            after = tensor.item()
        if len(COUNTED) >= MOST_COUNTED:
            COUNTED.clear()
        COUNTED[key] = after
    known.content = NumberStorage(spec, after)
    return after


def _number_before(part: StoragePart) -> Any:
    content, spec = part.content, part.spec
    if type(content) is NumberStorage:
        return content.value if content.spec is spec else None
    if (
        type(content) is not LiteralStorage or content.real.dtype is not spec.dtype
    ):  # unpickled storages are bytes
        return None
    if content.real.untyped_storage().nbytes() == spec.itemsize:
        with _torch.PastDispatch():
            return part.real().item()
    return None


def _with_cpu_device(kwargs: dict[str, object]) -> dict[str, Any]:
    return {name: CPU if isinstance(v, torch.device) else v for name, v in kwargs.items()}


def copy_storage(real: torch.Tensor) -> torch.Tensor:
    """A tensor on a copy of the storage of `real`, with the same sizes and strides."""
    if real.untyped_storage().nbytes() == real.numel() * real.itemsize:
        return real.clone()
    fresh = torch.empty(0, dtype=real.dtype, device=CPU)
    storage = real.untyped_storage().clone()
    return fresh.set_(storage, real.storage_offset(), real.shape, real.stride())


def check_result(op: object, real: torch.Tensor, spec: TensorSpec) -> None:
    """Raise if the computed value does not match the inferred spec: viewing it by the spec would read out of bounds."""
    if real.dtype is not spec.dtype or tuple(real.shape) != spec.shape:
        name = str(op) if op is not None else "an operator"
        shown = f"{str(real.dtype).removeprefix('torch.')}{list(real.shape)}"
        raise MetadataMismatchError(
            f"{name}: the rule returned {spec}, the kernel {shown}; this is a bug in understudy, please report it"
        )


def on_storage(real: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """A real tensor with the sizes and strides of the spec on the storage of `real`."""
    with _torch.PastDispatch():
        if spec.dtype is real.dtype:
            view = real.as_strided(*spec.numbers)
        else:
            view = torch.empty(0, dtype=spec.dtype, device=CPU)
            if spec.numel and (end := _end_in_bytes(spec)) > real.untyped_storage().nbytes():
                raise MetadataMismatchError(
                    f"{spec} needs {end} bytes, and the storage has {real.untyped_storage().nbytes()}"
                )
            shape, stride, offset = spec.numbers
            view.set_(real.untyped_storage(), offset, shape, stride)
        if spec.conj != view.is_conj():
            _torch.set_conj(view, spec.conj)
        if spec.neg != view.is_neg():
            _torch.set_neg(view, spec.neg)
        return view


def _end_in_bytes(spec: TensorSpec) -> Any:
    """The end of its last element, in bytes from the start of the storage."""
    last = sum((size - 1) * step for size, step in zip(spec.shape, spec.stride, strict=True))
    return (spec.offset + last + 1) * spec.itemsize


def _lay_out(real: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """A copy of `real` with the strides of the spec."""
    if real.stride() == spec.stride and real.storage_offset() == spec.offset:
        return real
    fresh = torch.empty_strided(*spec.numbers[:2], dtype=real.dtype, device=CPU)
    return fresh.copy_(real)


def has_no_elements(spec: TensorSpec) -> bool:
    return spec.layout is torch.strided and not spec.is_symbolic and 0 in spec.shape


def empty_value(spec: TensorSpec) -> torch.Tensor | None:
    """The value of a tensor without elements, which needs no data; None for others."""
    if not has_no_elements(spec):
        return None
    with _torch.PastDispatch():
        return torch.empty_strided(*spec.numbers[:2], dtype=spec.dtype, device=CPU)


# --- one operator call -----------------------------------------------------------------------------------------


def start_contents(
    op: OpOverload, args: tuple[object, ...], kwargs: dict[str, object], spec: TensorSpec
) -> DeterminedContents | None:
    """The contents of the result of a factory: a call without tensor arguments."""
    if _has_unbacked_numbers(args, kwargs):
        return None
    return DeterminedContents(CallResult(DeterminedCall(op, args, kwargs, is_write=False), 0, spec))


def start_extremes(op: OpOverload, args: tuple[object, ...], spec: TensorSpec) -> DeterminedContents | None:
    """The bounds of the values of a tensor of symbolic size that is filled with one number, or counts. The values are not
    computed, which would specialise the size."""
    rule = record_of(op).extremes
    found = None if rule is None else rule(*args)
    if found is None:
        return None
    contents = DeterminedContents(None)
    contents.extremes = from_torch(found[0]), from_torch(found[1]), spec.numel
    return contents


def extremes_of(known: DeterminedContents | None, spec: TensorSpec) -> tuple[Any, Any] | None:
    """The least and the greatest value of a tensor on these contents, if it has elements. None if they are not known."""
    if known is None or known.extremes is None:
        return None
    least, most, count = known.extremes
    # A view may lack some of the values, unless all of them are equal; an expanded tensor has all of them.
    sizes = (
        size
        for size, step in zip(spec.shape, spec.stride, strict=True)
        if not (type(step) is int and step == 0)
    )
    return (least, most) if least is most or is_provably_equal(math.prod(sizes), count) else None


def freeze_arguments(plan: Plan, args: Any, kwargs: Any, inputs: list[Any]) -> tuple[Any, Any, int] | None:
    """The arguments with each tensor replaced by its current contents, and the depth of the result's expression; None if not
    all are determined."""
    unread = plan.count_unread() if plan.determined else None
    depth = 0
    for position, fake in enumerate(inputs):
        content = _content(fake)
        if content is not None:
            depth = max(depth, content.depth)
        elif unread is None or position >= unread or (plan.written and not _is_all_of_storage(fake)):
            _stop_tracking_parameters(inputs)
            return None
    has_symbols = bool(inputs) and inputs[0].fake_mode.shape_env is not None
    if unread is None or (has_symbols and _has_unbacked_numbers(args, kwargs)):
        return None
    kind = type(inputs[0]) if inputs else None
    return (
        _freeze(tuple(args), kind),
        {name: _freeze(value, kind) for name, value in kwargs.items()},
        depth + 1,
    )


def _freeze(value: Any, kind: type | None) -> Any:
    """The same arguments with a `StoragePart` for each tensor of this kind."""
    own = type(value)
    if own is kind:
        return _part(value)
    if own is tuple:
        return tuple([_freeze(part, kind) for part in value])
    return [_freeze(part, kind) for part in value] if own is list else value


def _is_all_of_storage(fake: Any) -> bool:
    """Whether the tensor covers its whole storage, and no other tensor shares it."""
    spec = fake._spec
    if getattr(fake, "_is_param", False) or spec.offset or not spec.is_contiguous:
        return False
    return _torch.native_storage(
        fake
    ).nbytes() == spec.numel * spec.itemsize and not _torch.has_other_tensors(fake)


def _has_unbacked_numbers(args: Any, kwargs: Any) -> bool:
    return any(not symbol.node.has_hint() for symbol in flat(SYMBOLIC, args, kwargs))


def _content(fake: Any) -> Any:
    known = fake._determined
    if known is None:
        return None
    if known.is_empty and known.counting_mode is None:
        fake._determined = None  # the hot path need not track it any more
    return known.content


def _part(fake: FakeTensor) -> StoragePart:
    known = fake._determined
    if known is None or known.content is None:
        return UnreadPart(fake._spec)
    return StoragePart(known.content, fake._spec, id(known))


def _stop_tracking_parameters(inputs: list[Any]) -> None:
    """Stop tracking the initial values of parameters that are used with undetermined values.

    Tracking them would keep every call that they take part in off the hot path.
    """
    for fake in inputs:
        if fake._determined is not None and getattr(fake, "_is_param", False):
            fake._determined.forget()
            fake._determined = None


def update_contents(
    op: object, plan: Plan, before: tuple[Any, Any, int] | None, inputs: list[Any], results: list[Any]
) -> None:
    """Update the contents of the inputs that were written to, and set those of new results."""
    event = (
        None if before is None else DeterminedCall(op, before[0], before[1], bool(plan.written), before[2])
    )
    if event is not None and event.depth > DEEPEST_EXPRESSION:
        if _torch.is_in_backward() or any(fake._spec.numel > MOST_COMPUTED for fake in (*inputs, *results)):
            event = None
        else:
            event.tensors()
    if event is None:
        for position in plan.written:
            if inputs[position]._determined is not None:
                inputs[position]._determined.forget()
        return
    if plan.written:
        for position in plan.written:
            fake = inputs[position]
            fake._determined = fake._determined or DeterminedContents(None)
            fake._determined.content = CallResult(event, position, fake._spec)
        return
    is_literal = bool(inputs) and all(
        fake._determined is not None and fake._determined.literal for fake in inputs
    )
    for position, fake in enumerate(results):
        if fake._determined is None:
            fake._determined = DeterminedContents(CallResult(event, position, fake._spec), is_literal)


def has_untracked_aliases(fakes: list[Any]) -> bool:
    """Whether tensors besides these share their storage: writes through them would not be noticed."""
    return _torch.has_other_tensors(fakes[0], len({id(fake) for fake in fakes}))


def keep_contents(fake: Any, value: torch.Tensor) -> None:
    """From now on these are the values of a tensor that had undetermined ones: nothing is written."""
    with _torch.PastDispatch():
        real = torch.zeros(
            _torch.native_storage(fake).nbytes() // fake._spec.itemsize, dtype=fake._spec.dtype, device=CPU
        )
        on_storage(real, fake._spec).copy_(value)
    fake._determined = fake._determined or DeterminedContents(None)
    fake._determined.content = LiteralStorage(real)


def replace_contents(fakes: list[Any], values: list[torch.Tensor] | None) -> None:
    """Tensors were filled from outside of the program: with these values, or with undetermined ones. No version counter
    counts such writes."""
    for fake in fakes:
        count_hidden_write(fake.fake_mode, storage_of(fake))
        if values is None and fake._determined is not None:
            fake._determined.forget()
    if values is not None:
        by_storage: dict[int, list[tuple[Any, torch.Tensor]]] = {}
        for fake, value in zip(fakes, values, strict=True):
            by_storage.setdefault(_torch.storage_id(fake), []).append((fake, value))
        for written in by_storage.values():
            _fill_storage(written)


def _fill_storage(written: list[tuple[Any, torch.Tensor]]) -> None:
    """Tensors on one storage. Where the rest of it is not determined, and is not covered, they stay undetermined."""
    first = written[0][0]
    nbytes = _torch.native_storage(first).nbytes()
    owners = [fake for fake, _ in written]
    base = getattr(first, "_base", None)
    if type(base) is type(first):
        owners.append(base)
    known = next((fake._determined for fake in owners if _content(fake) is not None), None)
    with _torch.PastDispatch():
        if known is not None:
            real = copy_storage(known.content.storage())
        elif sum(
            value.numel() * value.element_size() for _, value in written
        ) >= nbytes and not has_untracked_aliases(owners):
            real = torch.empty(nbytes // first._spec.itemsize, dtype=first._spec.dtype, device=CPU)
            known = DeterminedContents(None)
        else:
            replace_contents(owners, None)
            return
        for fake, value in written:
            on_storage(real, fake._spec).copy_(value.reshape(fake._spec.numbers.shape))
    known.content = LiteralStorage(real)
    for fake in owners:
        fake._determined = known
