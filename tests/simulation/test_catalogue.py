"""The catalogue of cards: names, figures with sources, files of one's own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from understudy.simulation.catalogue import (
    Card,
    CatalogueError,
    GiB,
    UnknownDeviceError,
    find_card,
    list_cards,
    parse_devices,
    read_cards,
    read_software,
)
from understudy.spec.device_facts import DeviceFacts

CARDS = [card for card in list_cards() if card.kind != "cpu"]
FIGURES = (
    "memory",
    "context",
    "capability",
    "multiprocessors",
    "threads_per_multiprocessor",
    "bandwidth",
    "interconnect",
    "nccl",
)


def test_the_cards_that_the_documentation_promises() -> None:
    keys = "a100-40 a100-80 h100 h200 b200 l4 l40s rtx3090 rtx4090 rtx5090 mi300x t4 v100-16 v100-32 cpu"
    assert [card.key for card in list_cards()] == keys.split()


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.key)
def test_each_figure_has_a_source(card: Card) -> None:
    given = {name for name in FIGURES if getattr(card, name) is not None} | {"teraflops"}
    assert set(card.sources) == given
    assert all(len(source) > 8 for source in card.sources.values())


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("h100", "h100"), ("H100-80GB", "h100"), ("NVIDIA H100 80GB HBM3", "h100"), ("H100 SXM", "h100"),
        ("RTX 4090", "rtx4090"), ("4090", "rtx4090"), ("GeForce RTX 3090", "rtx3090"), ("rtx-5090", "rtx5090"),
        ("a100-80g", "a100-80"), ("A100 40 GB", "a100-40"), ("NVIDIA A100-SXM4-80GB", "a100-80"), ("Tesla T4", "t4"),
        ("v100-32gb", "v100-32"), ("AMD Instinct MI300X", "mi300x"), ("L40S", "l40s"), ("cpu", "cpu"),
    ],
)  # fmt: skip
def test_names_are_matched_kindly(name: str, key: str) -> None:
    assert find_card(name).key == key


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h10", "unknown device 'h10': did you mean h100"),
        ("a100", "unknown device 'a100': did you mean a100-40 or a100-80"),
        ("rtx 4900", "unknown device 'rtx 4900': did you mean rtx4090"),
        ("mi300", "did you mean mi300x"),
        ("zzz", "unknown device 'zzz': see `understudy devices`"),
        ("", "unknown device ''"),
    ],
)
def test_near_misses_are_suggested(name: str, message: str) -> None:
    with pytest.raises(UnknownDeviceError) as caught:
        find_card(name)
    assert message in str(caught.value)


@pytest.mark.parametrize(("text", "count"), [("h100", 1), ("8xh100", 8), ("2 x H100 80GB", 2), ("4×h100", 4)])
def test_several_of_a_card(text: str, count: int) -> None:
    assert parse_devices(text) == (find_card("h100"), count)


def test_no_devices_are_refused() -> None:
    with pytest.raises(UnknownDeviceError):
        parse_devices("0xh100")


def test_memory_is_what_the_driver_reports() -> None:
    h100 = find_card("h100")
    assert h100.memory == round(79.11 * GiB)
    assert h100.usable == h100.memory - h100.outside == round(79.11 * GiB) - round(0.67 * GiB)
    assert str(h100) == "h100 (NVIDIA H100 80GB HBM3, 79.11 GiB)"
    assert find_card("v100-32").context is None
    assert find_card("v100-32").outside == GiB // 2


def test_figures_are_in_plain_units() -> None:
    h100 = find_card("h100")
    assert h100.bandwidth == 3.35e12
    assert h100.throughput["bfloat16"] == pytest.approx(989.4e12)
    assert h100.capability == (9, 0)
    assert "bfloat16" not in find_card("t4").throughput  # it has none
    assert find_card("b200").throughput["float32"] == 75e12


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.key)
def test_figures_are_plausible(card: Card) -> None:
    assert 0 < card.usable < card.memory < 300 * GiB
    assert card.bandwidth is not None and 1e11 < card.bandwidth < 1e13
    assert card.throughput["float16"] >= 1.98 * card.throughput.get("float32", 0)
    assert card.capability is not None and card.capability >= (7, 0)


def test_the_cpu_is_this_machine() -> None:
    cpu = find_card("cpu")
    assert cpu.memory > 1 << 28
    assert cpu.outside == 0
    assert cpu.facts() == DeviceFacts("cpu")


def test_facts_are_what_answers_depend_on() -> None:
    facts = find_card("h100").facts()
    assert facts == DeviceFacts("cuda", (9, 0), 132, 2048, "13.0", 92000)
    assert hash(facts) == hash(find_card("H100-80GB").facts())
    assert facts != find_card("t4").facts()
    assert str(facts) == "cuda 9.0, 132 multiprocessors, CUDA 13.0, cuDNN 9.20.0"
    assert str(DeviceFacts("cpu")) == "cpu"
    assert read_software().driver == "580.65.06"


# files of one's own


def write(path: Path, text: str) -> Path:
    file = path / "cards.toml"
    file.write_text(text)
    return file


def test_a_card_of_ones_own_comes_first(tmp_path: Path) -> None:
    file = write(
        tmp_path, '[h100]\nname = "Half an H100"\nmemory = 40\ncapability = "9.0"\n\n[mine]\nmemory = 10.5\n'
    )
    half, mine = read_cards(file)
    assert find_card("H100", more=(half, mine)) is half
    assert mine.memory == 21 * GiB // 2
    assert mine.kind == "cuda"
    assert mine.bandwidth is None
    assert parse_devices("2xmine", more=(mine,)) == (mine, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[mine]\nmemroy = 3", "[mine]: unknown field 'memroy': did you mean 'memory'?"),
        ("[mine]\nname = 'x'", "[mine]: memory, in GiB, is missing"),
        ("[mine]\nmemory = 'much'", "[mine]: memory: invalid value 'much'"),
        ("[mine]\nmemory = 1\ncapability = 'nine'", "[mine]: expected capability as in \"9.0\", got 'nine'"),
        ("[mine]\nmemory = 1\nkind = 'tpu'", "[mine]: expected kind to be one of cuda, rocm, cpu, got 'tpu'"),
        ("mine = 3", "[mine]: expected a table of figures for each card"),
        ("[mine", "cards.toml: invalid TOML"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(CatalogueError) as caught:
        read_cards(write(tmp_path, text))
    assert message in str(caught.value)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(CatalogueError, match=r"no_such\.toml: No such file"):
        read_cards("no_such.toml")


@pytest.mark.parametrize("text", ["8x", " 2 x ", "", "0xh100", "9999xh100"])
def test_a_number_without_a_card_is_named_whole(text: str) -> None:
    with pytest.raises(
        UnknownDeviceError, match=re.escape(f"unknown device {text!r}: see `understudy devices`")
    ):
        parse_devices(text)
