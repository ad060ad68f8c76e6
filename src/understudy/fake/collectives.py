"""Operators of torch.distributed on stand-ins: tensors that a collective fills lose their determined values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from understudy import _torch
from understudy.fake.inputs import handler
from understudy.fake.tensor import FakeTensor
from understudy.fake.values.determined import replace_contents
from understudy.fake.values.ranges import store_ranges
from understudy.ops.communication import collective
from understudy.ops.registry import record_of
from understudy.spec.call import flat_exact, map_structure

if TYPE_CHECKING:
    from understudy.fake.mode import FakeTensorMode


@handler(*(name for name in collective.names if name.startswith("c10d::")))
def run_collective(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any) -> Any:
    """The operator is called with meta tensors, for the `Work` that it returns. Schemas of these operators list no
    writes."""
    metas: dict[int, torch.Tensor] = {}

    def make_meta(fake: FakeTensor) -> torch.Tensor:
        shape, stride, _ = fake._spec.numbers
        meta = torch.empty_strided(shape, stride, dtype=fake._spec.dtype, device="meta")
        return metas.setdefault(id(fake), meta)

    with _torch.PastDispatch():
        if _torch.has_kernel(func, "Meta"):
            meta_args, meta_kwargs = map_structure(make_meta, FakeTensor, (tuple(args), dict(kwargs)))
            result = func(*meta_args, **meta_kwargs)
        else:  # torch has none for collectives of several tensors, which return their `Work` alone
            result = _torch.make_finished_work()
    filled, values, guesses = find_filled(func, args, kwargs, result), None, ()
    if mode.network is not None:
        values = mode.network.exchange_values(func, args, kwargs)
        guesses = () if values is not None else mode.network.guess_values(func, args, kwargs, filled)
    replace_contents(filled, values)
    store_ranges(guesses, filled, is_written=False)
    if not isinstance(result, tuple):
        return result
    fact = record_of(func).collective
    assert fact is not None
    return bind_arguments(func, args, kwargs)[fact.filled[0]], result[1]


def find_filled(func: Any, args: Any, kwargs: Any, result: object) -> list[FakeTensor]:
    """The tensors that a collective fills, in order: arguments, or new results."""
    fact = record_of(func).collective
    if fact is None:
        return []
    if not fact.filled and fact.kind not in ("send", "barrier"):
        return flat_exact(FakeTensor, (result,), {})
    given = bind_arguments(func, args, kwargs)
    return flat_exact(FakeTensor, tuple(given[name] for name in fact.filled), {})


def find_sent(func: Any, args: Any, kwargs: Any) -> list[FakeTensor]:
    fact = record_of(func).collective
    given = bind_arguments(func, args, kwargs)
    return flat_exact(FakeTensor, tuple(given[name] for name in fact.sent), {}) if fact is not None else []


def bind_arguments(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """The given arguments by name."""
    return {**dict(zip(_torch.argument_names(func), args, strict=False)), **kwargs}
