"""Links between cards, from NCCL's times on 2, 4 and 8 of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from tools.fit_kernels.kernels import read_table
from understudy.timing.collectives import Link, collective_seconds

LINKS = {
    "NVLink 3": ("a100_sxm", 300), "NVLink 4": ("h100_sxm", 450), "NVLink 5": ("b200_sxm", 900), "PCIe 4 x16": ("l40s", 32),
}  # fmt: skip
"""The card that has it, and GB/s of a card in one direction."""
KINDS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
}
BYTES = {"half": 2, "int8": 1}


def fit_link(folder: Path, name: str) -> dict[str, Any]:
    card, bandwidth = LINKS[name]
    table = read_table(folder, card, "comm")
    rows = [
        (KINDS[row.op_name], int(row.num_gpus), row.message_size * BYTES[row.nccl_dtype], row.latency * 1e-3)
        for row in table.itertuples()
        if row.op_name in KINDS
    ]
    kinds = list(KINDS.values())

    is_shared = name.startswith("PCIe")

    def make(x: np.ndarray) -> Link:
        efficiency = dict(zip(kinds, np.exp(x[: len(kinds)]).tolist(), strict=True))
        latency, fixed, sharpness, shared = (float(value) for value in np.exp(x[len(kinds) :]))
        return Link(
            name, bandwidth * 1e9, efficiency, latency, fixed, sharpness, shared if is_shared else None
        )

    def misses(x: np.ndarray, chosen: list[Any]) -> np.ndarray:
        link = make(x)
        return np.array([np.log(collective_seconds(kind, n, size, link) / s) for kind, n, size, s in chosen])

    start = np.log(np.array([0.7] * len(kinds) + [1e-6, 5e-6, 1.0, bandwidth * 0.5e9]))
    least, most = np.full(len(start), -np.inf), np.full(len(start), np.inf)
    least[-2], most[-2] = np.log(0.4), np.log(2.5)  # of the sharpness
    x = least_squares(
        lambda x: misses(x, rows[::2]), start, bounds=(least, most), loss="soft_l1", f_scale=0.2
    ).x
    error = np.abs(np.exp(misses(x, rows[1::2])) - 1)
    link = make(x)
    efficiency = {kind: round(float(part), 2) for kind, part in link.efficiency.items()}
    return {
        "bandwidth": bandwidth,
        "efficiency": efficiency | {"other": efficiency["all_gather"]},
        "latency": float(f"{link.latency:.2g}"),
        "fixed": float(f"{link.fixed:.2g}"),
        "sharpness": round(link.sharpness, 2),
        **({"shared": round(link.shared / 1e9, 1)} if link.shared else {}),
        "mean": float(error.mean()),
        "median": float(np.median(error)),
        "rows": len(error),
    }
