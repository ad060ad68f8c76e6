"""First values without a dispatch: `normal_`, `uniform_`, `zero_`, `fill_`, and the `detach` that makes a parameter.

Building a model is little else. On a stand-in each of them comes to counting a write, or to a second tensor on the
same storage, which is a quarter of what a dispatch costs. So where nobody but the mode would hear of the call, there is
none. Whatever is not plainly right (a number of another type, a dtype that can't be drawn, memory that overlaps, a
leaf that requires its gradient) goes to the dispatcher, which finds the same answer or the right words for the error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from understudy import _torch
from understudy.fake.values.determined import FilledStorage
from understudy.ops.registry import user_rule
from understudy.ops.traits.values import LARGEST

if TYPE_CHECKING:
    from understudy.fake.tensor import FakeTensor

DRAWN = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})
NUMBERS = frozenset({float, int})
FILLING = frozenset({float, int, bool})
HELD = 127
"""All dtypes hold the numbers from 0 to this one, those with a sign the negative ones as well."""
goes_unnoticed = _torch.goes_unnoticed
count_writes = _torch.count_writes
is_inference = torch.Tensor.is_inference
is_grad_enabled = torch.is_grad_enabled
make_subclass = _torch.make_subclass
NoDispatch = _torch.NoDispatch
native = torch.Tensor


# --- what a write comes to: each says whether it was done; autograd must not have asked for a gradient -----------------


def draw_normal(fake: FakeTensor, mean: float, std: float, generator: object = None) -> bool:
    is_plain = type(std) in NUMBERS and type(mean) in NUMBERS and std >= 0 and generator is None
    return is_plain and "aten::normal_" not in user_rule and _draw(fake)


def draw_uniform(fake: FakeTensor, low: object, high: Any, generator: object = None) -> bool:
    is_plain = type(low) in NUMBERS and type(high) in NUMBERS and low <= high and generator is None
    is_read = fake._spec.numel == 1  # its range is of interest
    return is_plain and not is_read and "aten::uniform_" not in user_rule and _draw(fake)


def fill(fake: FakeTensor, value: Any) -> bool:
    is_plain = type(value) in FILLING and (0 <= value <= HELD or (-HELD <= value < 0 and fake._spec.dtype.is_signed))
    return is_plain and "aten::fill_.Scalar" not in user_rule and _fill(fake, value)


def zero(fake: FakeTensor) -> bool:
    return "aten::zero_" not in user_rule and _fill(fake, 0)


def _draw(fake: FakeTensor) -> bool:
    spec, mode = fake._spec, fake.fake_mode
    if spec.dtype not in DRAWN or spec.is_symbolic or not spec.is_contiguous:
        return False
    if not (mode.answers_at_once and goes_unnoticed(mode) and _is_counted(fake)):
        return False
    if fake._known is not None:
        fake._known.forget()
        fake._known = None
    return True


def _fill(fake: FakeTensor, value: object) -> bool:
    mode = fake.fake_mode
    if fake._spec.sparse is not None or not (mode.answers_at_once and goes_unnoticed(mode)):
        return False
    known = fake._known
    if known is None:
        return _is_counted(fake)
    if known.content is not None and not _is_all_that_is_known(fake):
        return False
    if not _is_counted(fake):
        return False
    if known.content is None:
        fake._known = None
    else:
        known.content = FilledStorage(fake._spec, value)
    return True


def _is_counted(fake: FakeTensor) -> bool:
    if is_inference(fake):  # only inference mode may write to it
        return False
    count_writes((fake,))
    return True


def _is_all_that_is_known(fake: FakeTensor) -> bool:
    """Whether nothing is left of a storage's contents when this tensor is filled."""
    spec = fake._spec
    return bool(
        not (spec.is_symbolic or spec.conj or spec.neg)
        and spec.numel <= LARGEST
        and spec.is_contiguous
        and _torch.native_storage(fake).nbytes() == spec.numel * spec.itemsize
    )


# --- methods of FakeTensor -----------------------------------------------------------------------------------------


def normal_(self: FakeTensor, *numbers: Any, generator: Any = None, **others: Any) -> torch.Tensor:
    is_usual = len(numbers) == 2 and not others and not (is_grad_enabled() and self.requires_grad)
    if is_usual and draw_normal(self, numbers[0], numbers[1], generator):
        return self
    return native.normal_(self, *numbers, generator=generator, **others)


def uniform_(self: FakeTensor, *numbers: Any, generator: Any = None, **others: Any) -> torch.Tensor:
    is_usual = len(numbers) == 2 and not others and not (is_grad_enabled() and self.requires_grad)
    if is_usual and draw_uniform(self, numbers[0], numbers[1], generator):
        return self
    return native.uniform_(self, *numbers, generator=generator, **others)


def fill_(self: FakeTensor, *values: Any, **others: Any) -> torch.Tensor:
    is_usual = len(values) == 1 and not others and not (is_grad_enabled() and self.requires_grad)
    if is_usual and fill(self, values[0]):
        return self
    return native.fill_(self, *values, **others)


def zero_(self: FakeTensor) -> torch.Tensor:
    if not (is_grad_enabled() and self.requires_grad) and zero(self):
        return self
    return native.zero_(self)


def detach(self: FakeTensor) -> Any:
    mode, spec = self.fake_mode, self._spec
    if (
        not (mode.answers_at_once and spec.sparse is None and goes_unnoticed(mode))
        or "aten::detach" in user_rule
    ):
        return native.detach(self)
    guard = NoDispatch()
    try:
        fake = make_subclass(type(self), self)
    finally:
        del guard
    fake._spec = spec
    fake.fake_mode = mode
    if self._known is not None:
        fake._known = self._known
    elif self._range is not None:
        fake._range = self._range
    return fake
