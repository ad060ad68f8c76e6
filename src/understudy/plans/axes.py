"""What is varied: names with values, and what a name stands for.

    parse_vary("tp=1,2,4,8")         Axis("tp", (1, 2, 4, 8), role="tp")
    parse_vary("batch=1..64")        1, 2, 4, 8, 16, 32, 64: each twice the one before, and the last
    find_role("per_device_train_batch_size")    "batch"

A role is what bounds and predictions know of an option: a name without one is varied all the same.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace

from understudy.errors import UnderstudyError

Value = bool | int | float | str

BATCH, ACCUMULATE, CONTEXT, CHECKPOINT, ZERO = "batch", "accumulate", "context", "checkpoint", "zero"
DP, TP, PP, CP = "dp", "tp", "pp", "cp"
NODES, PER_NODE = "nodes", "nproc_per_node"
OFF = (False, "none", "off", "false", "no", "0", 0)

_ROLES: dict[str, list[str]] = {
    BATCH: (
        "batch batchsize microbatch microbatchsize mbs bs trainbatchsize perdevicetrainbatchsize perdevicebatchsize "
        "devicebatchsize localbatchsize batchsizepergpu batchsizeperdevice batchsizepercard samplespergpu "
        "trainmicrobatchsizepergpu perdevicebatch"
    ).split(),
    ACCUMULATE: (
        "accumulate accumulation accumulationsteps gradientaccumulationsteps gradientaccumulation gradaccumsteps gradaccum "
        "accumulategradbatches gradaccumulationsteps batchaccum"
    ).split(),
    CONTEXT: (
        "context contextlength length seqlen seqlength sequencelength maxlength maxseqlen maxseqlength blocksize"
    ).split(),
    CHECKPOINT: (
        "checkpoint checkpointing ckpt recompute gradientcheckpointing gradckpt activationcheckpoint "
        "activationcheckpointing actckpt usecheckpoint usegradientcheckpointing enablegradientcheckpointing "
        "activationcheckpointmode"
    ).split(),
    ZERO: "zero zerostage zerooptimizationstage".split(),
    DP: "dp dpsize dataparallel dataparallelsize dpdegree dataparalleldegree".split(),
    TP: (
        "tp tpsize tensorparallel tensorparallelsize tensormodelparallelsize tpdegree tensorparalleldegree"
    ).split(),
    PP: (
        "pp ppsize pipelineparallel pipelineparallelsize pipelinemodelparallelsize ppdegree pipelineparalleldegree"
    ).split(),
    CP: "cp cpsize contextparallel contextparallelsize cpdegree contextparalleldegree".split(),
    NODES: ["nodes", "nnodes"],
    PER_NODE: ["nprocpernode"],
}
SECTIONS = (
    "training",
    "train",
    "trainer",
    "parallelism",
    "experimental",
    "model",
    "data",
    "args",
    "config",
    "cfg",
)
"""Names before a dot that say nothing more: `training.batch_size`, `trainer.accumulate_grad_batches`."""
_ROLE_OF = {name: role for role, names in _ROLES.items() for name in names}

COUNTS = (BATCH, ACCUMULATE, CONTEXT, DP, TP, PP, CP, NODES, PER_NODE)
"""Roles whose values are positive integers."""
MOST_VALUES = 4096


@dataclass(frozen=True, slots=True)
class Axis:
    """`origin`: "asked" by --vary, "found" in the script's parser, a "change" of its text, a setting of the "launcher"."""

    name: str
    values: tuple[Value, ...]
    role: str = ""
    origin: str = "asked"


def normalise(name: str) -> str:
    """The name of an option as a name in constraints: `--micro-batch-size` is micro_batch_size."""
    return name.lstrip("-").replace("-", "_").replace(".", "_")


@functools.cache
def find_role(name: str) -> str:
    """ "" if the name stands for nothing that is known."""
    whole = "".join(c for c in name.lower() if c.isalnum())
    section, _, inner = name.lower().replace(".", "_").partition("_")
    short = "".join(c for c in inner if c.isalnum()) if section in SECTIONS else whole
    return _ROLE_OF.get(whole) or _ROLE_OF.get(short, "")


def parse_vary(text: str) -> Axis:
    """`NAME`, `NAME=V,V,…` or `NAME=LOW..HIGH`; without values they are those that the script's parser shows."""
    name, equals, listed = (part.strip() for part in text.partition("="))
    if not re.fullmatch(r"-*[A-Za-z_][\w.-]*", name):
        raise UnderstudyError(f"--vary: expected NAME=V1,V2 or NAME=LOW..HIGH, got {text!r}")
    values: list[Value] = []
    parts = [part.strip() for part in listed.split(",")] if equals else []
    are_switches = all(part.lower() in _TRUTHS for part in parts)
    for part in parts:
        values += [part] if part.lower() in _TRUTHS and not are_switches else _parse_values(part, text)
    axis = Axis(normalise(name), tuple(dict.fromkeys(values)))
    if equals and not values:
        raise UnderstudyError(f"--vary {text}: expected at least one value")
    if len(values) > MOST_VALUES:
        raise UnderstudyError(f"--vary {text}: expected at most {MOST_VALUES} values, got {len(values)}")
    return check_axis(replace(axis, role=find_role(axis.name)))


def check_axis(axis: Axis) -> Axis:
    if axis.role in COUNTS:
        for value in axis.values:
            if type(value) is not int or value < 1:
                raise UnderstudyError(f"--vary {axis.name}: expected positive integers, got {value}")
    return axis


def _parse_values(part: str, text: str) -> list[Value]:
    found = re.fullmatch(r"(\d+)\.\.(\d+)", part)
    if found is not None:
        low, high = int(found[1]), int(found[2])
        if not 1 <= low <= high:
            raise UnderstudyError(f"--vary {text}: expected LOW..HIGH with 1 <= LOW <= HIGH, got {part}")
        return [*double(low, high)]
    if not part:
        raise UnderstudyError(f"--vary {text}: expected non-empty values")
    return [parse_value(part)]


def double(low: int, high: int) -> list[int]:
    """From low on, each twice the one before, and high."""
    values = []
    while low < high:
        values.append(low)
        low *= 2
    return [*values, high]


def parse_value(text: str) -> Value:
    if re.fullmatch(r"[+-]?\d+", text):
        return int(text)
    if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", text.lower()):
        return float(text)
    return _TRUTHS.get(text.lower(), text)


_TRUTHS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
"""In `--vary`, if all values of a name are among them: `no` beside `bf16` is a choice."""


def write_value(value: Value) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else f"{value}"
