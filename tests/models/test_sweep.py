"""The sweep over model classes as a test: a few run always, hundreds of them are marked `conformance`.

`timm` and `diffusers` are tried where they are installed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from tests.forks import run_in_fork
from tests.models.classes import Case, NotCounted, find_case, list_names
from tests.models.columns import BOUND, COLUMNS, Eager
from tests.models.sweep import (
    is_right,
    list_failures,
    preload,
    run_class,
    try_class,
    with_variants,
    write_table,
)
from tests.models.variants import VARIANTS
from understudy.errors import UnderstudyError

pytest.importorskip("transformers")

SAMPLE = ("transformers/ElectraModel", "transformers/GemmaModel", "transformers/DINOv3ViTModel", "transformers/MarianModel",
          "transformers/Data2VecVisionModel")  # fmt: skip
STRIDE = 2
"""Every second name is tried; `python -m tests.models.sweep` tries all."""
LEAST_CLASSES, LEAST_SHARE = 400, 0.97


@pytest.mark.parametrize("name", SAMPLE)
def test_every_column_of_a_few(name: str) -> None:
    found = try_class(name)["columns"]
    assert list(found) == list(COLUMNS)
    assert [column for column, said in found.items() if not is_right(said)] == []


@pytest.mark.conformance
def test_every_column_of_hundreds() -> None:
    """At least 97% of the classes are right in each column; what eager does not run is not counted."""
    preload()
    results = [run_class(name) for name in list_names()[::STRIDE]]
    counted = [result["columns"] for result in results if "columns" in result]
    assert len(counted) >= LEAST_CLASSES, f"only {len(counted)} of {len(results)} classes run in eager"
    for column in COLUMNS:
        right = sum(is_right(columns[column]) for columns in counted)
        assert right >= LEAST_SHARE * len(counted), (
            f"{column}\n{list_failures(results)}\n{write_table(results)}"
        )


VARIED = (
    "LlamaForCausalLM", "GPT2LMHeadModel", "T5ForConditionalGeneration", "BertForMaskedLM", "Gemma2ForCausalLM",
    "MixtralForCausalLM", "BartForConditionalGeneration", "OPTForCausalLM", "FalconForCausalLM", "WhisperModel", "ViTModel",
)  # fmt: skip


@pytest.mark.conformance
def test_variants() -> None:
    """BART in float16 asks for infinities, which is data-dependent in a capture."""
    preload()
    results = [run_class(name) for name in with_variants(f"transformers/{name}" for name in VARIED)]
    wrong = {
        result["name"] for result in results if not all(map(is_right, result.get("columns", {}).values()))
    }
    assert wrong <= {"transformers/BartForConditionalGeneration+fp16"}, list_failures(results)
    assert sum("columns" in result for result in results) >= 85


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_of_one(variant: str) -> None:
    found = try_class(f"transformers/LlamaForCausalLM+{variant}", ["forward", "train step", "make_fx fake"])[
        "columns"
    ]
    assert [column for column, said in found.items() if not is_right(said)] == []


# --- the sweep itself --------------------------------------------------------------------------------------------------


class Scaled(torch.nn.Module):
    """Gives another answer, or none, where it is told to."""

    def __init__(self, wrong: str = "") -> None:
        super().__init__()
        self.wrong, self.linear = wrong, torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if type(x) is not torch.Tensor and self.wrong == "shape":
            return y[:1]
        if self.wrong == "numbers":
            self.linear.weight.data.add_(1)
        if self.wrong == "data" and y.sum() > 0:
            return y * 2
        return y


def columns_of(wrong: str) -> dict[str, str]:
    eager = Eager(Case(lambda: Scaled(wrong), lambda batch, length: {"x": torch.randn(batch, 4)}))
    found = {}
    for name, column in COLUMNS.items():
        try:
            found[name] = column(eager) or "ok"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def test_what_is_right_is_right() -> None:
    assert {name for name, said in columns_of("").items() if said != "ok"} == set()


@pytest.mark.parametrize(
    ("wrong", "columns"),
    [
        ("shape", {"forward", "make_fx fake", "make_fx symbolic", "forward, cuda"}),
        ("data", {"forward", "train step", "make_fx fake", "make_fx symbolic", "FakeTensorProp", "symbolic_trace",
                  "forward, cuda", "train step, cuda"}),
    ],
)  # fmt: skip
def test_what_is_wrong_is_seen(wrong: str, columns: set[str]) -> None:
    assert columns <= {name for name, said in columns_of(wrong).items() if said != "ok"}


class OnPatches(torch.nn.Module):
    """Its patches are in one dimension; the grid tells of which images."""

    def __init__(self, needs_grid: bool) -> None:
        super().__init__()
        self.linear, self.needs_grid = torch.nn.Linear(4, 4), needs_grid

    def forward(self, pixel_values: torch.Tensor, grid_thw: torch.Tensor) -> Any:
        y = self.linear(pixel_values) * grid_thw[0, 0]
        if not self.needs_grid:
            return y
        return [part.mean(0) if len(part) > 4 else part for part in y.split(grid_thw.prod(-1).tolist())]


def inputs_on_grid(batch: int, length: int) -> Any:
    return {"pixel_values": torch.randn(batch * 6, 4), "grid_thw": torch.tensor([[1, 2, 3]] * batch)}


CAPTURES = ("make_fx fake", "make_fx symbolic", "FakeTensorProp", "symbolic_trace")


@pytest.mark.parametrize("needs_grid", [True, False])
def test_a_grid_is_bound_only_where_a_capture_needs_its_values(needs_grid: bool) -> None:
    eager = Eager(Case(lambda: OnPatches(needs_grid), inputs_on_grid))
    assert [COLUMNS[name](eager) or "" for name in CAPTURES] == [BOUND if needs_grid else ""] * 4


@pytest.mark.parametrize("name", CAPTURES)
def test_a_bound_grid_does_not_help_a_capture_that_decides_by_pixels(name: str) -> None:
    class ByPixels(OnPatches):
        def forward(self, pixel_values: torch.Tensor, grid_thw: torch.Tensor) -> Any:
            return super().forward(pixel_values if pixel_values.sum() > 0 else -pixel_values, grid_thw)

    with pytest.raises(UnderstudyError):
        COLUMNS[name](Eager(Case(lambda: ByPixels(True), inputs_on_grid)))


def test_a_class_that_eager_does_not_construct_is_not_counted() -> None:
    assert "not counted" in run_class("transformers/NoSuchModel")


def test_a_class_that_takes_too_long_is_ended() -> None:
    result = run_class("transformers/ElectraModel", seconds=0.01)
    assert "timeout" in str(result)


def test_a_class_that_is_slow_in_eager_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_for_ever(case: object) -> None:
        while True:
            pass

    monkeypatch.setattr("tests.models.sweep.Eager", run_for_ever)
    monkeypatch.setattr("tests.models.sweep.SECONDS_OF_EAGER", 0.05)
    assert "eager takes longer" in try_class("transformers/ElectraModel")["not counted"]


def test_what_a_process_gave_before_it_was_ended_is_kept() -> None:
    def work(end: Callable[[], object]) -> Iterator[str]:
        yield "first"
        end()
        yield "second"

    assert run_in_fork(lambda: work(lambda: None), 60) == (["first", "second"], "")
    assert run_in_fork(lambda: work(lambda: time.sleep(60)), 0.2) == (["first"], "timeout")
    pieces, ending = run_in_fork(lambda: work(partial(os._exit, 3)), 60)
    assert (pieces, ending[:6]) == (["first"], "status")
    assert run_in_fork(lambda: work(lambda: 1 / 0), 60)[0] == ["first"]


def test_columns_that_a_process_did_not_come_to_have_its_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COLUMNS, "forward", lambda eager: os._exit(3))
    found = run_class("transformers/ElectraModel", ["construct", "forward", "train step"])["columns"]
    assert found["construct"] == "ok"
    assert found["forward"] == found["train step"] != "ok"


def test_the_table_counts() -> None:
    right = {"name": "timm/one", "columns": dict.fromkeys(COLUMNS, "ok")}
    half = {"name": "transformers/other", "columns": {**right["columns"], "forward": "Wrong: …"}}  # type: ignore[dict-item]
    table = write_table([right, half, {"name": "timm/two", "not counted": "…"}])
    assert "| classes | 1 | 1 | 2 | |" in table
    assert "| forward | 0 | 1 | 1 | 50.0% |" in table


def test_a_class_of_no_library() -> None:
    with pytest.raises((KeyError, NotCounted)):
        find_case("nothing/Model")
