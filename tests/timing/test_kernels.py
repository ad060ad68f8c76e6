"""Seconds of kernels on cards."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from tests.ops.traits.kernel_calls import convolution, kernels, product, spec
from understudy.simulation.catalogue import Card, find_card, list_cards
from understudy.timing.curves import can_estimate, find_curve, find_peak
from understudy.timing.kernels import name_dtype, seconds_of

aten = torch.ops.aten


@pytest.mark.parametrize("card", ["h100", "a100-80", "b200", "rtx4090", "l40s", "v100-16", "t4", "mi300x"])
def test_large_products_reach_most_of_the_peak_and_none_exceeds_it_by_much(card: str) -> None:
    curve = find_curve(find_card(card))
    kernel = product(8192, 8192, 8192, torch.float16)
    part = kernel.flops / curve.peak("float16") / seconds_of(kernel, curve)
    assert 0.55 < part < 1.2  # GeForce cards run above the clock of their published peak


def test_float32_on_a_b200_is_not_tf32() -> None:
    """A dtype that the catalogue lacks took the lowest figure of the card: six times too fast."""
    b200 = find_card("b200")
    assert find_peak(b200, "float32") < find_peak(b200, "tf32") / 6
    without = dataclasses.replace(b200, throughput={"tf32": 1125e12, "bfloat16": 2250e12})
    assert find_peak(without, "float32") < 100e12
    curve = find_curve(b200)
    slow, fast = (
        seconds_of(product(4096, 4096, 4096, dtype), curve) for dtype in (torch.float32, torch.bfloat16)
    )
    assert slow > 10 * fast


def test_float32_products_are_tf32_where_the_program_allows_it() -> None:
    kernel = product(64, 64, 64, torch.float32)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        assert name_dtype(kernel) == "float32"
        torch.set_float32_matmul_precision("high")
        assert name_dtype(kernel) == "tf32"
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_dtype_without_units_is_computed_in_float32() -> None:
    t4 = find_card("t4")
    assert find_peak(t4, "bfloat16") == find_peak(t4, "float32")


def test_bytes_are_not_added_to_compute() -> None:
    """A product is bound by the larger of both: they overlap."""
    curve = find_curve(find_card("h100"))
    kernel = product(8192, 8192, 8192)
    without_bytes = seconds_of(kernel._replace(bytes=0), curve)
    moving = kernel.bytes / curve.bandwidth
    assert seconds_of(kernel, curve) < without_bytes + 0.2 * moving


def test_a_memory_bound_kernel_takes_the_time_of_its_bytes() -> None:
    curve = find_curve(find_card("a100-80"))
    big = spec(1 << 28)
    (kernel,) = kernels(aten.add.Tensor, big, big, made=big)
    least = 3 * 2 * (1 << 28) / curve.bandwidth
    assert least < seconds_of(kernel, curve) * 1.15 < 2 * least


def test_a_small_kernel_takes_its_fixed_time() -> None:
    curve = find_curve(find_card("h100"))
    (kernel,) = kernels(aten.relu.default, spec(8), made=spec(8))
    assert seconds_of(kernel, curve) == pytest.approx(curve.fixed, rel=0.05)


def test_depthwise_convolutions_do_not_use_tensor_cores() -> None:
    """They were counted at the peak of tensor cores: with the FLOPs of a depthwise convolution, next to nothing."""
    curve = find_curve(find_card("rtx4090"))
    kernel = convolution(256, kernel=7)
    assert seconds_of(kernel, curve) > kernel.flops / curve.peak("float32")
    assert seconds_of(kernel, curve) > 5 * kernel.flops / curve.peak("float16")


def test_grouped_convolutions_reach_less_than_dense_ones() -> None:
    curve = find_curve(find_card("rtx4090"))
    rates = [kernel.flops / seconds_of(kernel, curve) for kernel in (convolution(1), convolution(32))]
    assert rates[1] < rates[0] / 3


def test_a_wave_that_is_nearly_empty_costs() -> None:
    """One row of tiles more than multiprocessors: the last wave is nearly empty."""
    curve = find_curve(find_card("a100-80"))
    full, more = (
        seconds_of(product(128 * 108, 128, 4096), curve),
        seconds_of(product(128 * 109, 128, 4096), curve),
    )
    assert more > 1.02 * full


def test_times_are_finite_for_every_card_of_the_catalogue() -> None:
    checked = 0
    for card in list_cards():
        if can_estimate(card):
            curve = find_curve(card)
            for kernel in (product(512, 512, 512), convolution(1), convolution(256)):
                assert 0 < seconds_of(kernel, curve) < 10 and math.isfinite(seconds_of(kernel, curve))
            assert set(curve.error) == {"training", "inference"}
            checked += 1
    assert checked > 10


def test_a_card_that_nobody_measured_has_a_wider_interval() -> None:
    known, other = find_curve(find_card("rtx4090")), find_curve(find_card("l4"))
    assert known.is_measured and not other.is_measured
    assert other.error["inference"] > known.error["inference"]


def test_a_card_of_the_users_own_is_scaled_by_its_figures() -> None:
    h100 = find_card("h100")
    half = dataclasses.replace(
        h100,
        key="mine",
        bandwidth=(h100.bandwidth or 0) / 2,
        throughput={k: v / 2 for k, v in h100.throughput.items()},
    )
    kernel = product(8192, 8192, 8192)
    ratio = seconds_of(kernel, find_curve(half)) / seconds_of(kernel, find_curve(h100))
    assert ratio == pytest.approx(2, rel=0.05)


def test_a_card_without_figures_has_no_estimate() -> None:
    assert not can_estimate(Card("x", "x", "cuda", 1 << 30))
    assert not can_estimate(None)
