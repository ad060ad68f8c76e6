"""Tensors that CPU kernels make on the way: as torch's profiler sees them, of operands in several orders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.report.true_peak import true_peak
from understudy.report.runs import rehearse

Tensor = torch.Tensor
Make = Callable[..., Tensor]
aten: Any = torch.ops.aten


def by_rows(*shape: int) -> Tensor:
    return torch.ones(*shape)


def transposed(*shape: int) -> Tensor:
    return torch.ones(*shape[:-2], shape[-1], shape[-2]).mT


def expanded(*shape: int) -> Tensor:
    return torch.ones([1] * len(shape)).expand(shape)


ORDERS: dict[str, Make] = {"by rows": by_rows, "transposed": transposed, "expanded": expanded}


def zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.long)


CALLS: dict[str, Callable[[Make], object]] = {
    "softmax": lambda x: aten._softmax(x(6, 8), 1, False),
    "softmax of columns": lambda x: aten._softmax(x(6, 8), 0, False),
    "log_softmax": lambda x: aten._log_softmax(x(6, 8), 1, False),
    "softmax, backward": lambda x: aten._softmax_backward_data(x(6, 8), by_rows(6, 8), 1, torch.float32),
    "log_softmax, backward": lambda x: aten._log_softmax_backward_data(x(6, 8), x(6, 8), 1, torch.float32),
    "safe softmax": lambda x: aten._safe_softmax(x(6, 8), 1),
    "nll_loss": lambda x: aten.nll_loss_forward(x(6, 8), zeros(6), None, 1, -100),
    "embedding, backward": lambda x: aten.embedding_dense_backward(x(6, 8), torch.arange(6), 10, -1, False),
    "layer norm": lambda x: aten.native_layer_norm(x(6, 8), [8], by_rows(8), by_rows(8), 1e-5),
    "layer norm, backward": lambda x: aten.native_layer_norm_backward(
        x(6, 8), by_rows(6, 8), [8], by_rows(6, 1), by_rows(6, 1), by_rows(8), by_rows(8), [True, True, True]
    ),
    "group norm, backward": lambda x: aten.native_group_norm_backward(
        x(2, 4, 6, 6), by_rows(2, 4, 6, 6), by_rows(2, 2), by_rows(2, 2), by_rows(4), 2, 4, 36, 2, [True, True, True]
    ),
    "maxima": lambda x: aten.max_pool2d_with_indices(x(2, 4, 6, 6), [2, 2]),
    "maxima, backward": lambda x: aten.max_pool2d_with_indices_backward(
        x(2, 4, 3, 3), by_rows(2, 4, 6, 6), [2, 2], [2, 2], [0, 0], [1, 1], False, zeros(2, 4, 3, 3)
    ),
    "means": lambda x: aten.avg_pool2d(x(2, 4, 6, 6), [2, 2]),
    "means, backward": lambda x: aten._adaptive_avg_pool2d_backward(x(2, 4, 3, 3), by_rows(2, 4, 6, 6)),
    "reflection": lambda x: aten.reflection_pad2d(x(2, 4, 6, 6), [1, 1, 1, 1]),
    "reflection, backward": lambda x: aten.reflection_pad2d_backward(x(2, 4, 8, 8), by_rows(2, 4, 6, 6), [1, 1, 1, 1]),
    "pixel_shuffle": lambda x: aten.pixel_shuffle(x(2, 4, 6, 6), 2),
    "small images": lambda x: aten.upsample_bilinear2d(x(2, 3, 6, 6), [12, 12], False),
    "large images": lambda x: aten.upsample_bilinear2d(x(2, 3, 40, 40), [80, 80], False),
    "nearest": lambda x: aten.upsample_nearest2d(x(2, 3, 6, 6), [12, 12]),
    "cubic": lambda x: aten.upsample_bicubic2d(x(2, 3, 6, 6), [12, 12], False),
    "sequences": lambda x: aten.upsample_linear1d(x(2, 4, 6), [12], False),
    "volumes": lambda x: aten.upsample_trilinear3d(x(2, 4, 3, 3, 3), [6, 6, 6], False),
    "images, backward": lambda x: aten.upsample_bilinear2d_backward(x(2, 3, 12, 12), [12, 12], [2, 3, 6, 6], False),
    "grid_sample, backward": lambda x: aten.grid_sampler_2d_backward(
        x(2, 4, 5, 5), by_rows(2, 4, 6, 6), by_rows(2, 5, 5, 2), 0, 0, False, [True, True]
    ),
    "products": lambda x: aten.bmm(x(3, 10, 8), by_rows(3, 8, 10)),
    "products of two": lambda x: aten.bmm(x(3, 10, 8), x(3, 8, 10)),
    "small products": lambda x: aten.bmm(x(3, 4, 4), by_rows(3, 4, 4)),
    "products with a bias": lambda x: aten.baddbmm(by_rows(3, 10, 10), x(3, 10, 8), x(3, 8, 10)),
    "a matrix and a vector": lambda x: aten.mv(x(6, 8), by_rows(8)),
    "three": lambda x: aten._trilinear(x(6, 4), by_rows(5, 4, 3), x(6, 3), [1, 3], [0], [1, 2], [2, 3]),
    "distances": lambda x: aten._cdist_forward(x(6, 8), x(5, 8), 2.0, None),
    "narrow indices": lambda x: aten.gather(x(6, 8), 1, zeros(6, 3).int()),
    "logsumexp": lambda x: aten.logsumexp(x(6, 8), [1]),
    "logsumexp of all": lambda x: aten.logsumexp(x(6, 8), [0, 1]),
    "deviation": lambda x: aten.std.correction(x(6, 8)),
    "deviations": lambda x: aten.std.correction(x(6, 8), [1]),
    "sort": lambda x: aten.sort(x(6, 8)),
    "sort of columns": lambda x: aten.sort(x(6, 8), 0),
    "stable sort": lambda x: aten.sort.stable(x(6, 8), stable=True, dim=0),
    "kthvalue": lambda x: aten.kthvalue(x(6, 8), 2),
    "median": lambda x: aten.median(x(6, 8)),
    "difference": lambda x: aten.dist(x(6, 8), by_rows(6, 8)),
    "infinite": lambda x: aten.isinf(x(6, 8)),
    "draws": lambda x: aten.multinomial(x(6, 8), 1),
    "draws with replacement": lambda x: aten.multinomial(x(6, 8), 2, True),
    "roll": lambda x: aten.roll(x(6, 8), [1, 1], [0, 1]),
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", CALLS)
def test_steps(name: str, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for order in ORDERS:
            assert measure(name, order, rehearse_peak) == measure(name, order, true_peak), order
    finally:
        torch.set_num_threads(before)


def measure(name: str, order: str, find_peak: Callable[[Callable[[], object]], int]) -> int:
    return find_peak(lambda: CALLS[name](ORDERS[order]))


def rehearse_peak(program: Callable[[], object]) -> int:
    return int(rehearse(program).peak.allocated_bytes)


def test_bilinear() -> None:
    """Its backward pass is three products of three."""

    def program() -> None:
        module = torch.nn.Bilinear(8, 12, 5)
        module(torch.randn(16, 8), torch.randn(16, 12)).square().mean().backward()

    assert rehearse(program).peak.allocated_bytes == true_peak(program)


def test_a_number_that_a_node_keeps_is_there_once() -> None:
    """`x * 0.5` keeps the number: its gradient, which is the peak here, multiplies by the same."""

    def program() -> None:
        x = torch.ones(1000, requires_grad=True)
        (x * 0.5)[:10].sum().backward()

    assert rehearse(program).peak.allocated_bytes == true_peak(program)
