"""What is written: `curves.toml` for people to read, and the tables of `docs/accuracy.md`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tools.fit_kernels.fitting import (
    ATTENTION,
    COMPUTING,
    FAMILIES,
    HOST_OF,
    HOSTS,
    LAUNCHES,
    PASSES,
    VARIANTS,
    Row,
)

HEAD = """\
# Curves of kernel families. Written by `python -m tools.fit_kernels`; a person may correct it: each figure stands alone.
# `docs/accuracy.md` has the errors on rows that were not fitted; `docs/time.md` says how a time is computed.
#
# A kernel takes `fixed` seconds, and the larger of
#   computing: FLOPs over the published peak, by tiles for products, over compute.FAMILY
#   moving:    bytes over the published bandwidth, over memory.FAMILY
# divided by the factors of its variants ("convolution.channels_first"), with the further `passes` of these through all
# bytes, and divided by the speed of the card in this family, if it was measured.
# An error is the logarithm of the factor that 90% of rows lie within.
"""
MARKS = "<!-- times: begin -->", "<!-- times: end -->"
SOURCE = "step times of timm's result tables (torch 1.12 to 2.9), a course's decoders and llm-foundry's tables, {} rows"
KERNEL_SOURCE = "kernels measured by ai-dynamo/aiconfigurator"
SAME_CHIP = {"a100-40": "a100-80", "a100-80": "a100-40"}
ARCHITECTURES = {"8.0": "a100_sxm", "9.0": "h100_sxm", "10.0": "b200_sxm"}
HOST_BANDWIDTH = {"desktop": 20, "server": 20, "cloud": 10}
HEAVY_HOST = """
[hosts.heavy]  # by hand: a slow host, and much Python between calls (vTrain's small models)
slowness = 5.0
bandwidth = 10"""
NETWORK = """
[network]  # for each card. Bandwidths from NCCL's tests on 16 to 256 H100 with EFA, 400 Gb/s a card, published by
# crazyguitar/aws-gpu-communication-benchmark (80 rows, mean error 9% with a latency of 70 µs, which EFA has);
# the latency is that of InfiniBand, with which llm-foundry's tables of 16 to 256 cards agree
efficiency = { other = 0.95, tree = 0.5 }
latency = 7e-6
fixed = 2e-5
"""


def write_curves(
    values: dict[str, float], products: dict[str, Any], links: dict[str, Any], errors: dict[tuple[str, str], float],
    typical: dict[str, float], rows: int, attention: dict[str, float],
) -> str:  # fmt: skip
    lines = [HEAD, "[all]", f"fixed = {values['fixed']:.2e}", 'host = "server"']
    lines += ['source = "no step on this card was measured: curves of other cards, scaled by its figures"']
    lines += ["", "[all.error]  # of cards that were left out of the fit"]
    lines += [f"{kind} = {error:.2f}" for kind, error in typical.items()]
    for title, names in (
        ("compute", COMPUTING),
        ("memory", FAMILIES),
        ("factors", VARIANTS),
        ("passes", PASSES),
    ):
        lines += ["", f"[all.{title}]"]
        lines += [f"{_key(name)} = {values[f'{title}.{name}']:.3f}" for name in names]
    lines += [
        "",
        "[all.tiles]  # where no products were measured",
        "efficiency = [0.9, 0.86, 0.75, 0.55, 0.3, 0.15]",
    ]
    lines += [
        "contraction = 160",
        "wave = 0.4",
        "",
        "[launches]  # seconds of the host for a call on a desktop; parts of it",
    ]
    lines += [f"{name} = {values[f'launches.{name}']:.3g}" for name in LAUNCHES]
    for name in HOSTS:
        lines += [
            "",
            f"[hosts.{name}]",
            f"slowness = {values[f'hosts.{name}']:.2f}",
            f"bandwidth = {HOST_BANDWIDTH[name]}",
        ]
    lines += HEAVY_HOST.splitlines()
    for name, card in ARCHITECTURES.items():
        found = products[card]
        lines += [
            "",
            f'[architecture."{name}".tiles]  # {KERNEL_SOURCE}, {_write_error(found)}',
            *_write_tiles(found),
        ]
    lines += [
        "",
        '[architecture."9.0".speed]  # that of the H100, which throttles in training',
        *_write_speeds("h100", values),
    ]
    lines += ["", f'[architecture."10.0".speed]  # {KERNEL_SOURCE}, those of the B200']
    lines += [f"{name} = {attention['b200']}" for name in ATTENTION]
    for card in sorted(
        attention.keys() - {name.split(".")[1] for name in values if name.startswith("speed.")}
    ):
        lines += ["", f"[cards.{card}.speed]  # {KERNEL_SOURCE}"]
        lines += [f"{name} = {attention[card]}" for name in ATTENTION]
    found = products["l40s"]
    lines += ["", f"[cards.l40s.tiles]  # {KERNEL_SOURCE}, {_write_error(found)}", *_write_tiles(found)]
    cards = sorted({name.split(".")[1] for name in values if name.startswith("speed.")})
    for card in cards:
        lines += _write_card(card, values, errors, rows)
    for name, link in links.items():
        parts = ", ".join(f"{kind} = {part}" for kind, part in link["efficiency"].items())
        lines += [
            "",
            f'[links."{name}"]  # {KERNEL_SOURCE}, {_write_error(link)}',
            f"bandwidth = {link['bandwidth']}",
        ]
        lines += [f"efficiency = {{ {parts} }}"]
        lines += [
            f"{part} = {link[part]}" for part in ("latency", "fixed", "sharpness", "shared") if part in link
        ]
    return "\n".join(lines) + "\n" + NETWORK


def _write_card(
    card: str, values: dict[str, float], errors: dict[tuple[str, str], float], rows: int
) -> list[str]:
    lines = [
        "",
        f"[cards.{card}]",
        f'host = "{HOST_OF.get(card, "desktop")}"',
        f'source = "{SOURCE.format(rows)}"',
    ]
    lines += ["", f"[cards.{card}.speed]"]
    lines += _write_speeds(card, values)
    own = {
        kind: errors.get((card, kind)) or errors.get((SAME_CHIP.get(card, ""), kind))
        for kind in ("training", "inference")
    }
    lines += ["", f"[cards.{card}.error]"]
    lines += [f"{kind} = {error:.2f}" for kind, error in own.items() if error is not None]
    return lines


def _write_speeds(card: str, values: dict[str, float]) -> list[str]:
    speeds = {name: values[f"speed.{card}.{name}"] for name in FAMILIES}
    return [f"{name} = {factor:.2f}" for name, factor in speeds.items() if abs(factor - 1) > 0.005]


def _key(name: str) -> str:
    return f'"{name}"' if "." in name else name


def _write_tiles(found: dict[str, Any]) -> list[str]:
    return [
        f"efficiency = {found['efficiency']}",
        f"contraction = {found['contraction']:.0f}",
        f"wave = {found['wave']}",
    ]


def _write_error(found: dict[str, Any]) -> str:
    return f"{found['rows']} rows not fitted: mean error {found['mean']:.1%}, median {found['median']:.1%}"


# --- docs/accuracy.md


def write_accuracy(
    halves: list[tuple[Row, float]], cards: list[tuple[Row, float]], products: dict[str, Any], links: dict[str, Any],
    errors: dict[tuple[str, str], float],
) -> str:  # fmt: skip
    inside = [
        abs(np.log(found / row.seconds)) <= errors.get((row.card, row.facts["kind"]), 9.0)
        for row, found in halves
    ]
    left_out = {id(row): found for row, found in cards}
    groups: dict[tuple[str, str], list[tuple[Row, float]]] = defaultdict(list)
    for row, found in halves:
        groups[row.card, _name_kind(row)].append((row, found))
    lines = [
        f"All {len(halves)} rows, each predicted by a fit of the half that its program is not in: {_write_errors(halves)}; "
        f"{np.mean(inside):.0%} inside the stated interval. Predicted by a fit that saw no step of the row's card: "
        f"{_write_errors(cards)}.",
        "",
        "| card | what | rows | mean error | median | bias | card left out |",
        "|---|---|---|---|---|---|---|",
    ]
    for (card, kind), pairs in sorted(groups.items()):
        misses = [found / row.seconds - 1 for row, found in pairs]
        other = [abs(left_out[id(row)] / row.seconds - 1) for row, _ in pairs]
        scored = "" if len(pairs) >= 20 else " (few)"
        lines.append(
            f"| {card} | {kind} | {len(pairs)}{scored} | {np.mean(np.abs(misses)):.1%} | {np.median(np.abs(misses)):.1%} "
            f"| {np.mean(misses):+.1%} | {np.mean(other):.1%} |"
        )
    lines += [
        "",
        "The worst rows:",
        "",
        "| program | card | measured | predicted | error |",
        "|---|---|---|---|---|",
    ]
    for row, found in sorted(halves, key=lambda pair: -abs(np.log(pair[1] / pair[0].seconds)))[:15]:
        lines.append(
            f"| {_name_program(row)} | {row.card} | {row.seconds:.4f} s | {found:.4f} s | {found / row.seconds - 1:+.0%} |"
        )
    lines += [
        "",
        "Kernels, on rows that were not fitted:",
        "",
        "| what | rows | mean error | median |",
        "|---|---|---|---|",
    ]
    named = [(f"products in bfloat16 on {found['card']}", found) for found in products.values()]
    named += [(f"collectives of 2, 4 and 8 cards over {name}", link) for name, link in links.items()]
    lines += [f"| {name} | {f['rows']} | {f['mean']:.1%} | {f['median']:.1%} |" for name, f in named]
    return "\n".join(lines)


def _name_kind(row: Row) -> str:
    if row.facts["source"] == "llm-foundry":
        return "decoders, sharded over 8 cards"
    if "image" not in row.facts:
        return f"decoders, {row.facts['kind']}"
    return f"vision models, {row.facts['kind']}, {'channels last' if 'nhwc' in row.facts['source'] else 'channels first'}"


def _name_program(row: Row) -> str:
    facts = row.facts
    size = (
        f"{facts['image']} px"
        if "image" in facts
        else f"{facts['context']} tokens, {facts['precision']}, {facts['phase']}"
    )
    return f"{facts['model']}, {size}, batch {facts['batch']}"


def _write_errors(pairs: Sequence[tuple[Row, float]]) -> str:
    errors = [abs(found / row.seconds - 1) for row, found in pairs]
    return f"mean error {np.mean(errors):.1%}, median {np.median(errors):.1%}"


def replace_section(path: Path, text: str) -> None:
    begin, end = MARKS
    before, _, rest = path.read_text().partition(begin)
    _, _, after = rest.partition(end)
    path.write_text(f"{before}{begin}\n{text}\n{end}{after}")
