"""The sweep of `make_fx`: every operator of torch's database is captured in the three tracing modes, and the graph is run.

python -m tests.oracle.fx_sweep --samples 2
python -m tests.oracle.fx_sweep --engine torch --ops '^nn.functional' --modes symbolic --show
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.oracle import engines
from tests.oracle import sweep as static_sweep
from tests.oracle.fx_gaps import samples_with_gaps

MODES = ("real", "fake", "symbolic")
VARIANTS = ("function", "inplace", "out", "out_resized", "backward")


@dataclass(frozen=True)
class Plan(static_sweep.Plan):
    """What to sweep. Of the dtypes, the first that an operator supports is taken."""

    engines: tuple[str, ...] = ("understudy",)
    dtypes: tuple[str, ...] = ("float32", "int64", "bool", "complex64", "bfloat16")
    variants: tuple[str, ...] = VARIANTS
    samples: int | None = 2
    modes: tuple[str, ...] = MODES
    other_variants: int | None = None
    "An upper limit of samples for all variants but the function itself."
    most: int | None = None
    "Of the samples of an operator that has more, so many are drawn: always the same ones, and those that show gaps."

    def limit(self, variant: str) -> int | None:
        """How many samples of a variant are taken; None for all."""
        limits = [self.samples, self.other_variants if variant != "function" else None]
        return 0 if variant not in self.variants else min((n for n in limits if n is not None), default=None)

    def drawn(self, name: str, count: int) -> frozenset[int] | None:
        """The numbers of the samples to take of `count`; None for all."""
        if self.most is None or count <= self.most:
            return None
        return frozenset(random.Random(name).sample(range(count), self.most)) | samples_with_gaps(name)

    def run(self, name: str) -> dict[str, Any]:
        return sweep_op(name, self)


def sweep_op(name: str, plan: Plan) -> dict[str, Any]:
    """All cases of one operator: for each engine its cells, by `mode/variant`."""
    from tests.oracle.cases import OPS, Limits, cases_of, dtypes_of, samples_in
    from tests.oracle.cases import VARIANTS as ALL

    limits = Limits(**{variant: plan.limit(variant) for variant in ALL})
    cells: dict[str, dict[str, Any]] = {engine: {} for engine in plan.engines}
    started = time.perf_counter()
    op = OPS[name]
    for dtype in dtypes_of(op, plan.dtypes)[:1]:
        try:
            drawn = None if plan.most is None else plan.drawn(name, samples_in(op, dtype))
            for case in cases_of(op, dtype, limits):
                if drawn is None or case.sample in drawn:
                    for engine in plan.engines:
                        _record(case, engine, plan.modes, cells[engine])
        except Exception as error:  # a broken sample generator must not hide what came before it
            for engine in plan.engines:
                _count(cells[engine], f"{dtype}/samples", "unusable", repr(error)[:200])
    return {"op": name, "seconds": round(time.perf_counter() - started, 2), "engines": cells}


def _record(case: Any, engine: str, modes: Sequence[str], cells: dict[str, Any]) -> None:
    from tests.oracle.fx_run import examine
    from tests.oracle.run import inputs_of

    for mode, verdict in examine(case, engine, modes).items():
        failure = _count(cells, f"{mode}/{case.variant}", verdict.outcome, verdict.cause)
        if failure is not None:
            failure.update(
                sample=case.sample, dtype=case.dtype, detail=verdict.detail, inputs=inputs_of(case)
            )


_count = static_sweep._count


def totals(results: Sequence[dict[str, Any]], engine: str) -> dict[str, Any]:
    """By tracing mode: how many captures came out how, and of how many operators all were right."""
    from tests.oracle.fx_run import FAILURES

    found: dict[str, Any] = {}
    for mode in MODES:
        captures: Counter[str] = Counter()
        right = failing = 0
        for result in results:
            cells = [
                cell
                for key, cell in result["engines"][engine].items()
                if key.partition("/")[0] in (mode, "*")
            ]
            counts = sum((Counter(cell["counts"]) for cell in cells), Counter())
            captures += counts
            fails = any(counts[outcome] for outcome in FAILURES)
            failing += fails
            right += bool(counts["ok"]) and not fails
        found[mode] = {"captures": dict(captures), "operators right": right, "operators that fail": failing}
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    plan = Plan(
        engines=engines.NAMES if options.engine == "both" else (options.engine,), modes=tuple(options.modes),
        variants=tuple(options.variant), samples=None if options.samples == "all" else int(options.samples),
        most=options.most,
    )  # fmt: skip
    names = static_sweep.operator_names(options.ops)
    results: list[dict[str, Any]] = []
    started = time.monotonic()
    for result in static_sweep.sweep(plan, names, options.jobs):
        results.append(result)
        if options.show:
            show(result)
        if len(results) % 50 == 0:
            print(
                f"{len(results)}/{len(names)}  {time.monotonic() - started:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    summary = {engine: totals(results, engine) for engine in plan.engines}
    if options.json:
        with open(options.json, "w") as file:
            json.dump(
                {"totals": summary, "results": sorted(results, key=lambda result: str(result["op"]))},
                file,
                indent=1,
            )
    for engine, by_mode in summary.items():
        for mode, sums in by_mode.items():
            print(
                f"{engine} {mode}: {sums['operators right']} operators right, {sums['operators that fail']} fail; captures {sums['captures']}"
            )
    return int(any(sums["operators that fail"] for by_mode in summary.values() for sums in by_mode.values()))


def show(result: dict[str, Any]) -> None:
    for engine, cells in result["engines"].items():
        for key, cell in cells.items():
            for failure in cell["failures"]:
                print(
                    f"{engine} {result['op']} {key} sample {failure.get('sample')} × {failure['count']}: {failure['outcome']} {failure['cause']}"
                )
                print(f"    inputs: {failure.get('inputs')}\n    {failure.get('detail')}")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.oracle.fx_sweep")
    parser.add_argument("--engine", choices=(*engines.NAMES, "both"), default="understudy")
    parser.add_argument("--ops", help="a regular expression for the operators' names")
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    parser.add_argument("--variant", nargs="+", default=VARIANTS, choices=VARIANTS)
    parser.add_argument("--samples", default="2", help="how many of each operator and variant, or 'all'")
    parser.add_argument("--most", type=int, help="draw so many of an operator's samples, if it has more")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--show", action="store_true", help="print each failure")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
