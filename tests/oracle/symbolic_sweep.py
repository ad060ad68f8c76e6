"""The sweep with symbolic sizes: every operator of torch's database, at the example's sizes and at others.

    python -m tests.oracle.symbolic_sweep --samples 2
    python -m tests.oracle.symbolic_sweep --ops '^add$' --variant backward --show
    python -m tests.oracle.symbolic_sweep --samples all --other-dtypes 4 --variant function backward --json results.json

The last one takes every sample there is, as the test marked `conformance` does: its time is bounded by that of each case,
which `symbolic.MOST_ELEMENTS` limits.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.oracle import sweep as static_sweep

CAUSES_KEPT = 4
EXAMPLES_KEPT = 3
SAVED_EACH = 25


@dataclass(frozen=True)
class Plan(static_sweep.Plan):
    """What to sweep; `duck_shapes`: whether equal sizes share a symbol, each value is a run."""

    engines: tuple[str, ...] = ("understudy",)
    dtypes: tuple[str, ...] = ("float32", "int64")
    variants: tuple[str, ...] = ("function",)
    samples: int | None = 2
    duck_shapes: tuple[bool, ...] = (False, True)

    def run(self, name: str) -> dict[str, Any]:
        return sweep_op(name, self)


def sweep_op(name: str, plan: Plan) -> dict[str, Any]:
    """All cases of one operator: counts of outcomes, failures, and how many of its guards were needless."""
    from tests.oracle.cases import OPS, Limits, cases_of, dtypes_of

    limits = {variant: plan.samples if variant in plan.variants else 0 for variant in static_variants()}
    cell: dict[str, Any] = {
        "counts": {},
        "failures": [],
        "guards": 0,
        "trials": 0,
        "on the way": 0,
        "needless": {},
        "unmet": {},
    }
    started = time.perf_counter()
    op = OPS[name]
    for dtype in dtypes_of(op, plan.dtypes):
        try:
            for case in cases_of(op, dtype, Limits(**limits, other_dtypes=plan.other_dtypes)):
                if _is_usable(case):
                    for duck_shape in plan.duck_shapes:
                        _record(case, duck_shape, cell)
        except Exception as error:  # a broken sample generator must not hide the other dtypes
            cell["counts"]["unusable"] = cell["counts"].get("unusable", 0) + 1
            cell["failures"].append({"outcome": "unusable", "cause": repr(error)[:200], "count": 1})
    return {
        "op": name,
        "seconds": round(time.perf_counter() - started, 2),
        "engines": {"understudy": {"*": cell}},
    }


def static_variants() -> tuple[str, ...]:
    from tests.oracle.cases import VARIANTS

    return VARIANTS


def _is_usable(case: Any) -> bool:
    """Whether there is a size that may vary, and tensors that can be made in other sizes."""
    import torch

    from tests.oracle.compare import tensors_in

    tensors = tensors_in((case.args, case.kwargs))
    return all(tensor.layout == torch.strided for tensor in tensors) and any(
        size >= 2 for tensor in tensors for size in tensor.shape
    )


def _record(case: Any, duck_shape: bool, cell: dict[str, Any]) -> None:
    from tests.oracle.run import inputs_of
    from tests.oracle.symbolic import examine

    examined = examine(case, duck_shape)
    verdict = examined.verdict
    where = f"{case.dtype}/{case.variant} sample {case.sample} duck_shape={duck_shape}"
    cell["counts"][verdict.outcome] = cell["counts"].get(verdict.outcome, 0) + 1
    cell["guards"] += len(examined.guards)
    cell["trials"] += examined.trials
    cell["on the way"] += examined.on_the_way
    for guard, asker in examined.needless:
        found = cell["needless"].setdefault(asker, {"count": 0, "guards": [], "where": where})
        found["count"] += 1
        if guard not in found["guards"] and len(found["guards"]) < EXAMPLES_KEPT:
            found["guards"].append(guard)
    for text in examined.unmet:
        cell["unmet"][text] = cell["unmet"].get(text, 0) + 1
    known = next(
        (f for f in cell["failures"] if (f["outcome"], f["cause"]) == (verdict.outcome, verdict.cause)), None
    )
    if known is not None:
        known["count"] += 1
    elif verdict.cause and len(cell["failures"]) < CAUSES_KEPT:
        cell["failures"].append({
            "outcome": verdict.outcome, "cause": verdict.cause, "count": 1, "where": where, "detail": verdict.detail,
            "inputs": inputs_of(case),
        })  # fmt: skip


def cell_of(result: dict[str, Any]) -> dict[str, Any]:
    """The one cell of a result."""
    return next(iter(result["engines"]["understudy"].values()))  # type: ignore[no-any-return]


def totals(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    samples: Counter[str] = Counter()
    operators: Counter[str] = Counter()
    numbers: Counter[str] = Counter()
    for result in results:
        cell = cell_of(result)
        samples.update(cell["counts"])
        operators.update(cell["counts"].keys())
        numbers.update({kind: cell.get(kind, 0) for kind in ("guards", "trials", "on the way")})
        numbers["needless"] += sum(found["count"] for found in cell.get("needless", {}).values())
    return {"samples": dict(samples), "operators": dict(operators), **numbers}


def needless_by_asker(results: Sequence[dict[str, Any]]) -> list[tuple[int, str, str]]:
    """(how often, who asked, by which operators and for what) for the guards that were needless, the most frequent first."""
    counts: Counter[str] = Counter()
    examples: dict[str, dict[str, str]] = {}
    for result in results:
        for asker, found in cell_of(result).get("needless", {}).items():
            counts[asker] += found["count"]
            examples.setdefault(asker, {})[str(result["op"])] = found["guards"][0]
    return [
        (
            count,
            asker,
            ", ".join(f"{op} ({guard})" for op, guard in list(examples[asker].items())[:EXAMPLES_KEPT]),
        )
        for asker, count in counts.most_common()
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    from tests.oracle.symbolic import FAILURES, OUTCOMES

    options = _options(arguments)
    plan = Plan(
        dtypes=tuple(options.dtypes), variants=tuple(options.variant),
        samples=None if options.samples == "all" else int(options.samples), other_dtypes=options.other_dtypes,
    )  # fmt: skip
    names = static_sweep.operator_names(options.ops)
    results: list[dict[str, Any]] = []
    started = time.monotonic()
    for result in static_sweep.sweep(plan, names, options.jobs):
        results.append(result)
        if options.show:
            _show(result, options.show)
        if len(results) % SAVED_EACH == 0:
            print(
                f"{len(results)}/{len(names)}  {time.monotonic() - started:.0f} s",
                file=sys.stderr,
                flush=True,
            )
            _save(results, options.json)
    summary = totals(results)
    _save(results, options.json)
    for outcome in (*OUTCOMES, "crash", "unusable"):
        counts = summary["samples"].get(outcome, 0), summary["operators"].get(outcome, 0)
        print(
            f"{outcome:15s} {counts[0]:6d} samples of {counts[1]:4d} operators   {OUTCOMES.get(outcome, '')}"
        )
    if options.show == "all":
        for count, asker, examples in needless_by_asker(results):
            print(f"needless × {count}: {asker}\n    {examples}")
    needless, on_the_way = (f"{summary[kind]} times" for kind in ("needless", "on the way"))
    print(f"{summary['guards']} guards; {summary['trials']} times a size was tried that breaks one of them.")
    print(f"All was as recorded {needless}; {on_the_way} the result was, but not what led to it.")
    return int(any(summary["samples"].get(outcome) for outcome in (*FAILURES, "crash", "unusable")))


def _save(results: Sequence[dict[str, Any]], path: str | None) -> None:
    """What is known so far: a sweep that is stopped leaves it behind."""
    if path is not None:
        with open(path, "w") as file:
            ordered = sorted(results, key=lambda result: str(result["op"]))
            json.dump({"totals": totals(results), "results": ordered}, file, indent=1)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.oracle.symbolic_sweep")
    parser.add_argument("--ops", help="a regular expression for the operators' names")
    parser.add_argument("--dtypes", nargs="+", default=Plan.dtypes)
    parser.add_argument("--variant", nargs="+", default=Plan.variants)
    parser.add_argument("--samples", default="2", help="how many of each operator and variant, or 'all'")
    parser.add_argument("--other-dtypes", type=int, help="at most so many in each dtype but float32")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", help="write the results to this file, as they come in")
    parser.add_argument("--show", nargs="?", const="failures", choices=("failures", "all"),
                        help="print failures; with 'all', needless guards and refusals at admitted sizes as well")  # fmt: skip
    return parser.parse_args(arguments)


def _show(result: dict[str, Any], what: str) -> None:
    cell = cell_of(result)
    for failure in cell["failures"]:
        if what == "all" or failure["outcome"] not in ("static", "refused"):
            print(
                f"{result['op']} {failure.get('where', '')} × {failure['count']}: {failure['outcome']} {failure['cause']}"
            )
            print(f"    inputs: {failure.get('inputs')}\n    {failure.get('detail')}")
    if what == "all":
        for text, count in cell.get("unmet", {}).items():
            print(f"{result['op']} unmet × {count}: {text}")


if __name__ == "__main__":
    sys.exit(main())
