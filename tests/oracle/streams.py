"""The stream of operators that a program sends to the dispatcher, written down, and compared.

A `Recorder` is an ordinary user mode: it sits above the fake mode (which has the dispatcher's slot for
fakes, below all user modes), so it sees the same level of a real run and of a fake run: after autograd
and after composite operators have been taken apart, before any kernel.
"""

from __future__ import annotations

from contextlib import nullcontext
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from tests.oracle.compare import facts_of
from tests.oracle.engines import new_mode
from tests.oracle.models import Program

# Questions to a tensor that some engines answer through the dispatcher; no part of the program.
QUESTIONS = ("prim.device.default",)

# A library's scratch space for its own backward: how large it is depends on the library's choice of algorithm.
SCRATCH = ("aten.mkldnn_rnn_layer.default", "aten.mkldnn_rnn_layer_backward.default")

# Calls that depend on the kind of object while a model is built, and not on the model.
OF_CONSTRUCTION = {
    "aten.detach.default": "nn.Parameter(data) detaches data of a subclass of Tensor, and takes plain data as it is",
    "aten.clone.default": "copy.deepcopy clones the data of a real parameter; a stand-in has none",
}

PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


class Call(NamedTuple):
    """One operator call: its name, its arguments before it ran, what it returned."""

    op: str
    inputs: str
    outputs: str

    def __str__(self) -> str:
        return f"{self.op}{self.inputs} -> {self.outputs}"


class Recorder(TorchDispatchMode):
    """Writes down each call that passes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if str(func) in QUESTIONS:
            return func(*args, **kwargs)
        hidden = torch.uint8 if str(func) in SCRATCH else None
        inputs = describe((*args, kwargs) if kwargs else args, hidden)
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            first_line = str(error).partition("\n")[0]
            self.calls.append(Call(str(func), inputs, f"raised {type(error).__name__}: {first_line}"))
            raise
        self.calls.append(Call(str(func), inputs, describe(result, hidden)))
        return result


def describe(tree: Any, hidden: torch.dtype | None = None) -> str:
    """Text for a tree of arguments or results; of tensors of the hidden dtype it says nothing."""
    return str(tree_map(lambda leaf: _described(leaf, hidden), tree))


class _Text:
    """Prints as its text, without quotes."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _described(leaf: Any, hidden: torch.dtype | None) -> _Text:
    if isinstance(leaf, torch.Tensor):
        return _Text("scratch" if leaf.dtype is hidden else str(facts_of(leaf)))
    if isinstance(leaf, PLAIN):
        return _Text(repr(leaf))
    return _Text(type(leaf).__name__)


class Streams(NamedTuple):
    """The streams of a program: until its first step, of the step."""

    preparation: list[Call]
    step: list[Call]


def streams_of(program: Program, engine: str | None = None) -> Streams:
    """The streams of a program's real run, or of its run under an engine's mode."""
    with new_mode(engine) if engine else nullcontext():
        with Recorder() as preparation:
            prepared = program.prepare()
        with Recorder() as step:
            prepared.step()
    calls = [call for call in preparation.calls if call.op not in OF_CONSTRUCTION]
    return Streams(calls, step.calls)


class Divergence(NamedTuple):
    """The first place where two streams part."""

    position: int
    real: Call | None
    fake: Call | None

    def __str__(self) -> str:
        return f"call {self.position}:\n  real {self.real}\n  fake {self.fake}"


def divergence(real: list[Call], fake: list[Call]) -> Divergence | None:
    for position, (left, right) in enumerate(zip_longest(real, fake)):
        if left != right:
            return Divergence(position, left, right)
    return None
