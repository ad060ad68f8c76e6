"""python -m tools.fit_kernels [TRUTH]: fit all, write `timing/curves.toml` and the tables of `docs/accuracy.md`."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from tools.fit_kernels import clusters, collectives, kernels, tables
from tools.fit_kernels.fitting import (
    Parameters,
    Row,
    check_by_cards,
    check_by_halves,
    fit,
    make_row,
)
from understudy.timing.curves import CURVES_FILE, Tiles

ROOT = Path(__file__).parent.parent.parent
LEAST_ROWS = 10
"""Of a card and a kind, for an interval of its own."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.fit_kernels", description=__doc__)
    parser.add_argument("truth", nargs="?", default=ROOT.parent / "shared" / "truth", type=Path)
    parser.add_argument("--cache", default=Path(tempfile.gettempdir()) / "understudy-streams", type=Path)
    parser.add_argument("--keep", action="store_true", help="write nothing, print the tables")
    options = parser.parse_args()
    products = {name: kernels.fit_products(options.truth, name) for name in kernels.CARDS}
    links = {name: collectives.fit_link(options.truth, name) for name in collectives.LINKS}
    rows = read_rows(options.truth, options.cache, products)
    attention = {kernels.CARDS[name]: kernels.fit_attention(options.truth, name) for name in kernels.CARDS}
    attention["a100-40"] = attention["a100-80"]
    parameters = Parameters(sorted({row.card for row in rows}), attention)
    halves = check_by_halves(rows, parameters)
    cards = check_by_cards(rows, parameters)
    x = fit(rows, parameters)
    values = dict(zip(parameters.names, np.exp(x).tolist(), strict=True))
    curves = tables.write_curves(
        values, products, links, stated_errors(halves), typical_errors(cards), len(rows), attention
    )
    for name, value in values.items():
        if name.startswith("old."):
            print(f"{name} = {value:.2f}")
    accuracy = tables.write_accuracy(halves, cards, products, links, stated_errors(halves))
    if options.keep:
        print(curves, accuracy, sep="\n")
        return
    CURVES_FILE.write_text(curves)
    tables.replace_section(ROOT / "docs" / "accuracy.md", accuracy)


def read_rows(truth: Path, cache: Path, products: dict[str, Any]) -> list[Row]:
    facts = json.loads((truth / "time" / "steps.json").read_text())["rows"] + clusters.make_facts(truth)
    tiles = {
        found["card"]: Tiles(tuple(found["efficiency"]), found["contraction"], found["wave"])
        for found in products.values()
    }
    tiles["a100-40"] = tiles["a100-80"]
    return [make_row(row, cache, tiles) for row in facts]


def stated_errors(pairs: list[tuple[Row, float]]) -> dict[tuple[str, str], float]:
    """By card and kind: the logarithm that 90% of the rows lie within, where there are enough."""
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row, found in pairs:
        groups[row.card, row.facts["kind"]].append(abs(np.log(found / row.seconds)))
    return {
        key: float(np.quantile(errors, 0.9)) for key, errors in groups.items() if len(errors) >= LEAST_ROWS
    }


def typical_errors(pairs: list[tuple[Row, float]]) -> dict[str, float]:
    """The same by kind, of cards that were left out."""
    found = {}
    for kind in ("training", "inference"):
        errors = [abs(np.log(guess / row.seconds)) for row, guess in pairs if row.facts["kind"] == kind]
        found[kind] = float(np.quantile(errors, 0.9))
    return found


if __name__ == "__main__":
    main()
