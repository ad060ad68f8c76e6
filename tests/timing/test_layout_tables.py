"""Steps of published tables, composed of rehearsed parts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from examples.decoder import SIZES
from tools.fit_kernels.layouts import Layout, find_stuck, measure_order
from tools.fit_kernels.parts import Cost, Part, PartStore, Shape, compose, count_parameters

SHAPE = Shape("h100", "llama-8b", ("--vocabulary", "1024", "--even-stages"), 1, 1, 1, 1, 1, 0, "heavy")
LAYERS = SIZES["llama-8b"][0]


class KnownParts(PartStore):
    """Layers of 1 s forward and 2 s backward."""

    host = 0.5

    def find(self, shape: Shape) -> Part:
        return Part(Cost(1.0, 2.0, self.host, 3.0, 1e9), Cost(0.0, 0.0, 0.0, 0.0, 5e9))


def test_stages_wait_for_each_other() -> None:
    optimizer = compose(SHAPE, KnownParts()).seconds - 3 * LAYERS
    assert 0 < optimizer < 0.2
    composed = compose(replace(SHAPE, pp=4, passes=6), KnownParts())
    assert composed.seconds == pytest.approx((6 + 3) * 3 * LAYERS / 4, rel=1e-3)


def test_the_first_stage_holds_as_many_passes_as_there_are_stages() -> None:
    few, many = (compose(replace(SHAPE, pp=4, passes=passes), KnownParts()).stage_bytes for passes in (2, 6))
    assert many[0] - few[0] == pytest.approx(2 * LAYERS / 4 * 1e9)
    assert many[3] == few[3]


def test_a_slow_host_bounds_a_stage() -> None:
    store = KnownParts()
    store.host = 4.0
    assert compose(SHAPE, store).seconds == pytest.approx(4.0 * LAYERS, rel=1e-2)


def test_ranks_check_collectives_on_the_host() -> None:
    shape = replace(SHAPE, tp=8, check=0.1)
    assert compose(shape, KnownParts()).seconds == pytest.approx((0.5 + 8 * 8 * 0.1) * LAYERS, rel=1e-2)


def test_parameters_of_a_layer_are_those_of_the_example() -> None:
    layer, table = count_parameters(replace(SHAPE, tp=2))
    assert layer == (4 * 4096**2 + 3 * 4096 * 14336) / 2
    assert table == 1024 * 4096 / 2


def test_a_pipeline_is_stuck_if_others_of_its_stages_are_much_faster() -> None:
    pipeline = replace(SHAPE, pp=2, passes=9)
    rows = [
        Layout("a", pipeline, 1.0),
        Layout("b", pipeline, 9.0),
        Layout("a", replace(pipeline, batch=2), 2.0),
    ]
    assert find_stuck(rows) == {1}
    assert not find_stuck([replace(row, shape=replace(row.shape, pp=1)) for row in rows])


def test_order() -> None:
    assert measure_order([(1.0, 10.0), (2.0, 20.0), (3.0, 30.0)]) == 1.0
    assert measure_order([(1.0, 10.0), (2.0, 30.0), (3.0, 20.0)]) == pytest.approx(1 / 3)
