"""Steps of published tables, composed of rehearsed parts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from examples.decoder import SIZES
from tools.fit_kernels.generations import FLASH_2, SPEEDS, attention_of
from tools.fit_kernels.layouts import Layout, find_sleeping, measure_order
from tools.fit_kernels.nanotron import POLL, describe
from tools.fit_kernels.parts import Cost, Extras, Part, PartStore, Shape, compose, count_parameters
from understudy.simulation.catalogue import find_card
from understudy.timing.curves import find_curve

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
    near, far = (
        compose(replace(SHAPE, tp=tp, extras=Extras(check=0.1, check_far=0.2)), KnownParts()).seconds
        for tp in (8, 16)
    )
    assert near == pytest.approx((0.5 + 10 * 8 * 0.1) * LAYERS, rel=1e-2)
    assert far == pytest.approx((0.5 + 10 * 16 * 0.2) * LAYERS, rel=1e-2)


def test_buckets_are_checked_too_and_zero_1_reduces_all_gradients_at_once() -> None:
    shape = replace(SHAPE, dp=64, passes=4, extras=Extras(check_far=0.01, bucket=1 << 20, copy=0.001))
    plain = compose(replace(shape, extras=Extras(bucket=1 << 20, copy=0.001)), KnownParts()).seconds
    checks = 64 * 0.01 * (6 * LAYERS + 1)
    hidden = 2 * LAYERS  # the last backward pass
    assert checks - hidden < compose(shape, KnownParts()).seconds - plain < checks
    with_zero = compose(replace(shape, zero=1), KnownParts()).seconds
    assert with_zero - plain > 64 * 0.001 * 6 * LAYERS - 1
    assert with_zero < plain + checks / 2


def test_collectives_over_several_nodes_take_a_least_time() -> None:
    shape = replace(SHAPE, tp=16, extras=Extras(round=0.1))
    assert compose(shape, KnownParts()).seconds == pytest.approx((3 + 10 * 16 * 0.1) * LAYERS, rel=1e-2)


def test_parameters_of_a_layer_are_those_of_the_example() -> None:
    layer, table = count_parameters(replace(SHAPE, tp=2))
    assert layer == (4 * 4096**2 + 3 * 4096 * 14336) / 2
    assert table == 1024 * 4096 / 2


def test_a_pipeline_that_sleeps_between_messages_is_told_by_its_time() -> None:
    pipeline = replace(SHAPE, pp=4, passes=9, extras=Extras(sleep=0.5))
    awake = compose(pipeline, KnownParts())
    asleep = compose(replace(pipeline, extras=Extras(sleep=0.5, does_sleep=True)), KnownParts())
    assert awake.sleep == asleep.sleep == 0.5 * (8 * 10 + 4 * 6)
    assert asleep.seconds == pytest.approx(awake.seconds + awake.sleep)
    assert asleep.awake_seconds == pytest.approx(awake.seconds)
    rows = [Layout("a", pipeline, seconds) for seconds in (awake.seconds * 1.05, asleep.seconds * 0.95)]
    for composed in (awake, asleep):
        assert find_sleeping(rows, [composed] * 2) == {1}
    assert not find_sleeping(rows, [compose(SHAPE, KnownParts())] * 2)


ROW = {"model": "8B", "gpus": 64, "dp": 4, "tp": 8, "pp": 2, "mbs": 1, "grad_acc": 64, "zero": 1}


@pytest.mark.parametrize(
    ("changes", "has_checks", "does_sleep"),
    [
        ({}, True, False),
        ({"gpus": 8, "dp": 1, "tp": 4, "grad_acc": 256}, False, False),
        ({"pp": 1, "tp": 16}, False, False),
        ({"gpus": 512, "dp": 32, "grad_acc": 8}, True, True),
        ({"gpus": 512, "pp": 1, "tp": 8, "dp": 64, "grad_acc": 4}, True, False),
        ({"gpus": 512, "pp": 1, "tp": 32, "dp": 16, "grad_acc": 16}, False, False),
        ({"zero": 0}, True, True),
    ],
)
def test_which_runs_of_nanotron_had_checks_and_sleeps(
    changes: dict[str, object], has_checks: bool, does_sleep: bool
) -> None:
    extras = describe({**ROW, **changes})
    assert (extras.check > 0, extras.does_sleep) == (has_checks, does_sleep)
    assert extras.sleep == POLL


def test_older_attention_is_a_calibration_of_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNDERSTUDY_CONFIG", raising=False)
    card = find_card("h100")
    assert not find_curve(card).corrections
    with attention_of(FLASH_2):
        older = find_curve(card).corrections
    assert older["attention_backward"] == SPEEDS[FLASH_2]["h100"][1] and older["matmul"] == 1.0
    with attention_of(""):
        assert not find_curve(card).corrections


def test_order() -> None:
    assert measure_order([(1.0, 10.0), (2.0, 20.0), (3.0, 30.0)]) == 1.0
    assert measure_order([(1.0, 10.0), (2.0, 30.0), (3.0, 20.0)]) == pytest.approx(1 / 3)
