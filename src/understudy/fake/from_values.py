"""Calls whose answer lies in the data, where that data is determined.

Inference refuses them: it sees specs only. What the mode then asks here is whether the tensors that decide have known
values. If so, the answer is as sure as any: `x[torch.tensor([True, False, True])]` has two rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from understudy import _torch
from understudy.errors import DimensionError
from understudy.fake.boundary import with_line
from understudy.fake.realise import make_new
from understudy.fake.tensor import FakeTensor
from understudy.infer.call import flat, mapped
from understudy.rules.class_losses import ctc_losses
from understudy.rules.indexing import check_masks
from understudy.spec import TensorSpec

if TYPE_CHECKING:
    from understudy.fake.mode import FakeTensorMode

aten = torch.ops.aten


def answer(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any) -> Any:
    """What the call gives, or `NotImplemented` if values that nobody knows decide."""
    inputs = flat(FakeTensor, args, kwargs)
    if inputs and all(is_known(fake) for fake in inputs) and not _torch.written_arguments(func):
        return _computed(mode, func, args, kwargs, inputs)
    special = BY_SOME.get(func.name())
    return NotImplemented if special is None else special(mode, *args, **kwargs)


def is_known(fake: FakeTensor) -> bool:
    return fake._known is not None and fake._known.content is not None


def _computed(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any, inputs: list[FakeTensor]) -> Any:
    """Run the operator on the values."""
    real_args, real_kwargs = mapped(mode.value_of, FakeTensor, (tuple(args), dict(kwargs)))
    with _torch.no_modes(), torch.no_grad():
        result = func(*real_args, **real_kwargs)
    device = inputs[0]._spec.device
    return mapped(lambda real: _with_value(mode, real, device), torch.Tensor, result)


def _with_value(mode: FakeTensorMode, real: torch.Tensor, device: torch.device) -> FakeTensor:
    spec = TensorSpec(tuple(real.shape), real.stride(), dtype=real.dtype, device=device)
    fake = make_new(mode, spec)
    mode.remember_literal(fake, real)
    return fake


# --- calls in which only some of the tensors decide -------------------------------------------------------------


def _positions(mode: FakeTensorMode, mask: FakeTensor) -> list[FakeTensor] | None:
    """A mask as one list of positions for each of its dimensions."""
    if not is_known(mask):
        return None
    found = answer(mode, aten.nonzero.default, (mask,), {})
    return list(aten.unbind.int(found, 1))


def check_masks_of(func: Any, fake: FakeTensor, indices: Any) -> None:
    specs = [None if entry is None else entry._spec for entry in indices]
    try:
        check_masks(str(func), fake._spec, specs)
    except DimensionError as error:
        raise with_line(error, str(func), ", ".join(map(str, (fake._spec, specs)))) from None


def _index(mode: FakeTensorMode, x: FakeTensor, indices: list[FakeTensor | None]) -> Any:
    """Masks among the indices become positions."""
    check_masks_of(aten.index.Tensor, x, indices)
    expanded: list[FakeTensor | None] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            expanded.append(index)
            continue
        positions = _positions(mode, index)
        if positions is None:
            return NotImplemented
        expanded.extend(positions)
    with mode:
        return aten.index.Tensor(x, expanded)


def _masked_select(mode: FakeTensorMode, x: FakeTensor, mask: FakeTensor) -> Any:
    if not is_known(mask):
        return NotImplemented
    with mode:
        x, mask = torch.broadcast_tensors(x, mask)
        return aten.index.Tensor(x, [mask])


def _pack_padded_sequence(mode: FakeTensorMode, x: FakeTensor, lengths: FakeTensor, batch_first: bool) -> Any:
    if not is_known(lengths):
        return NotImplemented
    spec = x._spec
    with _torch.no_modes(), torch.no_grad():
        steps = torch.empty(spec.shape[:2])
        data, sizes = aten._pack_padded_sequence.default(steps, mode.value_of(lengths), batch_first)
    packed = make_new(mode, spec.like((data.shape[0], *spec.shape[2:])))
    return packed, readable(mode, sizes)


def readable(mode: FakeTensorMode, real: torch.Tensor) -> FakeTensor:
    """A stand-in on real data: C++ reads the sizes of packed sequences past every dispatch."""
    with _torch.PastDispatch():
        fake: Any = _torch.make_subclass(FakeTensor, real.clone())
    fake._spec = TensorSpec(tuple(real.shape), dtype=real.dtype, device=real.device)
    fake.fake_mode = mode
    mode.remember_literal(fake, real)
    return fake


def with_tensors_of_lengths(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of `torch.ctc_loss` with tensors in the place of lists of lengths: of these, C++ makes tensors past
    every dispatch, which nobody could tell what is in them."""

    def as_tensor(value: Any) -> Any:
        is_list = isinstance(value, (list, tuple)) and all(type(part) is int for part in value)
        return torch.tensor(value, dtype=torch.int64) if is_list else value

    return tuple(map(as_tensor, args)), {name: as_tensor(value) for name, value in kwargs.items()}


def _ctc_loss(
    mode: FakeTensorMode, log_probs: FakeTensor, targets: FakeTensor, input_lengths: Any, target_lengths: Any,
    blank: int = 0, zero_infinity: bool = False,
) -> Any:  # fmt: skip
    counts = [
        len(x) if isinstance(x, (list, tuple)) else x._spec.numel for x in (input_lengths, target_lengths)
    ]
    of_inputs, of_targets = (_numbers_of(mode, lengths) for lengths in (input_lengths, target_lengths))
    if of_targets is None:
        return NotImplemented
    losses = ctc_losses(log_probs._spec, targets._spec, counts, of_inputs or (), of_targets, blank)
    return tuple(make_new(mode, spec) for spec in losses)


def _numbers_of(mode: FakeTensorMode, lengths: Any) -> Any:
    """None if nobody knows them."""
    if not isinstance(lengths, FakeTensor):
        return lengths
    return mode.tolist(lengths) if is_known(lengths) else None


BY_SOME: dict[str, Callable[..., Any]] = {
    "aten::index.Tensor": _index,
    "aten::masked_select": _masked_select,
    "aten::_pack_padded_sequence": _pack_padded_sequence,
    "aten::_ctc_loss": _ctc_loss,
    "aten::_ctc_loss.Tensor": _ctc_loss,
}
