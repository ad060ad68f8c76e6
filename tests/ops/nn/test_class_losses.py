from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

import understudy.ops  # noqa: F401  (registers)
from tests.ops.layouts import MORE_DTYPES, every, filled, layouts

aten = torch.ops.aten


def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def test_nll_loss() -> None:
    def calls() -> Iterator[Any]:
        forward, backward = aten.nll_loss_forward.default, aten.nll_loss_backward.default
        one = filled(())
        for shape, target in (
            ((3, 4), (3,)),
            ((4,), ()),
            ((4,), (1,)),
            ((0, 4), (0,)),
            ((3, 4), (2,)),
            ((3, 4), (3, 1)),
        ):
            for x, reduction in itertools.product(layouts(shape), (0, 1, 2)):
                for weight in (None, filled((4,)), filled((3,))):
                    yield forward, x, zeros(*target), weight, reduction, -100
                    grad = filled(target) if reduction == 0 and len(shape) == 2 else one
                    if target != (0,) and not (target == () and len(shape) == 2):
                        yield backward, grad, x, zeros(*target), weight, reduction, -100, one
        x = filled((3, 4))
        for dtype in (torch.uint8, torch.int32, torch.float32):
            yield forward, x, zeros(3, dtype=dtype), None, 1, -100
        for dtype in MORE_DTYPES:
            yield forward, x.to(dtype), zeros(3), None, 1, -100
        yield forward, filled((2, 3, 4)), zeros(2, 4), None, 1, -100

    every(calls())


def test_nll_loss2d() -> None:
    def calls() -> Iterator[Any]:
        forward, backward = aten.nll_loss2d_forward.default, aten.nll_loss2d_backward.default
        one = filled(())
        for shape in ((2, 3, 4, 5), (2, 1, 4, 5)):
            target = zeros(2, 4, 5)
            for x, reduction in itertools.product(layouts(shape, few=True), (0, 1, 2)):
                yield forward, x, target, None, reduction, -100
                grad = one if reduction else filled((2, 4, 5))
                yield backward, grad, x, target, filled(shape[1:2]), reduction, -100, one
        x = filled((2, 3, 4, 5))
        yield forward, x, zeros(2, 4, 4), None, 1, -100
        for dtype in (torch.uint8, torch.int32):
            yield forward, x, zeros(2, 4, 5, dtype=dtype), None, 1, -100
        for dtype in MORE_DTYPES:
            yield forward, x.to(dtype), zeros(2, 4, 5), None, 1, -100

    every(calls())


def test_whole_losses() -> None:
    def calls() -> Iterator[Any]:
        for reduction in (0, 1, 2):
            for op in (aten.nll_loss_nd.default, aten.cross_entropy_loss.default):
                yield op, filled((3, 4)), zeros(3), None, reduction
                yield op, filled((4,)), zeros(), None, reduction
                yield op, filled((2, 3, 4, 5)), zeros(2, 4, 5), None, reduction
            yield aten.nll_loss.default, filled((3, 4)), zeros(3), None, reduction

    every(calls())


def test_margins() -> None:
    def calls() -> Iterator[Any]:
        one = filled(())
        for (shape, target), reduction in itertools.product(
            (((3, 4), (3,)), ((4,), ()), ((), ()), ((3, 4), (2,))), (0, 1, 2)
        ):
            for x in layouts(shape):
                yield aten.multi_margin_loss.default, x, zeros(*target), 1, 1, None, reduction
                yield aten.multilabel_margin_loss_forward.default, x, zeros(*shape), reduction
                if reduction and target != (2,):
                    yield (
                        aten.multi_margin_loss_backward.default,
                        one,
                        x,
                        zeros(*target),
                        1,
                        1,
                        None,
                        reduction,
                    )
        yield aten.multi_margin_loss.default, filled((3, 4)), zeros(3), 3
        for dtype in MORE_DTYPES:
            yield aten.multi_margin_loss.default, filled((3, 4), dtype), zeros(3)
            yield aten.multilabel_margin_loss_forward.default, filled((3, 4), dtype), zeros(3, 4), 1

    every(calls())


def test_ctc_loss() -> None:
    def calls() -> Iterator[Any]:
        targets = torch.ones(2, 3, dtype=torch.int64)
        for log_probs in layouts((6, 2, 5), few=True):
            for lengths in ([3, 2], [2, 2], [3, 3]):
                yield aten._ctc_loss.default, log_probs, targets, [6, 6], lengths
            losses, table = aten._ctc_loss.default(log_probs, targets, [6, 6], [3, 2])
            backward = aten._ctc_loss_backward.default
            yield backward, filled((2,)), log_probs, targets, [6, 6], [3, 2], losses, table, 0
        yield aten._ctc_loss.default, log_probs, targets, [6], [3, 2]
        yield aten._ctc_loss.default, log_probs, targets, [6, 6], [3, 2], 7
        yield aten._ctc_loss.default, log_probs[0], targets, [6, 6], [3, 2]
        rows = [
            torch.ones(shape, dtype=torch.int64) for shape in ((2, 3), (3, 3), (2, 2), (5,), (6,), (2, 3, 1))
        ]
        for given in (*rows, rows[0].int(), rows[0].float()):
            for lengths in ([3, 2], [2, 2], [4, 1], [3, -1], [3, 2, 1]):
                for of_inputs in ([6, 6], [7, 6], [6, -1], [6, 6, 6]):
                    yield aten._ctc_loss.default, log_probs, given, of_inputs, lengths
        yield aten._ctc_loss.default, torch.zeros(0, 2, 5), targets, [0, 0], [3, 2]
        for dtype in (torch.float64, torch.bfloat16):
            yield aten._ctc_loss.default, log_probs.to(dtype), targets, [6, 6], [3, 2]

    every(calls())
