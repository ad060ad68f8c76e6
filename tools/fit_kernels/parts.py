"""Steps of whole tables from rehearsals of small parts.

    parts = PartStore(path)
    parts.find(shape)            seconds and bytes of one layer, and of what is beside the layers, in one pass
    compose(shape, parts)        seconds of a step, and the bytes of each stage

All layers of a decoder are alike, and so are all passes of a step. Three rehearsals with one or two layers and one or three
passes therefore say what a layer takes, and what embeddings and head take, for all numbers of layers, stages, passes and
data parallel ranks. What is added by hand is what the rehearsal of a whole layout finds by itself: stages that wait for
each other, and gradients that go between data parallel ranks beside the backward pass.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import hypot
from pathlib import Path
from typing import Any

import understudy
from examples.decoder import MOST_TIED, SIZES, parse_options, split_layers
from examples.decoder import main as train
from tools.fit_kernels.generations import attention_of
from understudy.cluster.layout import Interconnect
from understudy.report.runs import RehearsalOptions
from understudy.simulation.catalogue import find_card
from understudy.timing.collectives import find_network, group_seconds, usual_network

PER_NODE = 8
STATE = 12
"""Bytes of a parameter in float32 with the two moments of AdamW."""
COPIES = 8
"""Bytes of a parameter in bfloat16, with its gradient in float32 and in the bucket in which DDP reduces it."""


@dataclass(frozen=True)
class Cost:
    """Of one pass on one rank; `host`: seconds in which it is issued; `card`: of its kernels and collectives, whether or not
    the card waits for the host between them."""

    forward: float
    backward: float
    host: float
    card: float
    bytes: float

    @property
    def seconds(self) -> float:
        return self.forward + self.backward

    def minus(self, other: Cost, times: float = 1.0) -> Cost:
        return Cost(
            *(
                one - times * two
                for one, two in zip(asdict(self).values(), asdict(other).values(), strict=True)
            )
        )

    def over(self, count: float) -> Cost:
        return Cost(*(value / count for value in asdict(self).values()))


@dataclass(frozen=True)
class Part:
    """`layer`: of each layer; `ends`: of embeddings, head and loss together."""

    layer: Cost
    ends: Cost


@dataclass
class PartStore:
    """Rehearsals of parts, kept in a file as they are made."""

    path: Path | None = None

    def __post_init__(self) -> None:
        self.known: dict[str, Any] = {}
        self.found: dict[Any, Part] = {}
        if self.path is not None and self.path.exists():
            self.known = json.loads(self.path.read_text())

    def find(self, shape: Shape) -> Part:
        key = replace(shape, dp=1, passes=1, zero=0, extras=Extras())
        if key not in self.found:
            self.found[key] = self._compute(shape)
        return self.found[key]

    def _compute(self, shape: Shape) -> Part:
        low, high = shape.batches
        one, two = (self._find(replace(shape, batch=batch)) for batch in (low, high))
        if shape.batch in (low, high):
            return one if shape.batch == low else two
        share = (shape.batch - low) / (high - low)
        return Part(_mix(one.layer, two.layer, share), _mix(one.ends, two.ends, share))

    def _find(self, shape: Shape) -> Part:
        long, short, thin = (self._rehearse(shape, *sizes) for sizes in ((2, 3), (2, 1), (1, 3)))
        both = long.minus(short).over(2)  # a pass through two layers and the ends
        per_step = short.minus(both)  # beside passes, once in a step
        own_layer, table = count_parameters(shape)
        layers = 2 + (1 if is_tied(shape) else 2) * table / own_layer
        layer = long.minus(thin).minus(per_step.over(layers)).over(3)
        layer = replace(layer, bytes=long.bytes - thin.bytes)
        ends = both.minus(layer, 2)
        return Part(layer, replace(ends, bytes=long.bytes - 2 * layer.bytes))

    def _rehearse(self, shape: Shape, layers: int, passes: int) -> Cost:
        sizes = "x".join(map(str, SIZES[shape.size][1:]))
        facts = (
            shape.device,
            sizes,
            *shape.words,
            shape.batch,
            shape.tp,
            shape.host,
            f"{shape.latency:g}",
            layers,
            passes,
        )
        key = " ".join(map(str, (*facts, shape.attention) if shape.attention else facts))
        if key not in self.known:
            self.known[key] = asdict(_rehearse(shape, layers, passes))
            if self.path is not None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.path.write_text(json.dumps(self.known))
        return Cost(**self.known[key])


def _mix(one: Cost, two: Cost, share: float) -> Cost:
    """Between two batches, or beyond. A card that waits for the host has the time of its kernels to spare."""
    line = one.minus(one, share).minus(two, -share)
    own = min(one.seconds, one.card) * (1 - share) + two.seconds * share
    scale = max(own, one.host) / line.seconds if line.seconds > 0 else 1.0
    return replace(line, forward=line.forward * scale, backward=line.backward * scale)


def _rehearse(shape: Shape, layers: int, passes: int) -> Cost:
    """Of a whole step."""
    dp = 2 if shape.tp == 1 else 1  # a program of one rank does without FSDP
    name = f"{shape.size} of {layers}"
    SIZES[name] = (layers, *SIZES[shape.size][1:])
    options = parse_options(
        ["--size", name, *shape.words, "--batch", str(shape.batch), "--tp", str(shape.tp), "--dp", str(dp),
         "--zero", "0", "--accumulate", str(passes)]
    )  # fmt: skip
    with attention_of(shape.attention):
        cluster = understudy.rehearse_cluster(
            lambda: train(options), device=f"{min(PER_NODE, dp * shape.tp)}x{shape.device}",
            nodes=-(-shape.tp // PER_NODE), ranks="0", jobs=1, is_quiet=True,
            rehearsal=RehearsalOptions(host=shape.host), interconnect=Interconnect(latency=shape.latency),
        )  # fmt: skip
    rehearsal = next(row.rehearsal for row in cluster.rows if row.rehearsal)
    time, categories = rehearsal.time, rehearsal.categories
    if time is None:
        raise SystemExit(f"{name}, {shape}: {cluster.headline}")
    static = sum(categories.get(kind, 0) for kind in ("parameters", "gradients", "optimizer_state"))
    return Cost(
        time.phases["forward"], time.phases["backward"], time.host_seconds, time.card_seconds,
        rehearsal.peak.allocated_bytes - static,
    )  # fmt: skip


def count_parameters(shape: Shape) -> tuple[float, float]:
    """Of a layer and of the embeddings, on one rank."""
    _, width, _, *inner = SIZES[shape.size]
    mlp = 3 * inner[0] if inner else 8 * width
    vocabulary = parse_options(["--size", shape.size, *shape.words]).vocabulary
    return width * (4 * width + mlp) / shape.tp, vocabulary * width / shape.tp


def is_tied(shape: Shape) -> bool:
    inner = SIZES[shape.size][3:]
    return shape.pp == 1 and (not inner or inner[0] < MOST_TIED)


@dataclass(frozen=True)
class Extras:
    """What a program and its network do beside the layers: seconds, unless another unit is stated."""

    check: float = 0.0
    """Of the host, before each collective, for each of its ranks."""
    check_far: float = 0.0
    """The same, if they are on several nodes."""
    round: float = 0.0
    """Of the network: the least time of a collective of tensor parallelism over several nodes, for each of its ranks."""
    bucket: float = 0.0
    """Bytes of parameters whose gradients are reduced at once; 0: those of a layer."""
    copy: float = 0.0
    """Of the host, for each rank's part of each parameter that ZeRO-1 gathers one after the other. Gradients are then
    reduced as a whole, beside nothing."""
    message: float = 0.0
    """Of a pass, for each boundary of two stages, beside the data."""
    sleep: float = 0.0
    """Of a loop that waits for a message to have come."""
    does_sleep: bool = False
    step: float = 0.0
    """Once in a step."""


@dataclass(frozen=True)
class Shape:
    """A layout of one program. `size`: of the example; `words`: its other options."""

    device: str
    size: str
    words: tuple[str, ...]
    batch: int
    dp: int
    tp: int
    pp: int
    passes: int
    zero: int
    host: str
    latency: float = 0.0
    batches: tuple[int, int] = (1, 8)
    """That are rehearsed. Costs of others lie on the line through both, or are those of the host."""
    extras: Extras = Extras()
    attention: str = ""
    """The kernels of its time (`generations.py`), if they were not today's."""


