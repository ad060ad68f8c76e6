"""One training step of a 70-billion-parameter model, on a machine that could never hold it.

    python -m examples.demo [--size 8b|70b|405b] [--device cuda] [--batch 4] [--length 4096]

The model is built, run forward, run backward and updated by AdamW. Every tensor knows its shape, dtype,
strides and device; none has data.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

import understudy
from examples.llama import SIZES, Llama, next_token_loss

CARD = 80e9  # bytes of memory on one large accelerator


@dataclass
class Phase:
    name: str
    seconds: float = 0.0
    operators: int = 0


@dataclass
class Run:
    """What happened: the phases, and the tensors worth a look."""

    phases: list[Phase] = field(default_factory=list)
    shown: dict[str, Any] = field(default_factory=dict)
    weights: int = 0
    weight_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        phase = Phase(name)
        before, start = operators_seen(), time.perf_counter()
        yield
        phase.seconds, phase.operators = time.perf_counter() - start, operators_seen() - before
        self.phases.append(phase)


def operators_seen() -> int:
    info = understudy.FakeTensorMode.cache_info()
    return info.hits + info.misses + sum(info.bypasses.values())


def train_one_step(size: str, device: str, batch: int, length: int) -> Run:
    run = Run()
    torch.set_default_dtype(torch.bfloat16)
    with understudy.FakeTensorMode():
        with run.phase("build the model"), torch.device(device):
            model = Llama(SIZES[size])
        with run.phase("make AdamW (torch loads its compiler)"):
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        tokens = torch.randint(SIZES[size].vocabulary, (batch, length), device=device)
        with run.phase("forward"):
            logits = model(tokens)
            loss = next_token_loss(logits, tokens)
        with run.phase("backward"):
            loss.backward()
        with run.phase("AdamW step"):
            optimizer.step()

    first = model.blocks[0].attention.key.weight
    run.shown = {
        "tokens": tokens,
        "logits": logits,
        "loss": loss,
        "blocks[0].attention.key.weight": first,
        "  its gradient": first.grad,
        "  its state in AdamW": optimizer.state[first]["exp_avg"],
    }
    parameters = list(model.parameters())
    run.weights = sum(p.numel() for p in parameters)
    run.weight_bytes = size_in_bytes(parameters)
    run.gradient_bytes = size_in_bytes(p.grad for p in parameters)
    run.optimizer_bytes = size_in_bytes(
        value for state in optimizer.state.values() for value in state.values()
    )
    return run


def size_in_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def peak_memory() -> int:
    """The most memory that this process ever held, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def table(console: Console, title: str, *columns: str) -> Table:
    """A table: with lines in a terminal, plain text in a pipe. All columns but the first to the right."""
    made = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.ROUNDED if console.is_terminal else None,
        pad_edge=console.is_terminal,
        min_width=64,
    )
    for position, column in enumerate(columns):
        made.add_column(
            escape(column), justify="right" if position else "left", style="cyan" if not position else ""
        )
    return made


def show(console: Console, run: Run, size: str, device: str, baseline: int) -> None:
    here = "which this machine has" if has_device(device) else "which this machine does not have"
    console.print(
        f"\n[bold]understudy[/]: one training step of a Llama of {run.weights / 1e9:.1f} billion parameters "
        f"({SIZES[size].layers} layers, bfloat16) on [bold]{device}[/], {here}.\n",
        highlight=False,
    )

    phases = table(console, "What ran", "phase", "operators", "seconds")
    for phase in run.phases:
        phases.add_row(phase.name, f"{phase.operators:,}", f"{phase.seconds:.2f}")
    total = Phase("total", sum(p.seconds for p in run.phases), sum(p.operators for p in run.phases))
    phases.add_row("total", f"{total.operators:,}", f"{total.seconds:.2f}", style="bold")
    console.print(phases)
    console.print()

    tensors = table(console, "What is known of its tensors", "tensor", "dtype[shape]@device")
    for name, tensor in run.shown.items():
        tensors.add_row(escape(name), escape(str(tensor.spec)))
    console.print(tensors)
    console.print()

    together = run.weight_bytes + run.gradient_bytes + run.optimizer_bytes
    memory = table(console, "Memory", "", "GB", f"cards of {CARD / 1e9:.0f} GB")
    for name, amount in (
        ("weights", run.weight_bytes),
        ("gradients", run.gradient_bytes),
        ("AdamW state", run.optimizer_bytes),
    ):
        memory.add_row(name, f"{amount / 1e9:.1f}", "")
    memory.add_row(
        "the real thing, before activations", f"{together / 1e9:.1f}", f"{together / CARD:.1f}", style="bold"
    )
    memory.add_row("this process", f"{peak_memory() / 1e9:.2f}", "none", style="bold green")
    memory.add_row("  of which import torch", f"{baseline / 1e9:.2f}", "", style="dim")
    console.print(memory)


def has_device(device: str) -> bool:
    kind = torch.device(device).type
    if kind == "cpu":
        return True
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None and accelerator.type == kind


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="70b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    options = parser.parse_args(arguments)

    baseline = peak_memory()
    run = train_one_step(options.size, options.device, options.batch, options.length)
    show(Console(), run, options.size, options.device, baseline)


if __name__ == "__main__":
    main()
