"""`examples/decoder.py`: how it spreads layers over stages, and which dtype it computes in."""

from __future__ import annotations

import pytest

import understudy
from examples.decoder import SIZES, main, parse_options, split_layers


@pytest.mark.parametrize("size", ["llama-1b", "llama-8b", "125m"])
@pytest.mark.parametrize("stages", [1, 2, 4, 8, 12])
def test_each_layer_is_in_one_stage(size: str, stages: int) -> None:
    counts = split_layers(parse_options(["--size", size, "--vocabulary", "131072"]), stages)
    assert len(counts) == stages and sum(counts) == SIZES[size][0]
    assert all(count > 0 for count in counts[:-1]) and counts[-1] >= 0


def test_the_stage_with_the_head_has_fewer_layers() -> None:
    """The head of this vocabulary has the weights of four layers: 20 in all, 5 in each stage."""
    options = ["--size", "llama-1b", "--vocabulary", "131072"]
    assert split_layers(parse_options(options), 4) == [5, 5, 5, 1]
    assert split_layers(parse_options([*options, "--even-stages"]), 4) == [4, 4, 4, 4]


def test_one_card_computes_in_bfloat16_whatever_the_layout_says() -> None:
    words = ["--size", "llama-tiny", "--context", "32", "--batch", "1", "--vocabulary", "1000"]
    plain, sharded = (
        understudy.rehearse(main, parse_options([*words, *more]), device="h100")
        for more in ([], ["--zero", "1"])
    )
    assert sharded.peak.allocated_bytes == plain.peak.allocated_bytes