@dataclass(frozen=True)
class Own:
    """What one rank of a stage has."""

    layers: int
    parameters: float
    seconds: float
    """Of a pass, without messages."""


@dataclass(frozen=True)
class Composed:
    seconds: float
    stage_bytes: list[float]
    """Allocated, by stage."""
    sleep: float
    """Seconds that the step has, or would have, if stages sleep between messages."""
    does_sleep: bool

    @property
    def awake_seconds(self) -> float:
        return self.seconds - self.sleep if self.does_sleep else self.seconds


COLLECTIVES = 10
"""Of tensor parallelism, in a layer's forward and backward pass: inputs are gathered again in the backward pass."""
SLEEPS_OF_BOUNDARY, SLEEPS_OF_STAGE = 6, 10
"""Two for each of three tensors: outputs, their mask and the gradient. Of a stage with two boundaries, two of twelve fall
together."""
TENSORS = 6
"""Parameters of a layer."""


def compose(shape: Shape, store: PartStore) -> Composed:
    part = store.find(shape)
    options = parse_options(["--size", shape.size, *shape.words])
    card, width, extras = find_card(shape.device), SIZES[shape.size][1], shape.extras
    assert card.bandwidth is not None
    tokens = shape.batch * options.context
    stages = list_stages(shape, part, split_layers(options, shape.pp), 2 * tokens * width)
    passes = [stage.seconds for stage in stages]
    seconds = (shape.passes - 1) * max(passes) + sum(passes) + extras.step
    sleep = 0.0
    if shape.pp > 1:
        step = shape.dp * shape.tp
        hidden = 2 * tokens * width / shape.tp
        message = group_seconds("send", (0, step), hidden, card, PER_NODE, latency=shape.latency)
        seconds += (shape.passes + shape.pp - 1) * (2 * message + extras.message)
        busiest = SLEEPS_OF_STAGE if shape.pp > 2 else SLEEPS_OF_BOUNDARY
        sleep = extras.sleep * ((shape.passes - 1) * busiest + shape.pp * SLEEPS_OF_BOUNDARY)
    largest = max(stages, key=lambda stage: stage.parameters)
    if shape.dp > 1:
        seconds += reduce_seconds(shape, largest, part)
    shares = shape.dp if shape.zero else 1
    seconds += largest.parameters * (28 / shares + 8) / card.bandwidth
    stage_bytes = []
    for number, stage in enumerate(stages):
        flying = min(shape.pp - number, shape.passes)
        found = stage.parameters * (COPIES + STATE / shares) + flying * stage.layers * part.layer.bytes
        stage_bytes.append(found + (part.ends.bytes if number == shape.pp - 1 else 0.0))
    return Composed(seconds + (sleep if extras.does_sleep else 0.0), stage_bytes, sleep, extras.does_sleep)


