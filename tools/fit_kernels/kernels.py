"""Tables of measured kernels: products and attention become parameters of tiles, collectives latencies and bandwidths."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from understudy.ops.traits.kernel_families import ATTENTION, MATMUL, Kernel
from understudy.simulation.catalogue import find_card
from understudy.timing.curves import TILE_SIZES, find_curve
from understudy.timing.kernels import SPLITS, seconds_of

CARDS = {"a100_sxm": "a100-80", "h100_sxm": "h100", "h200_sxm": "h200", "b200_sxm": "b200", "l40s": "l40s"}
SAMPLES = 5000
COMPUTE = 0.56
"""The part of the peak that attention's speeds are relative to."""
START = (0.9, 0.95, 0.85, 0.6, 0.6, 0.5, 160.0, 0.4, 3e-6, 0.8)


def read_table(folder: Path, name: str, subject: str) -> Any:
    pandas = importlib.import_module("pandas")
    (path,) = sorted((folder / "kernels").glob(f"{name}-{subject}*.parquet"))
    return pandas.read_parquet(path)


def sample_products(folder: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Sizes (rows, columns, length) and seconds, of bfloat16."""
    table = read_table(folder, name, "gemm")
    table = table[(table.gemm_dtype == "bfloat16") & (table.m >= 16) & (table.n >= 64) & (table.k >= 64)]
    table = table.iloc[np.random.default_rng(0).permutation(len(table))[:SAMPLES]]
    return table[["m", "n", "k"]].to_numpy(float), table.latency.to_numpy(float) * 1e-3


def product_seconds(parameters: np.ndarray, sizes: np.ndarray, card: Any) -> np.ndarray:
    """As `understudy.timing.kernels`, for many products at once."""
    peak, multiprocessors = card.throughput["bfloat16"], card.multiprocessors
    efficiency = np.cumprod(parameters[: len(TILE_SIZES)])
    contraction, wave, fixed, memory = parameters[len(TILE_SIZES) :]
    m, n, k = sizes.T
    best = np.full(len(m), np.inf)
    for (first, second), part in zip(TILE_SIZES, efficiency, strict=True):
        for a, b in {(first, second), (second, first)}:
            count = np.ceil(m / a) * np.ceil(n / b)
            for parts in SPLITS:
                waves = count * parts / multiprocessors
                waves = np.maximum(1, waves + wave * (np.ceil(waves) - waves))
                seconds = (
                    waves
                    * 2
                    * a
                    * b
                    * (k / parts + np.minimum(contraction, 4 * k))
                    / (peak / multiprocessors * part)
                )
                if parts > 1:
                    seconds = seconds + parts * m * n * 4 / card.bandwidth
                best = np.minimum(best, seconds)
    moved = 2 * (m * k + n * k + m * n) / (card.bandwidth * memory)
    return fixed + (best**3 + moved**3) ** (1 / 3)


def fit_products(folder: Path, name: str) -> dict[str, Any]:
    """Parameters from one half of the rows, error on the other."""
    card = find_card(CARDS[name])
    sizes, seconds = sample_products(folder, name)
    fitted = np.arange(len(seconds)) % 2 == 0
    start = np.log(np.array(START))
    spread = np.array([0.15, 0.1, 0.1, 0.2, 0.2, 0.3, 0.5, 0.5, 0.3, 0.1])

    def residuals(x: np.ndarray) -> np.ndarray:
        found = product_seconds(np.exp(x), sizes[fitted], card)
        return np.concatenate([np.log(found / seconds[fitted]) * 10, (x - start) / spread])

    found = np.exp(least_squares(residuals, start, loss="soft_l1", max_nfev=25).x)
    error = np.abs(product_seconds(found, sizes[~fitted], card) / seconds[~fitted] - 1)
    return {
        "card": card.key,
        "efficiency": [round(float(part), 3) for part in np.cumprod(found[: len(TILE_SIZES)])],
        "contraction": round(float(found[-4]), 0),
        "wave": round(float(found[-3]), 2),
        "mean": float(error.mean()),
        "median": float(np.median(error)),
        "rows": len(error),
    }


def sample_attention(folder: Path, name: str, source: str, samples: int = 800) -> list[tuple[Kernel, float]]:
    """Causal prefill in bfloat16 without a window, as kernels with their seconds."""
    import torch

    table = read_table(folder, name, "attention")
    table = table[(table.kernel_source == source) & (table.kv_cache_dtype == "bfloat16") & (table.isl >= 128)]
    if "window_size" in table:
        table = table[table.window_size == 0]
    table = table[table.head_dim.isin((64, 128))]
    table = table.iloc[np.random.default_rng(0).permutation(len(table))[:samples]]
    found = []
    for row in table.itertuples():
        heads = int(row.batch_size * row.num_heads)
        length, width = int(row.isl), int(row.head_dim)
        flops = 2.0 * heads * length * length * width
        moved = 2.0 * length * width * (2 * heads + 2 * row.batch_size * row.num_key_value_heads)
        kernel = Kernel("attention", flops, moved, torch.bfloat16, (heads, length, length, width))
        found.append((kernel, float(row.latency) * 1e-3))
    return found


IN_TRAINING = {"h100_sxm": 0.85, "h200_sxm": 0.85, "a100_sxm": 0.9}
"""The speed of attention in a step, relative to attention alone: cards throttle. Products lose 28% on an H100 and some 20%
on an A100; attention keeps the tensor cores less busy, and is taken to lose half as much."""
LONG = 4096
"""Shorter calls are bound by what the tables measure beside the kernel."""


def fit_attention(folder: Path, name: str) -> float:
    """The speed of attention in training, relative to the curve of all cards: that of forward passes over long sequences."""
    sources = read_table(folder, name, "attention").kernel_source.unique()
    curve = find_curve(find_card(CARDS[name]))
    speed = {**curve.speed, ATTENTION: 1.0}
    curve = replace(curve, speed=speed, compute={**curve.compute, ATTENTION: COMPUTE})
    rows = max((sample_attention(folder, name, source) for source in sources), key=len)
    rows = [row for row in rows if row[0].sizes[1] >= LONG]
    ratio = float(np.median([seconds_of(kernel, curve) / seconds for kernel, seconds in rows]))
    return round(ratio * IN_TRAINING.get(name, 1.0), 2)


def product_kernel(m: int, n: int, k: int) -> Kernel:
    import torch

    return Kernel(MATMUL, 2.0 * m * n * k, 2.0 * (m * k + n * k + m * n), torch.bfloat16, (1, m, n, k))
