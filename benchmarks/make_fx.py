"""make_fx side by side with torch's: the benchmark's models captured in fake and in symbolic mode.

    python -m benchmarks.make_fx            all models
    python -m benchmarks.make_fx --quick    few repetitions: a look, not a figure to quote

What is captured is a forward pass without gradients of a real model on real inputs; both sides find and convert what
is real by themselves. With jax installed (it is no dependency), `jax.make_jaxpr` of a transformer of the same size
stands beside them, by the equation. `layers` says what the first and what a later identical layer costs.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch._subclasses.fake_tensor import FakeTensorMode as TorchFakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx as torch_make_fx

import understudy
from benchmarks.models import WORKLOADS, Workload
from benchmarks.phases import Budget
from benchmarks.prop import take_turns, timed
from benchmarks.run import chosen_models, geometric_mean
from examples.llama import Llama, LlamaSize

TARGETS = {"fake": 18.0, "symbolic": 40.0}
SYMBOLIC_OVER_FAKE = 1.5
JAX_SHARE = 1 / 3
JAX_DEPTHS = (12, 32, 80)
"""Layers of the transformers that jax traces as well: of a small model, and of ones of 7 and 70 billion parameters."""
JAX_ROWS = (
    ("warm", "node_seconds", "equation_seconds"),
    ("warm, all values read", "node_and_value_seconds", "equation_seconds"),
    ("cold", "cold_node_seconds", "cold_equation_seconds"),
)
FULL = Budget(least=5, most=15, seconds=20.0)
QUICK = Budget(least=2, most=2, seconds=1.0)


def program(workload: Workload) -> tuple[Callable[..., Any], tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    model, inputs = workload.build().eval(), workload.inputs()
    inputs.pop("labels", None) if workload.name != "t5" else None

    def forward(*values: torch.Tensor) -> Any:
        output = model(**dict(zip(inputs, values, strict=True)))
        return output if isinstance(output, torch.Tensor) else output.logits

    return forward, tuple(inputs.values())


def captures(make: Any, forward: Any, inputs: Any, mode: str) -> Callable[[], Any]:
    def run() -> Any:
        with torch.no_grad():
            return make(forward, tracing_mode=mode, _allow_non_fake_inputs=True)(*inputs)

    return run


def measure_model(name: str, budget: Budget) -> list[dict[str, Any]]:
    forward, inputs = program(WORKLOADS[name]())
    rows = []
    for mode in TARGETS:
        ours, theirs = (captures(make, forward, inputs, mode) for make in (understudy.make_fx, torch_make_fx))
        nodes, their_nodes = len(ours().graph.nodes), len(theirs().graph.nodes)
        cold = timed_cold(ours)
        bodies = [lambda ours=ours: timed(ours), lambda theirs=theirs: timed(theirs)]
        our_seconds, their_seconds = take_turns(bodies, budget)  # type: ignore[arg-type]
        rows.append({
            "model": name, "mode": mode, "nodes": nodes, "torch_nodes": their_nodes, "understudy_cold_seconds": cold,
            "understudy_seconds": our_seconds, "torch_seconds": their_seconds, "ratio": their_seconds / our_seconds,
        })  # fmt: skip
    return rows


def timed_cold(body: Callable[[], Any]) -> float:
    understudy.FakeTensorMode.cache_clear()
    TorchFakeTensorMode.cache_clear()
    return timed(body)


def measure_layers() -> dict[str, float]:
    """Seconds of the first layer of a transformer, and of a later one like it, with nothing known before."""
    inputs = (torch.randint(1000, (2, 16)),)

    def seconds(layers: int) -> float:
        model = Llama(
            LlamaSize(layers=layers, width=64, heads=4, kv_heads=4, hidden=128, vocabulary=1000)
        ).eval()
        return min(timed_cold(captures(understudy.make_fx, model, inputs, "fake")) for _ in range(5))

    seconds(1)
    none, one, many = seconds(0), seconds(1), seconds(9)
    return {"first": one - none, "later": (many - one) / 8}


def measure_jax(depth: int) -> dict[str, Any] | None:
    """Seconds for each equation of `jax.make_jaxpr`, and for each node here, on transformers of one size."""
    try:
        import jax
    except ImportError:
        return None
    from benchmarks.jax_transformer import equations, transformer

    size = LlamaSize(layers=depth, width=64, heads=4, kv_heads=4, hidden=128, vocabulary=1000)
    function, arguments = transformer(size, batch=2, length=128)
    closed = jax.make_jaxpr(function)(*arguments)
    count = equations(closed)

    def jaxpr() -> float:
        # A new function each time: jax would only look up what it has traced before.
        return timed(lambda: jax.make_jaxpr(lambda *given: function(*given))(*arguments))

    def jaxpr_cold() -> float:
        jax.clear_caches()
        return jaxpr()

    model, tokens = Llama(size).eval(), torch.randint(1000, (2, 128))
    capture = captures(understudy.make_fx, model, (tokens,), "fake")
    nodes = len(capture().graph.nodes)

    def capture_and_read() -> None:
        for node in capture().graph.nodes:
            node.meta.get("val")

    ours, read, theirs, ours_cold, theirs_cold = take_turns(
        [
            lambda: timed(capture), lambda: timed(capture_and_read), jaxpr,
            lambda: timed_cold(capture), jaxpr_cold,
        ], FULL,
    )  # fmt: skip
    return {
        "layers": depth, "equations": count, "outer_equations": len(closed.jaxpr.eqns), "nodes": nodes,
        "node_seconds": ours / nodes, "node_and_value_seconds": read / nodes, "equation_seconds": theirs / count,
        "cold_node_seconds": ours_cold / nodes, "cold_equation_seconds": theirs_cold / count,
    }  # fmt: skip


def show(
    console: Console, rows: list[dict[str, Any]], layers: dict[str, float], jax: list[dict[str, Any]]
) -> None:
    table = Table(title="make_fx: milliseconds, and microseconds for each node", title_justify="left")
    for column in ("model", "mode"):
        table.add_column(column)
    for column in (
        "nodes",
        "understudy ms",
        "cold ms",
        "torch ms",
        "understudy µs/node",
        "torch µs/node",
        "ratio",
    ):
        table.add_column(column, justify="right")
    for row in rows:
        ours, theirs = row["understudy_seconds"], row["torch_seconds"]
        table.add_row(
            row["model"], row["mode"], f"{row['nodes']:,}", f"{ours * 1e3:,.1f}",
            f"{row['understudy_cold_seconds'] * 1e3:,.1f}", f"{theirs * 1e3:,.1f}", f"{ours * 1e6 / row['nodes']:.1f}",
            f"{theirs * 1e6 / row['torch_nodes']:.1f}", f"{row['ratio']:.1f}×",
        )  # fmt: skip
    console.print(table)
    for mode, target in TARGETS.items():
        ratios = [row["ratio"] for row in rows if row["mode"] == mode]
        console.print(f"{mode}: {geometric_mean(ratios):.1f}× in the geometric mean (target {target:.0f}×)")
    times = {(row["model"], row["mode"]): row["understudy_seconds"] for row in rows}
    over = [times[name, "symbolic"] / seconds for (name, mode), seconds in times.items() if mode == "fake"]
    console.print(f"symbolic over fake, both ours: {geometric_mean(over):.2f} (target {SYMBOLIC_OVER_FAKE})")
    console.print(
        f"a layer: the first {layers['first'] * 1e3:.2f} ms, a later one {layers['later'] * 1e3:.2f} ms"
    )
    if not jax:
        console.print("jax is not installed: no comparison with make_jaxpr")
    for found in jax:
        for name, mine, other in JAX_ROWS:
            theirs, ours = found[other] * 1e6, found[mine] * 1e6
            share, outer = ours / theirs, found["outer_equations"] / found["equations"]
            console.print(
                f"{found['layers']} layers, {name}: jax.make_jaxpr takes {theirs:.1f} µs for each of {found['equations']:,} "
                f"equations, make_fx here {ours:.1f} µs for each of {found['nodes']:,} nodes: {share:.2f} of it "
                f"(target {JAX_SHARE:.2f}); {share * outer:.2f} if equations of "
                "inner jaxprs, which jax traces once and uses again, are not counted"
            )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few repetitions: a look, not a figure to quote")
    parser.add_argument("--models", default="", help=f"some of: {','.join(WORKLOADS)}")
    parser.add_argument(
        "--json", type=Path, default=Path("build/benchmark-make-fx.json"), help="where figures go"
    )
    options = parser.parse_args(arguments)
    console = Console()
    if not console.is_terminal:
        console.width = 120
    rows = []
    for name in chosen_models(options.models):
        with console.status(f"{name}: capturing"):
            measured = measure_model(name, QUICK if options.quick else FULL)
        console.print(f"{name}: " + ", ".join(f"{row['mode']} {row['ratio']:.1f}×" for row in measured))
        rows += measured
        gc.collect()
    layers, jax = measure_layers(), list(filter(None, map(measure_jax, JAX_DEPTHS)))
    show(console, rows, layers, jax)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    about = {"torch": torch.__version__, "python": platform.python_version(), "quick": options.quick}
    options.json.write_text(
        json.dumps({**about, "rows": rows, "layers": layers, "jax": jax}, indent=2) + "\n"
    )


if __name__ == "__main__":
    main()