def list_stages(shape: Shape, part: Part, counts: Sequence[int], hidden: float) -> list[Own]:
    """`hidden`: bytes of what goes between layers, on all ranks of a tensor parallel group."""
    layer, ends = part.layer, part.ends
    extra_host = extra_card = 0.0
    if shape.tp > 1:
        extra_host = COLLECTIVES * check_seconds(shape, shape.tp, shape.tp > PER_NODE)
    if shape.tp > PER_NODE and shape.extras.round:
        card = find_card(shape.device)
        moved = hidden * (shape.tp - 1) / shape.tp / (PER_NODE * find_network(usual_network(card)).bandwidth)
        extra_card = COLLECTIVES * (hypot(moved, shape.extras.round * shape.tp) - moved)
    own, table = count_parameters(shape)
    card_seconds = layer.card + extra_card if extra_card else layer.seconds
    found = []
    for number, count in enumerate(counts):
        is_last = number == shape.pp - 1
        ended = ends if is_last else ends.over(math.inf)
        # With few layers a long loss hides what the host needs for them; with many, it does not.
        seconds = max(count * card_seconds + ended.seconds, count * (layer.host + extra_host) + ended.host)
        tables = (number == 0) + (is_last and not is_tied(shape))
        found.append(Own(count, count * own + tables * table, seconds))
    return found


def check_seconds(shape: Shape, ranks: int, is_far: bool) -> float:
    return ranks * (shape.extras.check_far if is_far else shape.extras.check)


def reduce_seconds(shape: Shape, stage: Own, part: Part) -> float:
    """Of gradients and, with ZeRO, parameters that go between data parallel ranks, as far as nothing hides them."""
    card, extras = find_card(shape.device), shape.extras
    ranks = range(0, shape.dp * shape.tp, shape.tp)
    is_far = shape.dp * shape.tp > PER_NODE

    def seconds_of(kind: str, nbytes: float, blocks: int) -> float:
        return blocks * group_seconds(kind, ranks, nbytes / blocks, card, PER_NODE, latency=shape.latency)

    blocks = stage.layers + 1
    gathered = 0.0
    if shape.zero:
        blocks_of_step = 1 if extras.copy else blocks
        gathered = seconds_of("all_gather", 2 * stage.parameters, blocks_of_step)
        gathered += shape.dp * extras.copy * TENSORS * stage.layers
    if shape.zero and extras.copy:
        return gathered + seconds_of("all_reduce", 4 * stage.parameters, 1)
    if extras.bucket:  # a parameter is never split
        blocks = min(math.ceil(2 * stage.parameters / extras.bucket), TENSORS * stage.layers + 1)
    reduced = seconds_of("reduce_scatter" if shape.zero else "all_reduce", 4 * stage.parameters, blocks)
    share = part.layer.backward / part.layer.seconds
    # Buckets are reduced in the backward pass of the last micro-batch, layers after it where there is a pipeline.
    beside = stage.seconds * share if shape.pp == 1 or extras.bucket else 0.0
    checked = blocks * check_seconds(shape, shape.dp, is_far)
    return max(reduced + checked - beside, checked, reduced / blocks) + gathered
