"""A rehearsal made by hand, whose names are as hostile as they get."""

from __future__ import annotations

from understudy.report.rehearsal import (
    CATEGORIES,
    Contributor,
    Coverage,
    Device,
    LineRow,
    MemorySpan,
    MemoryTimeline,
    ModuleRow,
    OperatorRow,
    Peak,
    PhaseRow,
    Rehearsal,
)

MiB = 1 << 20
HOSTILE = '</script><script>document.title="harmed"</script><img src=x onerror="document.title=\'harmed\'">\x1b[2J&|`'


def make_rehearsal(
    layers: int = 4, extra: int = 0, name: str = "model.py", verdict: str = "fits"
) -> Rehearsal:
    """`extra` bytes are activations of one more line."""
    activations = [
        Contributor("activations", f"layers.{i}.mlp", f"{name}:{20 + k}", "aten.mm.default", 1, MiB)
        for i in range(layers)
        for k in range(3)
    ]
    weights = [
        Contributor("parameters", f"layers.{i}.mlp", f"{name}:5", "aten.empty", 1, 4 * MiB)
        for i in range(layers)
    ]
    more = [Contributor("activations", "head", f"{name}:99", "aten.exp.default", 1, extra)] if extra else []
    contributors = [*weights, *activations, *more]
    allocated = sum(entry.bytes for entry in contributors)
    categories = {
        category: sum(c.bytes for c in contributors if c.category == category) for category in CATEGORIES
    }
    lines: dict[str, int] = {}
    for entry in contributors:
        lines[entry.line] = lines.get(entry.line, 0) + entry.bytes
    points = 2 * len(contributors) + 1
    heights = [min(i, points - 1 - i) / (points // 2) for i in range(points)]
    return Rehearsal(
        verdict=verdict,
        headline=f"{verdict} on h100: {name}",
        device=Device("h100", "NVIDIA H100 80GB HBM3", "cuda", limit_bytes=2 * allocated),
        steps=2,
        peak=Peak(
            allocated_bytes=allocated, reserved_bytes=allocated + 2 * MiB, active_bytes=allocated, requested_bytes=allocated,
            fragmentation_bytes=2 * MiB, step=1, phase="backward", module="layers.1.mlp", line=f"{name}:22",
            contributors=contributors,
        ),
        categories=categories,
        modules=[
            ModuleRow("", "Model"),
            *(ModuleRow(f"layers.{i}", "Block") for i in range(layers)),
            *(
                ModuleRow(f"layers.{i}.mlp", "Mlp", parameters=4 * MiB, activations=3 * MiB, bytes=7 * MiB, macs=10**9, calls=2)
                for i in range(layers)
            ),
            ModuleRow("head", name, activations=extra, bytes=extra),
        ],
        lines=[LineRow(line, f"x = {name}(x)", size, 1, size) for line, size in sorted(lines.items(), key=lambda i: -i[1])],
        macs=layers * 10**9,
        flops=2 * layers * 10**9,
        coverage=Coverage(100, 99, {name: 1}),
        operators=[OperatorRow("aten.mm.default", "products", 12, 10**9, 2 * 10**9, 0, 5 * MiB)],
        phases=[PhaseRow(1, "forward", allocated, 12, 1, 2, 3, 4)],
        timeline=MemoryTimeline(
            operators=[3 * i for i in range(points)],
            steps=[1] * points,
            phases=["forward" if i < points // 2 else "backward" for i in range(points)],
            bytes={category: [int(height * size) for height in heights] for category, size in categories.items()},
            peak_index=points // 2,
            spans=[
                MemorySpan(i // 2, points - 1 - i // 2, entry.bytes, 1, entry.category, entry.module, entry.line)
                for i, entry in enumerate(contributors)
            ],
        ),
        answers=[{"line": name, "read": "item", "tensor": "f32[]@cuda:0", "answer": 0.5, "count": 3}],
        assumptions=[f"losses of {name} fall"],
        software={"cuda": "13.0"},
    )  # fmt: skip
