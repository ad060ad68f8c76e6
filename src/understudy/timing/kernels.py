"""The seconds of a kernel on a card, from its family, sizes, FLOPs and bytes.

    seconds_of(kernel, curve)       the larger of computing and moving bytes, and a fixed time beside

Products of matrices go by tiles: a tile of the result is the work of one multiprocessor, and the last wave of tiles may be
nearly empty. Convolutions are products whose operands are gathered from images.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil

import torch

from understudy.ops.traits import kernel_families as families
from understudy.ops.traits.kernel_families import Kernel
from understudy.timing.curves import TILE_SIZES, Curve, Tiles

PLAIN_MATMUL = "matmul_float32"
SPLITS = (1, 2, 4, 8, 16, 64, 256)
"""Parts of a contraction that are computed apart, where there are few tiles."""
SHARPNESS = 3
"""How sharp the corner is between computing and moving bytes: they overlap, but not wholly."""
LAYOUTS = (
    families.CONVOLUTION, families.GROUPED, families.DEPTHWISE, families.NORM, families.POOL, families.BATCH_NORM,
)  # fmt: skip
QUERIES = 128
"""Rows of a tile of attention."""
CAUSAL_KEYS = 450
"""Keys that a row of tiles loses with a causal mask."""
NARROW = 64
"""Widths of heads up to here keep tensor cores less busy."""
TRANSFER = 12e9
"""Bytes in a second between host and card, from memory that is not pinned: about half of PCIe 4."""


def seconds_of(kernel: Kernel, curve: Curve) -> float:
    family = kernel.family
    if family in (families.TO_CARD, families.TO_HOST):
        return curve.fixed + kernel.bytes / TRANSFER
    family = name_family(kernel)
    speed = curve.speed.get(family, 1.0)
    memory = kernel.bytes / (curve.bandwidth * curve.memory.get(family, curve.memory[families.ELEMENTWISE]))
    compute = further = 0.0
    if kernel.flops:
        compute = ideal_seconds(kernel, curve) / curve.compute.get(family, 1.0)
    for variant in name_variants(kernel):
        factor = curve.factors.get(variant, 1.0)
        compute, memory = compute / factor, memory / factor
        if variant in curve.passes:
            further += curve.passes[variant] * kernel.bytes / curve.bandwidth
    if compute:
        memory = (compute**SHARPNESS + memory**SHARPNESS) ** (1 / SHARPNESS)
    return (curve.fixed + (memory + further) / speed) / curve.corrections.get(family, 1.0)


def name_family(kernel: Kernel) -> str:
    """The family in the curves: products without tensor cores have their own."""
    is_plain = kernel.family == families.MATMUL and name_dtype(kernel) in ("float32", "float64")
    return PLAIN_MATMUL if is_plain else kernel.family


def name_variants(kernel: Kernel) -> list[str]:
    """What the speed of a family depends on beside its sizes."""
    family = kernel.family
    names = []
    if family in LAYOUTS:
        names.append(f"{family}.{'channels_last' if kernel.is_channels_last else 'channels_first'}")
    if family in (families.ATTENTION, families.ATTENTION_BACKWARD) and kernel.sizes[-1] <= NARROW:
        names.append(f"{family}.narrow")
    if kernel.part != families.FORWARD:
        names.append(f"{family}.{kernel.part.replace(' ', '_')}")
    return names


def name_dtype(kernel: Kernel) -> str:
    """The dtype of the units that compute it: float32 may be TF32."""
    name = str(kernel.dtype).removeprefix("torch.")
    if kernel.dtype is torch.float32:
        if kernel.family in (families.CONVOLUTION, families.GROUPED):
            is_tf32 = torch.backends.cudnn.allow_tf32
        else:
            is_tf32 = torch.get_float32_matmul_precision() != "highest"
        return "tf32" if is_tf32 else name
    return name


def ideal_seconds(kernel: Kernel, curve: Curve) -> float:
    """Computing time of a kernel whose family reaches the peak with large sizes."""
    if kernel.family == families.DEPTHWISE:  # on no tensor cores
        return kernel.flops / curve.peak("float32")
    peak = curve.peak(name_dtype(kernel))
    multiprocessors = curve.card.multiprocessors or 1
    if not kernel.sizes:
        return kernel.flops / peak
    if kernel.family in (families.ATTENTION, families.ATTENTION_BACKWARD):
        return kernel.flops / peak / _attention_utilisation(kernel, multiprocessors, curve.tiles)
    return _product_seconds(kernel.sizes, peak, curve.bandwidth, multiprocessors, curve.tiles)


def _attention_utilisation(kernel: Kernel, multiprocessors: int, tiles: Tiles) -> float:
    """The part of the multiprocessors' work that is not lost to part-filled tiles, waves, and the ends of rows. With a
    causal mask, the tiles on the diagonal are computed as a whole."""
    heads, queries, keys, width = kernel.sizes
    products = 2 if kernel.family == families.ATTENTION else 5
    is_causal = kernel.flops < 1.5 * heads * queries * keys * width * products
    lost = CAUSAL_KEYS if is_causal else QUERIES
    count = ceil(queries / QUERIES)
    waves = heads * count / multiprocessors
    used = waves / max(1.0, waves + tiles.wave * (ceil(waves) - waves))
    return used * queries / (count * QUERIES) * keys / (keys + lost)


@lru_cache(maxsize=1 << 16)
def _product_seconds(
    sizes: tuple[int, ...], peak: float, bandwidth: float, multiprocessors: int, tiles: Tiles
) -> float:
    """Time with the best tiles of the result and parts of the contraction."""
    batch, rows, columns, length = sizes
    per_multiprocessor = peak / multiprocessors
    best = float("inf")
    for (first, second), efficiency in zip(TILE_SIZES, tiles.efficiency, strict=True):
        for height, width in {(first, second), (second, first)}:
            count = batch * ceil(rows / height) * ceil(columns / width)
            for parts in SPLITS:
                waves = count * parts / multiprocessors
                waves = max(1.0, waves + tiles.wave * (ceil(waves) - waves))
                work = 2 * height * width * (length / parts + min(tiles.contraction, 4 * length))
                seconds = waves * work / (per_multiprocessor * efficiency)
                if parts > 1:  # the parts are written and summed up
                    seconds += parts * batch * rows * columns * 4 / bandwidth
                best = min(best, seconds)
    return best
