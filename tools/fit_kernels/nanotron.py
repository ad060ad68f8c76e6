"""What nanotron's scaling benchmarks do beside the layers, as far as their program and their table show it.

    describe(row)        the extras of a row's layout
    CONSTANTS            seconds that were fitted on every other group of the table (`layouts.py --fit`)

All of it is a property of these runs, not of the hardware. From the published program (huggingface/nanotron, commit
67c5ebb6 and its scripts):

checks    `TORCH_DISTRIBUTED_DEBUG=DETAIL` was set for some runs: before each collective, the host then waits until all ranks
          of its group have come, one after the other, over TCP
sleeps    the first version of its pipelines polls for each message in steps of 0.1 s. They were run again with a later
          one, but not all
ZeRO-1    gradients are reduced as a whole after the last pass; parameters are gathered and copied part by part. Without
          ZeRO, DDP reduces buckets of 25 MiB beside the last backward pass

Which runs had checks or sleeps is not published. The table shows it for whole classes of layouts, by which they are
predicted here; single rows differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tools.fit_kernels.parts import PER_NODE, Extras

POLL = 0.1
BUCKET = 25 << 20
SAMPLES = 256
"""Of a step, in the runs of the main campaign."""
MOST_CARDS, MANY_CARDS = 512, 256
FEW_RANKS, MANY_RANKS = 2, 32
SMALLEST = "1B"


@dataclass(frozen=True)
class Constants:
    check: float = 2.1e-4
    check_far: float = 2.8e-4
    round: float = 5e-5
    """EFA passes on some 20,000 messages in a second for each pair of cards."""
    copy: float = 1e-5
    message: float = 9e-4
    """Two small messages describe each tensor, and the host waits for each of them."""
    step: float = 0.024


CONSTANTS = Constants()


def describe(row: dict[str, Any], constants: Constants = CONSTANTS) -> Extras:
    has_checks = was_checked(row)
    return Extras(
        check=constants.check if has_checks else 0.0,
        check_far=constants.check_far if has_checks else 0.0,
        round=constants.round,
        bucket=BUCKET,
        copy=constants.copy,
        message=constants.message,
        sleep=POLL,
        does_sleep=was_first_version(row),
        step=constants.step + (row["gpus"] * constants.check_far if has_checks else 0.0),
    )


def was_checked(row: dict[str, Any]) -> bool:
    """All pipelines over several nodes, which were run again; runs with other batches; on 512 cards, what had failed before:
    all but tensor parallelism over 32 ranks."""
    if row["gpus"] <= PER_NODE:
        return False
    if row["pp"] > 1 or row["dp"] * row["mbs"] * row["grad_acc"] != SAMPLES:
        return True
    return bool(row["gpus"] >= MOST_CARDS and row["tp"] <= 2 * PER_NODE)


def was_first_version(row: dict[str, Any]) -> bool:
    """No pipeline on 512 cards was run again. On fewer, the script's comment says "0 if dp>=32" of ZeRO: others were not
    repeated. On 256 cards, ZeRO-1 with many ranks was not, nor were micro-batches of a larger model."""
    if row["pp"] == 1 or row["gpus"] <= PER_NODE:
        return False
    if row["gpus"] >= MOST_CARDS:
        return True
    if row["zero"] == 0:
        return bool(FEW_RANKS < row["dp"] < MANY_RANKS)
    was_left_out = row["dp"] >= MANY_RANKS or (row["model"] != SMALLEST and row["mbs"] > 1)
    return bool(row["gpus"] >= MANY_CARDS and was_left_out)
