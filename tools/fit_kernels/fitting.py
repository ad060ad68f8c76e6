"""Parameters of the curves from the times of steps.

Each row is the sequence of kernels of its program. A prediction is that of the timeline with one stream: the host issues
kernels, the card runs them in order. Parameters are found by least squares on the logarithm of prediction over truth, with
a prior for each: what the rows do not determine stays where it was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import least_squares

from tools.fit_kernels.generations import CHIP_OF, SPEEDS, TRITON
from tools.fit_kernels.streams import read_stream, restore
from understudy.ops.traits import kernel_families as families
from understudy.ops.traits.kernel_families import Kernel, describe_kernels
from understudy.simulation.catalogue import find_card
from understudy.timing.curves import Tiles, find_curve
from understudy.timing.kernels import PLAIN_MATMUL, SHARPNESS, ideal_seconds, name_family, name_variants

COMPUTING = {
    families.MATMUL: (1.0, 0.02), PLAIN_MATMUL: (1.0, 0.1), families.CONVOLUTION: (0.9, 0.3),
    families.GROUPED: (0.5, 0.5), families.DEPTHWISE: (0.3, 0.5), families.ATTENTION: (0.56, 0.05),
    families.ATTENTION_BACKWARD: (0.47, 0.03),
}  # fmt: skip
"""Starting point and spread of the part of the peak. The backward pass of attention is that of published kernels: 0.8 to
0.87 of the forward pass in flash-attention 2 and 3. No row here has today's."""
FAMILIES = (
    *COMPUTING, families.ELEMENTWISE, families.REDUCTION, families.NORM, families.BATCH_NORM, families.SOFTMAX,
    families.POOL, families.INDEX, families.COPY, families.TRANSPOSE, families.FILL, families.OPTIMIZER,
)  # fmt: skip
VARIANTS = (
    "convolution.channels_first", "grouped_convolution.channels_first", "depthwise.channels_first",
    "convolution.weight_gradient", "grouped_convolution.weight_gradient", "depthwise.weight_gradient",
    "convolution.input_gradient", "grouped_convolution.input_gradient", "depthwise.input_gradient",
    "norm.channels_last", "pool.channels_last", "batch_norm.channels_last", "attention.narrow", "attention_backward.narrow",
)  # fmt: skip
PASSES = VARIANTS[:3]
LAUNCHES = {"kernel": 7e-6, "view": 2.5e-6, "backward": 0.7, "optimizer": 1.0}
HOSTS = {"desktop": 1.0, "server": 1.2, "cloud": 2.2}
HOST_OF = {"a100-40": "cloud", "a100-80": "server", "b200": "server", "h100": "server"}
CARD_SPREAD = 0.12
OLD_SOURCE = "llm-foundry"
OLD = {chip: SPEEDS[TRITON][chip] for chip in ("a100", "h100")}
"""Attention of older rows, relative to today's, where the fit starts."""
ATTENTION = (families.ATTENTION, families.ATTENTION_BACKWARD)
TOLERANCE = 0.08
"""Spread of a row that the model can't explain."""


@dataclass
class Row:
    """One published step time, as arrays for the fit."""

    facts: dict[str, Any]
    card: str
    seconds: float
    family: np.ndarray
    compute: np.ndarray
    memory: np.ndarray
    variants: np.ndarray
    """Two columns: indices into the factors of variants; the last one is none."""
    passes: np.ndarray
    order: np.ndarray
    """Of kernels, in which they run."""
    families: frozenset[int]
    calls: np.ndarray
    """For each of these, calls of the host until then: forward views and kernels, backward, optimizer."""


