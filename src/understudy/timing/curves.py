"""The curves of kernel families on each card: `curves.toml`, in the package and as the user has corrected it.

    curve = find_curve(find_card("h100"))
    curve.compute["matmul"]          part of the published peak that large products reach
    curve.memory["elementwise"]      part of the published bandwidth
    curve.error["training"]          the interval is exp(±error) around an estimate: 90% of rows lie in it
    curve.source                     the data that it was fitted on

A card that was not measured has the curve of its architecture, else the one of all cards, and a wider interval.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from understudy.simulation.catalogue import Card, read_calibration, read_toml

CURVES_FILE = Path(__file__).with_name("curves.toml")

EVERY_FAMILY = "all"
"""In a calibration: the speed of families that have none of their own."""
LANES, CLOCK = 128, 1.7e9
"""Multiply-adds of a multiprocessor in a cycle, and its clock: float32 on a card without a published figure."""


@dataclass(frozen=True)
class Tiles:
    """How products of matrices spread over a card: a tile of the result for each multiprocessor at a time."""

    efficiency: tuple[float, ...]
    """Efficiency of each size of TILE_SIZES, relative to the peak."""
    contraction: float
    """Steps of the contraction that the beginning and the end of a tile cost."""
    wave: float
    """What the unused part of the last wave costs: 1, as much as a used one; 0, nothing."""


TILE_SIZES = ((256, 128), (128, 128), (128, 64), (64, 64), (32, 64), (128, 16))


@dataclass(frozen=True)
class Host:
    """Seconds of the host for a call: of an operator with a kernel, and of a view."""

    kernel: float
    view: float
    backward: float
    """The part of it that a call costs in a backward pass: autograd calls operators from C++."""
    optimizer: float
    bandwidth: float
    """Bytes that operators on the CPU move in a second."""
    name: str = ""


@dataclass(frozen=True)
class Curve:
    """All that the time of a kernel on a card depends on."""

    card: Card
    compute: Mapping[str, float]
    memory: Mapping[str, float]
    factors: Mapping[str, float]
    """Relative speed of variants of a family ("convolution.channels_first")."""
    passes: Mapping[str, float]
    """Further passes of such variants through the operands, in another order."""
    tiles: Tiles
    fixed: float
    """Seconds of a kernel beside its work."""
    host: Host
    error: Mapping[str, float]
    """For "training" and "inference": logarithm of the factor within which 90% of the rows lie that were not fitted."""
    source: str
    is_measured: bool
    """Whether steps on this very card were fitted."""
    speed: Mapping[str, float] = field(default_factory=dict)
    """By family: measured speed of this card, relative to the card's figures and the curve."""
    corrections: Mapping[str, float] = field(default_factory=dict)
    """By family: how much faster whole kernels are, by the user's calibration."""

    @property
    def bandwidth(self) -> float:
        assert self.card.bandwidth is not None
        return self.card.bandwidth

    def peak(self, dtype: str) -> float:
        """Operations in a second, by the published figures."""
        return find_peak(self.card, dtype)


def find_peak(card: Card, dtype: str) -> float:
    """The published peak of a dtype. A dtype that the card's units do not have is computed in float32; float32 without a
    figure is computed by the lanes of the multiprocessors, never by those of TF32."""
    figures = card.throughput
    name = "float8" if dtype.startswith("float8") else dtype
    if name in figures:
        return figures[name]
    if name in ("float64", "complex128"):
        return find_peak(card, "float32") / 32
    if "float32" in figures:
        return figures["float32"]
    return 2 * LANES * CLOCK * (card.multiprocessors or 1)


def can_estimate(card: Card | None) -> bool:
    return card is not None and bool(card.bandwidth) and bool(card.throughput) and bool(card.multiprocessors)


@cache
def read_curves() -> dict[str, Any]:
    return read_toml(CURVES_FILE)


def list_hosts() -> tuple[str, ...]:
    return tuple(read_curves()["hosts"])


def find_host(name: str) -> Host:
    table = read_curves()["hosts"][name]
    seconds = read_curves()["launches"]
    return Host(
        kernel=seconds["kernel"] * table["slowness"],
        view=seconds["view"] * table["slowness"],
        backward=seconds["backward"],
        optimizer=seconds["optimizer"],
        bandwidth=table["bandwidth"] * 1e9,
        name=name,
    )


def find_curve(card: Card, host: str | None = None) -> Curve:
    """The curve of a card, with the user's measurements of it; `host` replaces the card's usual host."""
    tables = read_curves()
    shared = tables["all"]
    architecture = tables["architecture"].get(_name_architecture(card), {})
    own = tables["cards"].get(card.key, {})
    measured = read_calibration().get(card.key, {})
    tiles = {**shared["tiles"], **architecture.get("tiles", {}), **own.get("tiles", {})}
    speed = {**architecture.get("speed", {}), **own.get("speed", {})}
    known = measured.get("speed", {})
    corrections = {
        name: known.get(name, known.get(EVERY_FAMILY, 1.0)) for name in (*shared["memory"], *known) if known
    }
    is_measured = "error" in own
    return Curve(
        card=card,
        compute=shared["compute"],
        memory=shared["memory"],
        factors=shared["factors"],
        passes=shared["passes"],
        tiles=Tiles(tuple(tiles["efficiency"]), tiles["contraction"], tiles["wave"]),
        fixed=shared["fixed"],
        host=find_host(host or own.get("host") or architecture.get("host") or shared["host"]),
        error={
            **shared["error"],
            **architecture.get("error", {}),
            **own.get("error", {}),
        },
        source=own.get("source") or architecture.get("source") or shared["source"],
        is_measured=is_measured,
        speed=speed,
        corrections=corrections,
    )


def _name_architecture(card: Card) -> str:
    return "{}.{}".format(*card.capability) if card.kind == "cuda" and card.capability else ""
