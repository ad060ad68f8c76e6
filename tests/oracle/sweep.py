"""The sweep: every operator of torch's database, every sample, for real and with stand-ins.

    python -m tests.oracle.sweep --engine understudy
    python -m tests.oracle.sweep --engine both --ops '^nn.functional' --dtypes float32 --samples 5
    python -m tests.oracle.sweep --engine understudy --ops '^add$' --dtypes float32 --variant function --show
    python -m tests.oracle.sweep --context inference_mode --dtypes float32 --samples 8

Operators run in worker processes: one that takes the process down is marked as a crash, and the sweep goes on.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.oracle import engines

SECONDS_PER_OP = 1200  # by the clock: a busy machine must not look like a hang
CAUSES_KEPT = 4
CONTEXTS = ("no_grad", "inference_mode")

Cells = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Plan:
    """What to sweep."""

    engines: tuple[str, ...]
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "int64", "bool", "complex64")
    variants: tuple[str, ...] = ()
    "Empty for all."
    samples: int | None = None
    other_dtypes: int | None = None
    context: str | None = None
    "A context of torch around both runs: in inference mode, composite operators arrive undecomposed."

    def run(self, name: str) -> dict[str, Any]:
        return sweep_op(name, self)


def sweep_op(name: str, plan: Plan) -> dict[str, Any]:
    """All cases of one operator: for each engine its cells, by `dtype/variant`."""
    # The database takes seconds to import: the parent process has no need of it.
    from tests.oracle.cases import OPS, Limits, cases_of, dtypes_of

    op = OPS[name]
    limits = Limits(other_dtypes=plan.other_dtypes)
    if plan.samples is not None:
        limits = Limits.of_samples(plan.samples, plan.other_dtypes)
    started = time.perf_counter()
    cells: dict[str, Cells] = {engine: {} for engine in plan.engines}
    for dtype in dtypes_of(op, plan.dtypes):
        modes = {engine: engines.new_mode(engine) for engine in plan.engines}
        try:
            for case in cases_of(op, dtype, limits):
                if not plan.variants or case.variant in plan.variants:
                    _record(case, modes, cells, plan.context)
        except Exception as error:  # a broken sample generator must not hide the other dtypes
            for engine in plan.engines:
                _count(cells[engine], f"{dtype}/samples", "unusable", repr(error)[:200])
    return {"op": name, "seconds": round(time.perf_counter() - started, 2), "engines": cells}


def _record(case: Any, modes: dict[str, Any], cells: dict[str, Cells], context: str | None) -> None:
    import torch

    from tests.oracle.run import inputs_of, judge, run_fake, run_real

    contexts = () if context is None else (getattr(torch, context)(),)
    real = run_real(case, *contexts)
    for engine, mode in modes.items():
        verdict = judge(case, real, run_fake(case, mode, *contexts))
        key = f"{case.dtype}/{case.variant}"
        failure = _count(cells[engine], key, verdict.outcome, verdict.cause)
        if failure is not None and failure["count"] == 1:
            failure.update(sample=case.sample, detail=verdict.detail, inputs=inputs_of(case))
            failure["culprit"] = _culprit(case, engine)


def _culprit(case: Any, engine: str) -> str:
    from tests.oracle.run import culprit

    try:
        return culprit(case, engines.new_mode(engine))[:1500]
    except Exception as error:
        return f"? {error!r}"[:300]


def _count(cells: Cells, key: str, outcome: str, cause: str) -> dict[str, Any] | None:
    cell = cells.setdefault(key, {"counts": {}, "failures": []})
    cell["counts"][outcome] = cell["counts"].get(outcome, 0) + 1
    if not cause:
        return None
    for failure in cell["failures"]:
        if failure["outcome"] == outcome and failure["cause"] == cause:
            failure["count"] += 1
            return None
    if len(cell["failures"]) >= CAUSES_KEPT:
        return None
    failure = {"outcome": outcome, "cause": cause, "count": 1}
    cell["failures"].append(failure)
    return failure


def crashed(name: str, plan: Plan, how: str) -> dict[str, Any]:
    cell = {"counts": {"crash": 1}, "failures": [{"outcome": "crash", "cause": how, "count": 1, "sample": 0}]}
    return {"op": name, "seconds": 0.0, "engines": {engine: {"*/*": cell} for engine in plan.engines}}


def _work(pipe: Connection, plan: Plan) -> None:
    """A worker: gets names of operators, sends results back, until it gets None."""
    import torch

    torch.set_num_threads(1)
    logging.disable()  # torch's engine logs a traceback for each refusal
    while (name := pipe.recv()) is not None:
        pipe.send(plan.run(name))


@dataclass
class _Worker:
    plan: Plan
    process: Any = None
    pipe: Any = None
    op: str | None = None
    since: float = field(default_factory=time.monotonic)

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, self.plan), daemon=True)
        self.process.start()
        theirs.close()

    def give(self, op: str) -> None:
        if self.process is None:
            self.start()
        self.op, self.since = op, time.monotonic()
        self.pipe.send(op)

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.pipe.close()
            self.process = self.op = None


def sweep(plan: Plan, names: Sequence[str], jobs: int = 1) -> Iterator[dict[str, Any]]:
    """Results of the operators, as they come in."""
    waiting = list(reversed(names))
    workers = [_Worker(plan) for _ in range(max(1, min(jobs, len(names))))]
    try:
        while waiting or any(worker.op for worker in workers):
            for worker in workers:
                if worker.op is None and waiting:
                    worker.give(waiting.pop())
            busy = [worker for worker in workers if worker.op]
            wait([worker.pipe for worker in busy], timeout=5)
            for worker in busy:
                yield from _collected(worker)
    finally:
        for worker in workers:
            worker.stop()


def _collected(worker: _Worker) -> Iterator[dict[str, Any]]:
    assert worker.op is not None
    name = worker.op
    try:
        if worker.pipe.poll():
            result = worker.pipe.recv()
            worker.op = None
            yield result
        elif time.monotonic() - worker.since > SECONDS_PER_OP:
            worker.stop()
            yield crashed(name, worker.plan, f"no answer in {SECONDS_PER_OP} s")
    except EOFError:
        worker.process.join()
        code = worker.process.exitcode
        worker.stop()
        yield crashed(name, worker.plan, f"the process died with code {code}")


def operator_names(pattern: str | None) -> list[str]:
    from tests.oracle.cases import OPS

    return [name for name in OPS if pattern is None or re.search(pattern, name)]


def totals(results: Sequence[dict[str, Any]], engine: str) -> dict[str, Any]:
    """Counts of samples by outcome, and of operators that have a failure of a kind."""
    samples: Counter[str] = Counter()
    ops: dict[str, set[str]] = {}
    for result in results:
        for cell in result["engines"][engine].values():
            samples.update(cell["counts"])
            for outcome in cell["counts"]:
                ops.setdefault(outcome, set()).add(result["op"])
    failing = ops.get("mismatch", set()) | ops.get("error", set()) | ops.get("crash", set())
    return {
        "samples": dict(samples),
        "operators": {outcome: len(names) for outcome, names in ops.items()},
        "operators with a failure": len(failing),
        "samples that fail": sum(samples[kind] for kind in ("mismatch", "error", "crash")),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    plan = Plan(
        engines=engines.NAMES if options.engine == "both" else (options.engine,),
        dtypes=tuple(options.dtypes), variants=tuple(options.variant),
        samples=None if options.samples == "all" else int(options.samples), context=options.context,
    )  # fmt: skip
    names = operator_names(options.ops)
    results = []
    started = time.monotonic()
    for result in sweep(plan, names, options.jobs):
        results.append(result)
        if options.show:
            _show(result)
        _progress(len(results), len(names), started, result)
    report: dict[str, Any] = {
        "engines": {engine: totals(results, engine) for engine in plan.engines},
        "seconds": round(time.monotonic() - started),
        "results": sorted(results, key=lambda result: str(result["op"])),
    }
    if options.json:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)
    _table(report)
    failed = any(report["engines"][engine]["samples that fail"] for engine in plan.engines)
    return int(failed)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.oracle.sweep", description=__doc__.partition("\n")[0]
    )  # type: ignore[union-attr]
    parser.add_argument("--engine", choices=(*engines.NAMES, "both"), default="understudy")
    parser.add_argument("--dtypes", nargs="+", default=Plan.dtypes)
    parser.add_argument("--ops", help="a regular expression for the operators' names")
    parser.add_argument("--variant", nargs="+", default=())
    parser.add_argument("--samples", default="all", help="how many of each operator and variant, or 'all'")
    parser.add_argument(
        "--context", choices=CONTEXTS, help="around both runs; gradients are taken without one only"
    )
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--show", action="store_true", help="print each failure")
    return parser.parse_args(arguments)


def _progress(done: int, of: int, started: float, result: dict[str, Any]) -> None:
    if sys.stderr.isatty() or done % 50 == 0 or done == of:
        seconds = time.monotonic() - started
        end = "\r" if sys.stderr.isatty() and done < of else "\n"
        print(f"{done}/{of}  {seconds:.0f} s  {result['op'][:40]:40s}", end=end, file=sys.stderr, flush=True)


def _show(result: dict[str, Any]) -> None:
    for engine, cells in result["engines"].items():
        for key, cell in cells.items():
            for failure in cell["failures"]:
                print(
                    f"{engine} {result['op']} {key} sample {failure.get('sample')} × {failure['count']}: {failure['outcome']}"
                )
                for name in ("inputs", "detail", "culprit"):
                    if failure.get(name):
                        print(f"    {name}: {failure[name]}")


def _table(report: dict[str, Any]) -> None:
    from tests.oracle.run import OUTCOMES

    rows = [
        (
            outcome,
            engine,
            str(sums["samples"].get(outcome, 0)),
            str(sums["operators"].get(outcome, 0)),
            meaning,
        )
        for outcome, meaning in OUTCOMES.items()
        for engine, sums in report["engines"].items()
    ]
    headings = ("outcome", "engine", "samples", "operators", "meaning")
    _print_rows(headings, rows)
    for engine, sums in report["engines"].items():
        print(
            f"{engine}: {sums['samples that fail']} samples of {sums['operators with a failure']} operators fail"
        )


def _print_rows(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        for row in (headings, *rows):
            print("  ".join(f"{cell:15s}" for cell in row))
        return
    table = Table(*headings)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