class Parameters:
    """Names, starting points, spreads; logarithms everywhere."""

    def __init__(self, cards: Sequence[str], attention: Mapping[str, float] | None = None) -> None:
        """`attention`: the speed of attention by card, where its kernels were measured."""
        self.names: list[str] = []
        start: list[float] = []
        spread: list[float] = []

        def add(name: str, value: float, width: float) -> None:
            self.names.append(name)
            start.append(np.log(value))
            spread.append(width)

        for name, (value, width) in COMPUTING.items():
            add(f"compute.{name}", value, width)
        for name in FAMILIES:
            add(f"memory.{name}", 0.8, 0.1)
        for name in VARIANTS:
            add(f"factors.{name}", 0.82 if "narrow" in name else 0.9, 0.05 if "narrow" in name else 0.4)
        for name in PASSES:
            add(f"passes.{name}", 0.4, 1.0)
        add("fixed", 2e-6, 0.4)
        for name, value in LAUNCHES.items():
            add(f"launches.{name}", value, 0.4)
        for name, value in HOSTS.items():
            add(f"hosts.{name}", value, 0.5)
        for chip, speeds in OLD.items():
            for name, value in zip(ATTENTION, speeds, strict=True):
                add(f"old.{chip}.{name}", value, 0.4)
        for card in cards:
            for name in FAMILIES:
                if name in ATTENTION and card in (attention or {}):
                    add(f"speed.{card}.{name}", attention[card], 0.02)
                else:
                    add(f"speed.{card}.{name}", 1.0, CARD_SPREAD * (2 if name in COMPUTING else 1))
        self.start, self.spread = np.array(start), np.array(spread)
        self._blocks: dict[str, np.ndarray] = {}
        self.index = {name: position for position, name in enumerate(self.names)}

    def block(self, prefix: str, names: Iterable[str]) -> np.ndarray:
        if prefix not in self._blocks:
            self._blocks[prefix] = np.array([self.index[f"{prefix}.{name}"] for name in names])
        return self._blocks[prefix]

    def may_move(self, name: str, row: Row) -> bool:
        """Whether the time of a row depends on a parameter."""
        title, _, rest = name.partition(".")
        if title == "speed":
            card, _, family = rest.partition(".")
            return card == row.card and FAMILIES.index(family) in row.families
        if title == "old":
            chip, _, family = rest.partition(".")
            return is_old(row) and CHIP_OF[row.card] == chip and FAMILIES.index(family) in row.families
        if title in ("compute", "memory"):
            return FAMILIES.index(rest) in row.families
        return title != "factors" or bool((row.variants == VARIANTS.index(rest)).any())


def make_row(facts: dict[str, Any], folder: Path, tiles: dict[str, Tiles]) -> Row:
    """`tiles`: by card, where products were measured on it."""
    stream = read_stream(facts, folder)
    curve = find_curve(find_card(facts["card"]))
    curve = replace(curve, tiles=tiles.get(facts["card"], curve.tiles))
    kernels: list[Kernel] = []
    positions: list[tuple[int, int]] = []
    for stored in stream.calls:
        found = describe_kernels(*restore(stored))
        positions.append((len(kernels), len(found)))
        kernels += found
    is_vision = "image" in facts
    torch.backends.cuda.matmul.allow_tf32 = is_vision
    present = frozenset(_family_index(name_family(kernel)) for kernel in kernels)
    order, calls = order_kernels(select_moments(facts, stream.moments), positions)
    unknown = len(VARIANTS)

    def find_variants(kernel: Kernel) -> list[int]:
        found = [VARIANTS.index(name) for name in name_variants(kernel) if name in VARIANTS]
        return (found + [unknown, unknown])[:2]

    def find_pass(kernel: Kernel) -> int:
        return next((PASSES.index(name) for name in name_variants(kernel) if name in PASSES), len(PASSES))

    return Row(
        facts,
        facts["card"],
        facts["seconds"],
        np.array([_family_index(name_family(kernel)) for kernel in kernels]),
        np.array([ideal_seconds(kernel, curve) if kernel.flops else 0.0 for kernel in kernels]),
        np.array([kernel.bytes / curve.bandwidth for kernel in kernels]),
        np.array([find_variants(kernel) for kernel in kernels]),
        np.array([find_pass(kernel) for kernel in kernels]),
        order,
        present,
        calls,
    )


def _family_index(name: str) -> int:
    return FAMILIES.index(name) if name in FAMILIES else FAMILIES.index(families.ELEMENTWISE)


def select_moments(facts: dict[str, Any], moments: list[Any]) -> list[Any]:
    """What was measured: the second step or pass."""
    phase = facts.get("phase")
    if facts["kind"] == "inference" or phase in ("fwd+bwd", "bwd"):
        chosen = [moment for moment in moments if moment[1] == 2]
    else:
        chosen = [moment for moment in moments if moment[0] == 1]
    only = {"bwd": "backward", "opt": "optimizer"}.get(str(phase))
    return [moment for moment in chosen if only is None or moment[2] == only]


