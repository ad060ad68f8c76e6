"""Which examples a `DataLoader` takes, and in which order, is decided for real.

It draws them, and reads what was drawn. No tensor of the program takes part in that: in a fake mode, the draws are those
of a run without it, and the data that is loaded is what the data set gives inside of the mode.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from understudy import _torch


def order_drawn(original: Callable[..., Any]) -> Callable[..., Any]:
    """`sampler.__iter__`, which goes over numbers."""

    @functools.wraps(original)
    def __iter__(self: Any) -> Iterator[Any]:
        if _torch.active_fake_mode() is None:
            return iter(original(self))
        with _torch.without_fake_mode():
            return iter(list(original(self)))

    return __iter__


def drawn(original: Callable[..., Any]) -> Callable[..., Any]:
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
