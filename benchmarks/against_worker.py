"""One version of understudy, measured in a process of its own: `benchmarks.against` starts one for each version.

The process reads requests from its standard input, one line of JSON each, and answers each with a line of JSON. Only names
that are public in every version are used (`understudy.X`), so that the same programs run on both.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import transformers

import understudy
from benchmarks.models import WORKLOADS, Workload, own_loss, tokens, tokens_and_labels
from benchmarks.phases import Side, Subject
from benchmarks.symbolic_models import SMALL
from examples.llama import Llama, LlamaSize, next_token_loss

VOCABULARY = 1000
ENTRIES = 300
"""How often a mode is entered and left in one run of that phase: one entry alone is too short to be timed."""


def transformer() -> Workload:
    """12 layers of little width: stand-ins cost the same at every width, and the real weights stay small."""
    size = LlamaSize(layers=12, width=64, heads=4, kv_heads=4, hidden=128, vocabulary=VOCABULARY)
    return Workload(
        "transformer", lambda: Llama(size), lambda: {"tokens": tokens(VOCABULARY)},
        lambda logits, inputs: next_token_loss(logits, inputs["tokens"]),
    )  # fmt: skip


def gpt2() -> Workload:
    config = transformers.GPT2Config(
        n_embd=64, n_head=4, vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, use_cache=False,
        attn_implementation="eager",
    )  # fmt: skip
    inputs = tokens_and_labels(VOCABULARY)
    return Workload("gpt2", lambda: transformers.GPT2LMHeadModel(config), inputs, own_loss)


def windows() -> Workload:
    inputs = lambda: {"x": torch.randn(2, 3, 90, 122)}  # noqa: E731
    return Workload("windows", SMALL["windows"], inputs, lambda output, inputs: output.sum())


MODELS: dict[str, Callable[[], Workload]] = {
    "transformer": transformer, "gpt2": gpt2, "resnet": WORKLOADS["resnet"], "windows": windows,
}  # fmt: skip


class Program:
    """A model and all that the phases run of it. What a phase needs is made when it is first asked for."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.side = Side("understudy", understudy.FakeTensorMode)

    @cached_property
    def fake(self) -> Subject:
        subject = Subject(self.workload, self.side)
        subject.set_up()
        return subject

    @cached_property
    def real(self) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        return self.workload.build().eval(), self.workload.inputs()

    @cached_property
    def symbolic(self) -> tuple[Any, Any, dict[str, Any]]:
        """A mode with symbols, the model in it, and inputs whose batch and lengths are symbols."""
        mode = understudy.FakeTensorMode(shape_env=understudy.ShapeEnv())
        with mode:
            model = self.workload.build().eval()
        inputs = {}
        for name, real in self.workload.inputs().items():
            names = ("batch", "static", "height", "width") if real.dim() == 4 else ("batch", "seq")
            inputs[name] = mode.from_tensor(real, source=name, symbolic_context=names)
        return mode, model, inputs

    @cached_property
    def graph(self) -> Any:
        return self.capture("fake")

    def forward(self, *values: torch.Tensor) -> Any:
        model, inputs = self.real
        output = model(**dict(zip(inputs, values, strict=True)))
        return output if isinstance(output, torch.Tensor) else output.logits

    def gradients(self, *values: torch.Tensor) -> Any:
        model, inputs = self.real
        given = dict(zip(inputs, values, strict=True))
        loss = self.workload.loss(model(**given), given)
        return torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)

    def construct_on_a_device(self) -> Any:
        with understudy.FakeTensorMode(), torch.device("cuda"):
            return self.workload.build()

    def capture(self, tracing_mode: str) -> Any:
        with torch.no_grad():
            trace = understudy.make_fx(self.forward, tracing_mode=tracing_mode, _allow_non_fake_inputs=True)
            return trace(*self.real[1].values())

    def capture_gradients(self) -> Any:
        trace = understudy.make_fx(self.gradients, tracing_mode="fake", _allow_non_fake_inputs=True)
        return trace(*self.real[1].values())

    def capture_step(self) -> Any:
        model, inputs = self.real

        def loss(model: Any, *values: torch.Tensor) -> torch.Tensor:
            given = dict(zip(inputs, values, strict=True))
            return self.workload.loss(model(**given), given)

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return understudy.capture_step(model, loss, optimizer, *inputs.values())

    def propagate(self) -> Any:
        mode = understudy.FakeTensorMode(allow_non_fake_inputs=True)
        with torch.no_grad():
            return understudy.FakeTensorProp(self.graph, mode).propagate(*self.real[1].values())

    def trace(self) -> Any:
        model, inputs = self.real
        return understudy.symbolic_trace(model, meta_args=dict(inputs))

    def forward_with_symbols(self) -> Any:
        mode, model, inputs = self.symbolic
        with mode, torch.no_grad():
            return model(**inputs)

    def enter_and_leave(self) -> None:
        mode = understudy.FakeTensorMode()
        for _ in range(ENTRIES):
            with mode:
                pass


@dataclass(frozen=True)
class Phase:
    body: Callable[[Program], Any]
    empties_cache: bool = False
    models: tuple[str, ...] = tuple(MODELS)


PHASES: dict[str, Phase] = {
    "enter and leave a mode": Phase(Program.enter_and_leave, models=("transformer",)),
    "construction": Phase(lambda program: program.fake.construct(), empties_cache=True),
    "construction, torch.device": Phase(Program.construct_on_a_device, empties_cache=True),
    "forward, cold": Phase(lambda program: program.fake.forward(), empties_cache=True),
    "forward, warm": Phase(lambda program: program.fake.forward()),
    "training step": Phase(lambda program: program.fake.train()),
    "symbolic forward": Phase(Program.forward_with_symbols),
    "make_fx fake": Phase(lambda program: program.capture("fake")),
    "make_fx symbolic": Phase(lambda program: program.capture("symbolic")),
    "make_fx with gradients": Phase(Program.capture_gradients),
    "capture_step": Phase(Program.capture_step, models=("transformer", "windows")),
    "FakeTensorProp": Phase(Program.propagate),
    "symbolic_trace": Phase(Program.trace),
}


def seconds_of(phase: Phase, program: Program, repeats: int) -> float:
    """Processor time of some runs, together. Results are let go, and garbage is collected, while the clock stands still."""
    gc.collect()
    total = 0.0
    for _ in range(repeats):
        if phase.empties_cache:
            understudy.FakeTensorMode.cache_clear()
        begin = time.process_time()
        kept = phase.body(program)
        total += time.process_time() - begin
        del kept
    return total


def requests() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what programs print goes to standard error, and not between the answers
    torch.set_num_threads(1)
    gc.disable()
    program = Program(transformer())
    answers.write(json.dumps({"source": understudy.__file__}) + "\n")
    answers.flush()
    for request in requests():
        if request["model"] != program.workload.name:
            program = Program(MODELS[request["model"]]())
        try:
            answer: dict[str, Any] = {
                "seconds": seconds_of(PHASES[request["phase"]], program, request["repeats"])
            }
        except (
            Exception
        ) as error:  # a phase that this version does not have: the others are measured all the same
            answer = {"error": f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