def order_kernels(moments: list[Any], positions: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    order: list[int] = []
    calls: list[np.ndarray] = []
    count = np.zeros(6)
    for *_, phase, indices in moments:
        column = {"backward": 2, "optimizer": 4}.get(phase, 0)
        for index in indices:
            first, number = positions[index]
            count[column + (number > 0)] += 1
            for position in range(first, first + number):
                order.append(position)
                calls.append(count.copy())
    return np.array(order), np.array(calls)


def is_old(row: Row) -> bool:
    return bool(row.facts["source"] == OLD_SOURCE)


def predict(x: np.ndarray, parameters: Parameters, row: Row, is_known: bool = True) -> float:
    """Seconds of a row. `is_known` is False for a card that is left out: it has no speed of its own."""
    e = np.exp(x)
    compute = np.ones(len(FAMILIES))
    compute[: len(COMPUTING)] = e[parameters.block("compute", COMPUTING)]
    memory = e[parameters.block("memory", FAMILIES)]
    factors = np.append(e[parameters.block("factors", VARIANTS)], 1.0)
    passes = np.append(e[parameters.block("passes", PASSES)], 0.0)
    factor = factors[row.variants[:, 0]] * factors[row.variants[:, 1]]
    computing = row.compute / compute[row.family] / factor
    moving = row.memory / memory[row.family] / factor
    seconds = (computing**SHARPNESS + moving**SHARPNESS) ** (1 / SHARPNESS) + passes[row.passes] * row.memory
    if is_known:
        seconds = seconds / e[parameters.block(f"speed.{row.card}", FAMILIES)][row.family]
    if is_old(row):
        old = np.ones(len(FAMILIES))
        chip = CHIP_OF[row.card]
        old[[FAMILIES.index(name) for name in ATTENTION]] = e[parameters.block(f"old.{chip}", ATTENTION)]
        seconds = seconds / old[row.family]
    seconds = (seconds + e[parameters.index["fixed"]])[row.order]
    kernel, view, backward, optimizer = e[parameters.block("launches", LAUNCHES)]
    slowness = e[parameters.index[f"hosts.{HOST_OF.get(row.card, 'desktop')}"]]
    costs = np.array([view, kernel, view * backward, kernel * backward, view * optimizer, kernel * optimizer])
    issued = row.calls @ costs * slowness
    rest = seconds[::-1].cumsum()[::-1]
    return float(np.max(issued + rest))


def fit(rows: Sequence[Row], parameters: Parameters, most: int = 10) -> np.ndarray:
    def residuals(x: np.ndarray) -> np.ndarray:
        misses = [np.log(predict(x, parameters, row) / row.seconds) / TOLERANCE for row in rows]
        return np.concatenate([misses, (x - parameters.start) / parameters.spread])

    cards = {row.card for row in rows}
    free = [
        i
        for i, name in enumerate(parameters.names)
        if not name.startswith("speed.") or name.split(".")[1] in cards
    ]

    def jacobian(x: np.ndarray) -> np.ndarray:
        """A parameter of a card moves the rows of that card only."""
        base = residuals(x)
        found = np.zeros((len(base), len(x)))
        for i in free:
            moved = x.copy()
            moved[i] += 1e-3
            name = parameters.names[i]
            for j, row in enumerate(rows):
                if parameters.may_move(name, row):
                    found[j, i] = (
                        np.log(predict(moved, parameters, row) / row.seconds) / TOLERANCE - base[j]
                    ) / 1e-3
        for i, spread in enumerate(parameters.spread):
            found[len(rows) + i, i] = 1 / spread
        return found

    return least_squares(residuals, parameters.start, jac=jacobian, loss="soft_l1", max_nfev=most).x


def fold_of(row: Row) -> int:
    """Which half of the rows: by the program, so that a model is not in both with two releases of torch."""
    facts = row.facts
    name = repr((facts["model"], facts.get("image"), facts.get("context")))
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 2


def check_by_halves(rows: Sequence[Row], parameters: Parameters) -> list[tuple[Row, float]]:
    """Each row with its prediction by the fit of the other half."""
    found = []
    for half in (0, 1):
        x = fit([row for row in rows if fold_of(row) != half], parameters)
        found += [(row, predict(x, parameters, row)) for row in rows if fold_of(row) == half]
    return found


def check_by_cards(rows: Sequence[Row], parameters: Parameters) -> list[tuple[Row, float]]:
    """Each row with its prediction by a fit that saw no step of its card."""
    found = []
    for card in sorted({row.card for row in rows}):
        x = fit([row for row in rows if row.card != card], parameters)
        found += [(row, predict(x, parameters, row, is_known=False)) for row in rows if row.card == card]
    return found


def measure_error(
    pairs: Iterable[tuple[Row, float]], choose: Callable[[Row], bool] = lambda row: True
) -> dict[str, float]:
    errors = np.array([abs(found / row.seconds - 1) for row, found in pairs if choose(row)])
    if not len(errors):
        return {"rows": 0}
    return {"rows": len(errors), "mean": float(errors.mean()), "median": float(np.median(errors))}
