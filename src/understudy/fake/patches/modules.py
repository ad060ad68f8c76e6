"""What torch answers otherwise for as long as a fake mode is active, and why.

Each function takes torch's own object and gives the one that stands in its place: an answer for threads in which a fake
mode is active, or for stand-ins, and torch's own answer for all others.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from understudy import _torch
from understudy._torch import while_active
from understudy.fake import initial_values
from understudy.fake.tensor import FakeTensor
from understudy.ops.nn.attention import drops_padding, encode

Function = Callable[..., Any]


@while_active("encoders with padding")
def with_whole_batches(original: Function) -> Function:
    @functools.wraps(original)
    def forward(
        self: Any, src: Any, mask: Any = None, src_key_padding_mask: Any = None, is_causal: bool | None = None
    ) -> Any:
        is_seen = _torch.is_stand_in(src) or _torch.is_recording()
        if is_seen and drops_padding(self, src, mask, src_key_padding_mask):
            return encode(self, src, src_key_padding_mask)
        return original(self, src, mask, src_key_padding_mask, is_causal)

    return forward


@while_active("initial trunc_normal")
def draw_once(original: Function) -> Function:
    """torch draws again until no value is outside of the bounds, and asks the values whether there is one."""

    def draw(tensor: Any, mean: float, std: float, a: float, b: float, generator: Any = None) -> Any:
        if not _torch.is_stand_in(tensor):
            return original(tensor, mean, std, a, b, generator)
        if type(tensor) is FakeTensor and initial_values.draw_normal(tensor, mean, std, generator):
            return tensor
        with torch.no_grad():
            return tensor.normal_(mean, std, generator=generator)

    return draw


def _at_once(place: str, write: Callable[..., bool]) -> None:
    @while_active(place)
    def patch(original: Function) -> Function:
        """What torch.nn.init does with gradients switched off: switching costs more than the rest."""

        def initialise(tensor: Any, *numbers: Any, **others: Any) -> Any:
            is_usual = type(tensor) is FakeTensor and not others
            return tensor if is_usual and write(tensor, *numbers) else original(tensor, *numbers, **others)

        return initialise


_at_once("initial normal", initial_values.draw_normal)
_at_once("initial uniform", initial_values.draw_uniform)
_at_once("initial fill", initial_values.fill)
_at_once("initial zero", initial_values.zero)


_kaiming, _uniform = torch.nn.init.kaiming_uniform_, torch.nn.init.uniform_


@while_active("initial Linear")
@while_active("initial _ConvNd")
def layer_at_once(original: Function) -> Function:
    """A layer draws from an interval that its sizes give; without values, there is no need to work it out.

    Who exchanges the functions of torch.nn.init (not to initialise at all, say) is asked.
    """

    def reset_parameters(self: Any) -> None:
        init, weight, bias = torch.nn.init, self.weight, self.bias
        if (
            type(weight) is not FakeTensor
            or not (bias is None or type(bias) is FakeTensor)
            or init.kaiming_uniform_ is not _kaiming
            or init.uniform_ is not _uniform
            or len(weight._spec.shape) < 2
            or 0 in weight._spec.shape
            or not initial_values.draw_uniform(weight, -1.0, 1.0)
        ):
            return original(self)
        if bias is not None and not initial_values.draw_uniform(bias, -1.0, 1.0):
            bound = 1 / math.sqrt(weight._spec.numel / weight._spec.shape[0])
            init.uniform_(bias, -bound, bound)
        return None

    return reset_parameters


# --- Which examples a `DataLoader` takes, and in which order, is decided for real ---------------------------
# It draws them, and reads what was drawn. No tensor of the program takes part in that: in a fake mode, the draws are those
# of a run without it, and the data that is loaded is what the data set gives inside of the mode.


def order_drawn(original: Callable[..., Any]) -> Callable[..., Any]:
    """`sampler.__iter__`, which goes over numbers."""

    @functools.wraps(original)
    def __iter__(self: Any) -> Iterator[Any]:
        if _torch.active_fake_mode() is None:
            return iter(original(self))
        with _torch.without_fake_mode():
            return iter(list(original(self)))

    return __iter__


def draw_for_real(original: Callable[..., Any]) -> Callable[..., Any]:
    """A function that draws, called where nothing is fake."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _torch.active_fake_mode() is None:
            return original(*args, **kwargs)
        with _torch.without_fake_mode():
            return original(*args, **kwargs)

    return call


def in_this_process(original: Callable[..., Any]) -> Callable[..., Any]:
    """The iterator of a `DataLoader`: workers are for what takes time, and stand-ins take none. No process knows those of
    another."""

    @functools.wraps(original)
    def _get_iterator(self: Any) -> Any:
        if _torch.active_fake_mode() is None or not self.num_workers:
            return original(self)
        before = self.num_workers, self.timeout
        self.num_workers = self.timeout = 0
        try:
            return original(self)
        finally:
            self.num_workers, self.timeout = before

    return _get_iterator


for _sampler in _torch.SAMPLERS:
    while_active(f"order of {_sampler}")(order_drawn)
while_active("loading by workers")(in_this_process)
while_active("beginning to load data")(draw_for_real)
while_active("splitting data")(draw_for_real)
