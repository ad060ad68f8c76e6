"""Values that follow from the program alone: literals, `arange`, `zeros`, … and what is computed from them.

Nothing is computed until somebody asks. Each storage with determined contents has one `Known`, shared by the tensors
on it; its `content` is an expression that never changes once made, so a later write can't spoil an earlier
answer: a write gives the storage a new expression, or, if what is written is not determined, none.

    content = Literal(real)                       a real tensor's storage
            | Result(op, args, position)          output `position` of an operator on such contents
            | Written(op, args, target)           the storage of input `target` after an operator wrote to it
"""

from __future__ import annotations

from typing import Any

import torch

from understudy import _torch
from understudy.infer.call import flat, mapped
from understudy.infer.plan import Plan
from understudy.spec import TensorSpec

DEEPEST = 48
"""Expressions deeper than this are computed at once, so that a counter in a long loop stays small."""


class Known:
    """What is known of one storage. `content` is None once something undetermined was written to it."""

    __slots__ = ("content", "literal")

    def __init__(self, content: Any, literal: bool = False) -> None:
        self.content = content
        self.literal = literal

    def forget(self) -> None:
        self.content = None


class Literal:
    __slots__ = ("real",)
    depth = 0

    def __init__(self, real: torch.Tensor) -> None:
        self.real = real

    def storage(self) -> torch.Tensor:
        return self.real


class Part:
    """A tensor on known contents, as it was when it was used."""

    __slots__ = ("content", "spec")

    def __init__(self, content: Any, spec: TensorSpec) -> None:
        self.content = content
        self.spec = spec

    def real(self) -> torch.Tensor:
        return on_storage(self.content.storage(), self.spec)


class Computed:
    """An expression over parts; `storage()` computes it once and then forgets how."""

    __slots__ = ("_real", "args", "depth", "kwargs", "op", "position", "spec")

    def __init__(self, op: Any, args: Any, kwargs: Any, position: int, spec: TensorSpec) -> None:
        self.op, self.args, self.kwargs, self.position, self.spec = op, args, kwargs, position, spec
        self.depth = 1 + max((part.content.depth for part in flat(Part, args, kwargs)), default=0)
        self._real: torch.Tensor | None = None

    def storage(self) -> torch.Tensor:
        if self._real is None:
            self._real = self._compute()
            self.op = self.args = self.kwargs = None
            self.depth = 0
        return self._real

    def _compute(self) -> torch.Tensor:
        raise NotImplementedError


class Result(Computed):
    __slots__ = ()

    def _compute(self) -> torch.Tensor:
        with _torch.PastDispatch():
            args, kwargs = mapped(Part.real, Part, (self.args, self.kwargs))
            outputs = flat(torch.Tensor, (self.op(*args, **_on_cpu(kwargs)),), {})
            return _laid_out(outputs[self.position].detach(), self.spec)


class Written(Computed):
    __slots__ = ()

    def _compute(self) -> torch.Tensor:
        with _torch.PastDispatch():
            targets: list[torch.Tensor] = []

            def own(part: Part) -> torch.Tensor:
                fresh = on_storage(copied_storage(part.content.storage()), part.spec)
                targets.append(fresh)
                return fresh

            args, kwargs = mapped(own, Part, (self.args, self.kwargs))
            self.op(*args, **_on_cpu(kwargs))
            return targets[self.position]


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.device("cpu") if isinstance(v, torch.device) else v for name, v in kwargs.items()}


def copied_storage(real: torch.Tensor) -> torch.Tensor:
    """A tensor on a copy of the storage of `real`, with the same geometry."""
    if real.untyped_storage().nbytes() == real.numel() * real.itemsize:
        return real.clone()
    fresh = torch.empty(0, dtype=real.dtype)
    storage = real.untyped_storage().clone()
    return fresh.set_(storage, real.storage_offset(), real.shape, real.stride())  # type: ignore[call-overload, no-any-return]


def on_storage(real: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The real tensor with this spec's geometry on the storage of `real`."""
    with _torch.PastDispatch():
        if spec.dtype is real.dtype:
            view = real.as_strided(spec.shape, spec.stride, spec.offset)
        else:
            view = torch.empty(0, dtype=spec.dtype)
            view.set_(real.untyped_storage(), spec.offset, spec.shape, spec.stride)  # type: ignore[call-overload]
        if spec.conj != view.is_conj():
            _torch.set_conj(view, spec.conj)
        if spec.neg != view.is_neg():
            _torch.set_neg(view, spec.neg)
        return view


def _laid_out(real: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """`real`, on a storage laid out as the spec says."""
    if real.stride() == spec.stride and real.storage_offset() == spec.offset:
        return real
    fresh = torch.empty_strided(spec.shape, spec.stride, dtype=real.dtype)
    return fresh.copy_(real)


# --- one operator call -----------------------------------------------------------------------------------------


def before_call(plan: Plan, args: Any, kwargs: Any, inputs: list[Any]) -> Any:
    """The arguments with each tensor replaced by its contents as they are now; None if not all are determined."""
    if not plan.determined:
        return None
    for fake in inputs:
        if fake._known is None or fake._known.content is None:
            return None
    return mapped(lambda fake: Part(fake._known.content, fake._spec), torch.Tensor, (tuple(args), dict(kwargs)))


def after_call(op: Any, plan: Plan, before: Any, inputs: list[Any], results: list[Any]) -> None:
    """Keep account of what is known: of inputs that were written to, and of results on storages of their own."""
    if before is None:
        for position in plan.written:
            if inputs[position]._known is not None:
                inputs[position]._known.forget()
        return
    args, kwargs = before
    if plan.written:
        for position in plan.written:
            inputs[position]._known.content = _settled(Written(op, args, kwargs, position, inputs[position]._spec))
        return
    is_literal = bool(inputs) and all(fake._known.literal for fake in inputs)
    for position, fake in enumerate(results):
        if fake._known is None:
            content = _settled(Result(op, args, kwargs, position, fake._spec))
            fake._known = Known(content, is_literal)


def _settled(content: Computed) -> Computed:
    if content.depth > DEEPEST:
        content.storage()
    return content
