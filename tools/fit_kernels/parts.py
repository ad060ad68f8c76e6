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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import understudy
from examples.decoder import MOST_TIED, SIZES, parse_options, split_layers
from examples.decoder import main as train
from understudy.cluster.layout import Interconnect
from understudy.report.runs import RehearsalOptions
from understudy.simulation.catalogue import find_card
from understudy.timing.collectives import group_seconds

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
        if self.path is not None and self.path.exists():
            self.known = json.loads(self.path.read_text())

    def find(self, shape: Shape) -> Part:
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
        key = " ".join(map(str, facts))
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
    cluster = understudy.rehearse_cluster(
        lambda: train(options), device=f"{min(PER_NODE, dp * shape.tp)}x{shape.device}", nodes=-(-shape.tp // PER_NODE),
        ranks="0", jobs=1, is_quiet=True, rehearsal=RehearsalOptions(host=shape.host),
        interconnect=Interconnect(latency=shape.latency),
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
    check: float = 0.0
    """Seconds that the host takes for a collective beside its call, for each of its ranks."""
    batches: tuple[int, int] = (1, 8)
    """That are rehearsed. Costs of others lie on the line through both, or are those of the host."""
    bucket: float = 0.0
    """Bytes of gradients that are reduced at once; 0: those of a layer."""


@dataclass(frozen=True)
class Composed:
    seconds: float
    stage_bytes: list[float]
    """Allocated, by stage."""


COLLECTIVES = 8
"""Of tensor parallelism, in a layer's forward and backward pass."""


def compose(shape: Shape, store: PartStore) -> Composed:
    part = store.find(shape)
    options = parse_options(["--size", shape.size, *shape.words])
    counts = split_layers(options, shape.pp)
    layer, ends = part.layer, part.ends
    issuing = layer.host + (COLLECTIVES * shape.check * shape.tp if shape.tp > 1 else 0.0)
    stages, backward = [], 0.0
    for stage, count in enumerate(counts):
        ended = ends if stage == shape.pp - 1 else ends.over(math.inf)
        # With few layers a long loss hides what the host needs for them; with many, it does not.
        stages.append(max(count * layer.seconds + ended.seconds, count * issuing + ended.host))
        backward = max(backward, stages[-1] * layer.backward / layer.seconds)
    card = find_card(shape.device)
    width = SIZES[shape.size][1]
    own_layer, table = count_parameters(shape)
    parameters = [count * own_layer for count in counts]
    parameters[0] += table
    parameters[-1] += 0 if is_tied(shape) else table
    seconds = (shape.passes - 1) * max(stages) + sum(stages)
    if shape.pp > 1:
        hidden = 2 * shape.batch * options.context * width / shape.tp
        step = shape.dp * shape.tp
        message = group_seconds("send", (0, step), hidden, card, PER_NODE, latency=shape.latency)
        seconds += 2 * (shape.passes + shape.pp - 1) * message
    own = max(parameters)
    ranks = range(0, shape.dp * shape.tp, shape.tp)

    def reduce(kind: str, nbytes: float, blocks: float) -> float:
        return blocks * group_seconds(kind, ranks, nbytes / blocks, card, PER_NODE, latency=shape.latency)

    if shape.dp > 1:
        blocks = max(counts) + 1
        kind = "all_reduce" if shape.zero == 0 else "reduce_scatter"
        blocks_of_gradients = math.ceil(4 * own / shape.bucket) if shape.bucket else blocks
        reduced = reduce(kind, 4 * own, blocks_of_gradients)
        beside = backward if shape.pp == 1 else 0.0
        seconds += max(reduced - beside, reduced / blocks_of_gradients)
        if shape.zero:
            seconds += reduce("all_gather", 2 * own, blocks)
    assert card.bandwidth is not None
    shares = shape.dp if shape.zero else 1
    seconds += own * (28 / shares + 8) / card.bandwidth
    stage_bytes = []
    for stage, (count, mine) in enumerate(zip(counts, parameters, strict=True)):
        flying = min(shape.pp - stage, shape.passes)
        found = mine * (COPIES + STATE / shares) + flying * count * layer.bytes
        stage_bytes.append(found + (ends.bytes if stage == shape.pp - 1 else 0.0))
    return Composed(seconds, stage_bytes)
