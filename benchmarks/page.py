"""The figures as Markdown, written between two marks of a page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"


def rows_as_markdown(headings: list[str], rows: list[list[str]]) -> str:
    lines = [headings, ["---"] + ["--:"] * (len(headings) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def figures(result: dict[str, Any]) -> str:
    phases = [
        [
            s["phase"],
            f"**{s['ratio']:.1f}×**",
            f"{s['target']:.0f}×",
            f"{s['least_ratio']:.1f}× ({s['least_model']})",
        ]
        for s in result["summary"]
    ]
    models = [
        [
            f"{row['model']}, {row['phase']}",
            f"{row['operators']:,}",
            f"{row['understudy_seconds'] * 1e3:,.1f}",
            f"{row['torch_seconds'] * 1e3:,.1f}",
            f"{row['ratio']:.1f}×",
            f"{row['floors']:.2f}" if "floors" in row else "",
        ]
        for row in result["models"]
    ]
    parts = [
        rows_as_markdown(["geometric mean over the models", "ratio", "target", "least"], phases),
        rows_as_markdown(
            ["model and phase", "operators", "understudy ms", "torch ms", "ratio", "floors"], models
        ),
        processes(result["processes"]),
    ]
    return "\n\n".join(parts)


def processes(found: dict[str, Any]) -> str:
    ours, theirs = (found[f"{name}_bytes_per_tensor"] for name in ("understudy", "torch"))
    rows = [["first use of a name, beyond `import torch`", f"{found['import_seconds']:.2f} s", ""]]
    rows += [
        [f"memory of a tensor, {kind}", f"{ours[kind]:,.0f} B", f"{theirs[kind]:,.0f} B"] for kind in ours
    ]
    if "torch_405b" in found:
        large = [found[f"{name}_405b"] for name in ("understudy", "torch")]
        rows.append(["building 405 billion parameters", *[f"{x['seconds']:.2f} s" for x in large]])
        rows.append(["memory of it", *[f"{x['bytes'] / 1e6:,.0f} MB" for x in large]])
    return rows_as_markdown(["in a process of its own", "understudy", "torch"], rows)


def write_figures(page: Path, result: dict[str, Any]) -> None:
    text = page.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n\n{figures(result)}\n\n{END}{after}")
