"""The table of CPU kernels: what it says is what real kernels do, and only CPU calls are refused by it."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from understudy import FakeTensorMode
from understudy.errors import DtypeError
from understudy.ops.kernel_tables import table
from understudy.ops.kernel_tables.boxes import cover, includes, main_dtype
from understudy.ops.kernel_tables.survey import CPU_ISA
from understudy.ops.kernel_tables.table import KernelTable, available_releases, nearest_release

DTYPES = (torch.float32, torch.float64, torch.int64, torch.bool)

# --- reality ----------------------------------------------------------------------------------------------------------

COMPARE = """
import json, sys
from understudy._torch import operator_named
from understudy.ops.registry import record_of
from understudy.ops.kernel_tables.survey import survey

refused_by_kernels, missed, wrong = 0, 0, []
for name, answers in survey(sys.argv[1:] or None):
    row = record_of(operator_named(name)).kernel_row if name.startswith("aten::") else None
    for signature, refused in (answers.by_signature if answers else {}).items():
        is_refused_here = row is not None and row.refusal(signature) is not None
        if refused is None and is_refused_here:
            wrong.append(f"{name} {signature}")
        elif refused is not None and not name.partition(".")[0].endswith("_"):  # in place, casts are refused as well
            refused_by_kernels += 1
            missed += not is_refused_here
print(json.dumps([refused_by_kernels, missed, wrong]))
"""


def compare_with_kernels(*names: str) -> tuple[int, int, list[str]]:
    """Ask real kernels in child processes again: how many signatures they refuse, how many of these the table accepts, and
    which ones only the table refuses. The table also accepts what a sample of another entry of the database accepts."""
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": CPU_ISA}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPARE, *names],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    refused, missed, wrong = json.loads(done.stdout.splitlines()[-1])
    return refused, missed, wrong


def test_some_rows_are_what_kernels_do() -> None:
    names = ("mm", "sum", "cumsum", "index_select", "nn.functional.gelu", "bmm", "topk")
    refused, missed, wrong = compare_with_kernels(*names)
    assert refused > 1000
    assert missed < refused / 20
    assert not wrong, wrong[:5]


@pytest.mark.conformance
def test_all_rows_are_what_kernels_do() -> None:
    refused, missed, wrong = compare_with_kernels()
    assert refused > 100_000
    assert missed < refused / 10
    assert not wrong, f"{len(wrong)} are refused by the table only: {wrong[:20]}"


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_an_unsupported_dtype_is_refused_with_a_plain_message() -> None:
    with FakeTensorMode(), pytest.raises(DtypeError) as caught:
        a = torch.ones(2, 2, dtype=torch.bool)
        torch.mm(a, a)
    first = str(caught.value).splitlines()[0]
    assert first.startswith(
        "aten.mm.default: the CPU kernel does not support (bool, bool); supported dtypes: uint8, int8"
    )
    assert isinstance(caught.value, NotImplementedError)


def test_a_refusal_names_the_argument_whose_dtype_is_wrong() -> None:
    scores, bias = torch.ones(4, 10), torch.ones(2)
    with FakeTensorMode(allow_non_fake_inputs=True):
        with pytest.raises(
            DtypeError, match=r"\(float32, int32\); expected uint8 or int64 for argument target\n"
        ):
            F.cross_entropy(scores, torch.ones(4, dtype=torch.int32))
        with pytest.raises(
            DtypeError, match=r"\(float32, float32, float16\); supported dtypes"
        ):  # no alpha, no beta
            torch.addmm(bias, torch.ones(2, 3), torch.ones(3, 2).half())


@pytest.mark.parametrize("device", ["cuda", "meta", "xpu"])
def test_facts_about_the_cpu_refuse_nothing_on_other_devices(device: str) -> None:
    with FakeTensorMode():
        x = torch.empty(3, 3, dtype=torch.float8_e5m2, device=device)
        assert torch.topk(x, 2)[0].device.type == device
        with pytest.raises(DtypeError):
            torch.topk(torch.empty(3, 3, dtype=torch.float8_e5m2), 2)


def test_factories_are_refused_by_the_dtype_that_is_asked_for() -> None:
    with FakeTensorMode():
        with pytest.raises(NotImplementedError):
            torch.arange(3, dtype=torch.float8_e5m2)
        assert torch.arange(3, dtype=torch.float8_e5m2, device="cuda").dtype is torch.float8_e5m2


def test_the_dtype_of_out_is_that_of_a_factory() -> None:
    with FakeTensorMode():
        assert torch.arange(0.1, 3, out=torch.empty(3)).dtype is torch.float32
        assert torch.ops.aten.arange.start_step(0.1, 3.0, 1).shape == (3,)
        with pytest.raises(NotImplementedError, match="does not support"):
            torch.arange(0, 5, out=torch.empty(5, dtype=torch.uint16))
        assert torch.arange(0, 5, out=torch.empty(5, dtype=torch.uint16, device="cuda")).shape == (5,)


def test_tensors_without_elements_need_no_kernel() -> None:
    with FakeTensorMode():
        assert torch.mm(torch.ones(0, 3, dtype=torch.bool), torch.ones(3, 2, dtype=torch.bool)).shape == (
            0,
            2,
        )


# --- releases ---------------------------------------------------------------------------------------------------------


def test_the_nearest_release_is_the_latest_one_that_is_not_later() -> None:
    known = sorted(available_releases())
    assert nearest_release((known[0][0] - 1, 0)) == known[0]
    assert nearest_release(known[-1]) == known[-1]
    assert nearest_release((known[-1][0], known[-1][1] + 7)) == known[-1]


def test_an_unknown_release_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "9.9.1")
    table.current_table.cache_clear()
    try:
        with pytest.warns(
            UserWarning, match=r"no table of CPU kernels for torch 9\.9\.1; using that of 2\."
        ) as caught:
            table.current_table()
        assert len(caught) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert table.current_table().rows
    finally:
        monkeypatch.undo()
        table.current_table.cache_clear()


# --- the format -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_boxes_include_exactly_the_refused_signatures(seed: int) -> None:
    rng = random.Random(seed)
    symbols: list[Any] = [*DTYPES, (torch.float32,), int, None]
    every = list(itertools.product(symbols, repeat=3))
    refused = set(rng.sample(every, rng.randrange(1, len(every))))
    column = rng.randrange(3)
    boxes = cover(refused, column)
    for signature in every:
        main = main_dtype(signature, column)
        assert any(includes(box, main, signature) for box in boxes) == (signature in refused)


def test_a_file_is_read_as_it_is_described() -> None:
    read = KernelTable(
        "# text\nfact x yes\nfact y no\nset s1 = bool uint8 int8\naten::mm 0e=1,2 s1:  = *; IndexError float32:  = !\n"
    )
    assert read.facts == {"x": True, "y": False}
    row = read.row("aten::mm")
    assert row is not None
    assert row[:3] == (0, (1, 2), True)
    boxes = row.boxes
    assert [error for error, _ in boxes] == ["", "IndexError"]
    assert includes(boxes[0][1], torch.bool, (torch.bool, torch.float64))
    assert not includes(boxes[1][1], torch.float32, (torch.float32, torch.float32))
    assert includes(boxes[1][1], torch.float32, (torch.float32, torch.float64))
    assert read.row("aten::add") is None
