"""Initial values without a dispatch: `normal_`, `uniform_`, `zero_`, `fill_`.

Building a model consists mostly of these calls. On a stand-in they only bump a version counter, which costs a quarter of a
dispatch. So the dispatch is skipped where no other mode would see the
call. Every unusual case (a number of another type, a dtype without random numbers, overlapping memory, a leaf that
requires grad) goes to the dispatcher, which gives the same answer or raises the proper error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from understudy import _torch
from understudy.fake.values.determined import DeterminedContents, FilledStorage
from understudy.ops.registry import user_rule
from understudy.ops.traits.values import LARGEST

if TYPE_CHECKING:
    from understudy.fake.tensor import FakeTensor

RANDOM_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})
NUMBER_TYPES = frozenset({float, int})
FILL_TYPES = frozenset({float, int, bool})
LARGEST_IN_ALL_DTYPES = 127
"""Every dtype can represent the integers from 0 to this one; signed dtypes also the negative ones."""
USUAL_BOUND = 30_000
"""Every random dtype can represent intervals between the negative of this and this."""
NAMES_WITH_USER_RULES = user_rule.names
can_skip_dispatch_for = _torch.can_skip_dispatch_for
count_writes = _torch.count_writes
is_inference = torch.Tensor.is_inference
is_grad_enabled = torch.is_grad_enabled
native = torch.Tensor


# --- writes; each returns whether it was done; the tensor must not require grad ----------------------------------------


def draw_normal(fake: FakeTensor, mean: float, std: float, generator: object = None) -> bool:
    is_plain = type(std) in NUMBER_TYPES and type(mean) in NUMBER_TYPES and std >= 0 and generator is None
    return is_plain and "aten::normal_" not in NAMES_WITH_USER_RULES and _draw(fake)


def draw_uniform(fake: FakeTensor, low: Any, high: Any, generator: object = None) -> bool:
    is_plain = type(low) in NUMBER_TYPES and type(high) in NUMBER_TYPES and generator is None
    is_read = fake._spec.numel == 1  # the range of a single number is tracked
    is_usual = is_plain and -USUAL_BOUND <= low <= high <= USUAL_BOUND
    return is_usual and not is_read and "aten::uniform_" not in NAMES_WITH_USER_RULES and _draw(fake)


def fill(fake: FakeTensor, value: Any) -> bool:
    if type(value) not in FILL_TYPES:
        return False
    fits = abs(value) <= LARGEST_IN_ALL_DTYPES and (value >= 0 or fake._spec.dtype.is_signed)
    return fits and "aten::fill_.Scalar" not in NAMES_WITH_USER_RULES and _fill(fake, value)


def zero(fake: FakeTensor) -> bool:
    return "aten::zero_" not in NAMES_WITH_USER_RULES and _fill(fake, 0)


def _draw(fake: FakeTensor) -> bool:
    spec, mode = fake._spec, fake.fake_mode
    if spec.dtype not in RANDOM_DTYPES or spec.is_symbolic or not spec.is_contiguous:
        return False
    if not (mode.can_skip_dispatch and can_skip_dispatch_for(mode) and _count_write(fake)):
        return False
    if fake._determined is not None:
        _forget(fake, fake._determined)
    return True


def _fill(fake: FakeTensor, value: object) -> bool:
    mode = fake.fake_mode
    if fake._spec.sparse is not None or not (mode.can_skip_dispatch and can_skip_dispatch_for(mode)):
        return False
    known = fake._determined
    if known is None:
        return _count_write(fake)
    if known.content is not None and not _covers_determined_storage(fake):
        return False
    if not _count_write(fake):
        return False
    if known.content is None:
        _forget(fake, known)
    else:
        known.content = FilledStorage(fake._spec, value)
    return True


def _forget(fake: FakeTensor, known: DeterminedContents) -> None:
    known.forget()
    if known.counting_mode is None:
        fake._determined = None


def _count_write(fake: FakeTensor) -> bool:
    if is_inference(fake):  # may be written to in inference mode only
        return False
    count_writes((fake,))
    return True


def _covers_determined_storage(fake: FakeTensor) -> bool:
    """Whether the tensor covers its whole storage, so that filling it replaces all contents."""
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
