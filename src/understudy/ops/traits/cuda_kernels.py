"""Temporary memory of CUDA kernels: attention, sorts, scans, selections, and gradients of indexing.

Sizes of sorts are those of torch 2.13 for an H100, to the byte: the number of elements for each block depends on the
capability.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from math import ceil, log, log2, prod

import torch

from understudy.ops.shared.layouts import view_strides
from understudy.ops.traits.scratch import (
    HALF,
    NO_SCRATCH,
    NUMBER_DTYPES,
    Maybe,
    Results,
    Scratch,
    align,
    byte_count,
    copy_if,
    divide_up,
    for_a_while,
    scratch,
)
from understudy.spec import TensorSpec
from understudy.spec.device_facts import DeviceFacts

# --- attention


@scratch("_scaled_dot_product_flash_attention")
def of_flash(
    facts: DeviceFacts, made: Results, query: TensorSpec, key: TensorSpec, value: TensorSpec, dropout_p: float = 0.0,
    *rest: object, **settings: object,
) -> Scratch:  # fmt: skip
    """If there are too few queries to fill the card, keys are split, and each part has its own result. One query of grouped
    heads is computed as one head with several queries. Random numbers need a copy of the seed."""
    if dropout_p:
        return Scratch((16,))
    batch, heads, rows, width = query.numbers.shape
    return _split_keys(facts, batch, heads, rows, width, *key.numbers.shape[1:3])


@scratch("_flash_attention_forward")
def of_flash_by_rows(
    facts: DeviceFacts, made: Results, query: TensorSpec, key: TensorSpec, value: TensorSpec, cum_seq_q: object,
    cum_seq_k: object, max_q: object, max_k: object, dropout_p: float = 0.0, *rest: object, **settings: object,
) -> Scratch:  # fmt: skip
    """Keys of packed sequences are not split."""
    if dropout_p:
        return Scratch((16,))
    if cum_seq_q is not None:
        return NO_SCRATCH
    batch, rows, heads, width = query.numbers.shape
    columns, groups = key.numbers.shape[1:3]
    return _split_keys(facts, batch, heads, rows, width, groups, columns)


def _split_keys(
    facts: DeviceFacts, batch: int, heads: int, rows: int, width: int, groups: int, columns: int
) -> Scratch:
    if rows == 1 and heads > groups:
        heads, rows = groups, heads // groups
    block = 256 if width <= 64 else 128 if width <= 128 else 64
    tasks = batch * heads * divide_up(rows, 64)
    splits = _count_splits(tasks, 2 * facts.multiprocessors, divide_up(columns, block))
    results = 4 * splits * batch * heads * rows
    return (
        Scratch((results, results * align(width, 32 if width <= 192 else 256))) if splits > 1 else NO_SCRATCH
    )


def _count_splits(tasks: int, processors: int, blocks: int) -> int:
    """The smallest number of parts that keeps the processors nearly as busy as the best number."""
    if tasks >= 0.8 * processors:
        return 1
    busy = {}
    for splits in range(1, min(128, processors, blocks) + 1):
        if splits == 1 or divide_up(blocks, splits) != divide_up(blocks, splits - 1):
            waves = tasks * splits / processors
            busy[splits] = waves / ceil(waves)
    most = max(busy.values(), default=0.0)
    return next((splits for splits, share in busy.items() if share >= 0.85 * most), 1)


@scratch("_scaled_dot_product_efficient_attention")
def of_efficient(
    facts: DeviceFacts, made: Results, query: TensorSpec, key: TensorSpec, value: TensorSpec, *rest: object,
    **settings: object,
) -> Scratch:  # fmt: skip
    """Heads of half types that are too wide for registers are summed up in float32."""
    is_wide = query.dtype in HALF and value.numbers.shape[3] > 128
    return Scratch((4 * int(made[0].numel),)) if is_wide else NO_SCRATCH


def _is_laid_out_by_rows(spec: TensorSpec) -> bool:
    """Whether the heads of one position are adjacent in memory."""
    _, heads, rows, width = spec.numbers.shape
    expected = (rows * heads * width, width, heads * width, 1)
    return all(
        size == 1 or step == wanted
        for size, step, wanted in zip(spec.shape, spec.stride, expected, strict=True)
    )


@scratch("_scaled_dot_product_flash_attention_backward")
def of_flash_backward(
    facts: DeviceFacts, made: Results, grad: TensorSpec, query: TensorSpec, key: TensorSpec, value: TensorSpec,
    out: TensorSpec, *rest: object, **settings: object,
) -> Scratch:  # fmt: skip
    batch, heads, rows, width = query.numbers.shape
    groups, columns = key.numbers.shape[1:3]
    copies = [size for spec in (grad, out) for size in copy_if(not _is_laid_out_by_rows(spec), spec)]
    sums = _flash_backward_sums(query, batch * align(rows, 128), heads, width, groups, batch * columns)
    return Scratch((*copies, *sums))


@scratch("_flash_attention_backward")
def of_flash_backward_by_rows(
    facts: DeviceFacts, made: Results, grad: TensorSpec, query: TensorSpec, key: TensorSpec, value: TensorSpec,
    out: TensorSpec, logsumexp: TensorSpec, cum_seq_q: TensorSpec | None, *rest: object, **settings: object,
) -> Scratch:  # fmt: skip
    """Each packed sequence has 128 additional rows."""
    heads, width = query.numbers.shape[-2:]
    groups, columns = key.numbers.shape[-2], prod(key.numbers.shape[:-2])
    if cum_seq_q is None:
        rows = query.numbers.shape[0] * align(query.numbers.shape[1], 128)
    else:
        rows = query.numbers.shape[0] + 128 * (cum_seq_q.numbers.shape[0] - 1)
    copies = copy_if(not grad.is_contiguous, grad)
    return Scratch((*copies, *_flash_backward_sums(query, rows, heads, width, groups, columns)))


def _flash_backward_sums(
    query: TensorSpec, rows: int, heads: int, width: int, groups: int, columns: int
) -> list[int]:
    """Delta, the query's gradient in float32, and keys and values of heads that share them."""
    sizes = [4 * heads * rows, 4 * rows * heads * align(width, 32 if width <= 128 else 64)]
    if groups != heads:
        sizes += 2 * [columns * heads * width * query.itemsize]
    return sizes


@scratch("understudy::flex_attention_backward")
def of_flex_backward(
    facts: DeviceFacts, made: Results, grad: TensorSpec, query: TensorSpec, key: TensorSpec, value: TensorSpec,
    out: TensorSpec, logsumexp: TensorSpec,
) -> Scratch:  # fmt: skip
    """The sums of gradient times result, in float32."""
    return Scratch((4 * int(logsumexp.numel),))


@scratch("_scaled_dot_product_efficient_attention_backward")
def of_efficient_backward(
    facts: DeviceFacts, made: Results, grad: TensorSpec, query: TensorSpec, key: TensorSpec, value: TensorSpec,
    bias: Maybe, out: Maybe = None, logsumexp: Maybe = None, seed: Maybe = None, offset: Maybe = None,
    dropout_p: float = 0.0, *rest: object, **settings: object,
) -> Scratch:  # fmt: skip
    """The gradient by rows; delta, for float32 from a product of gradient and result; and for each head tiles of the
    query's gradient in float32, each with a lock. Half types that do not fit into registers have such tiles for key and
    value, too."""
    batch, heads, rows, width = query.numbers.shape
    columns, value_width = key.numbers.shape[2], value.numbers.shape[3]
    block_rows, block_columns = _efficient_block(
        max(width, value_width), query.dtype in HALF, dropout_p > 0, facts
    )
    tile = 16 + 4 * block_rows * block_columns if facts.capability >= (7, 0) or query.dtype in HALF else 0
    elements = divide_up(rows, block_rows) * divide_up(width, block_columns) * tile // 4
    if query.dtype in HALF and max(width, value_width) > block_rows:
        splits = max(1, min(divide_up(columns, block_columns), 200 // (batch * heads)))
        if batch * heads >= 256 and columns <= 2 * block_columns:
            splits = 1
        elements += splits * block_columns * (align(width, block_rows) + align(value_width, block_rows))
    delta = 4 * batch * heads * rows
    by_product = (byte_count(grad), delta, delta, -delta, -byte_count(grad))
    tiles = 4 * batch * heads * align(elements, 4)
    copied = copy_if(not _is_laid_out_by_rows(grad), grad)
    sizes = (*copied, *((delta,) if query.dtype in HALF else by_product), tiles)
    return Scratch(sizes, is_exact=max(width, value_width) <= 64)


def _efficient_block(width: int, is_half: bool, has_dropout: bool, facts: DeviceFacts) -> tuple[int, int]:
    """Rows and columns of a tile, for the first kernel in torch's list that supports heads of this width, and whose tiles
    fit into the shared memory of the device."""
    has_little_memory = facts.capability in ((8, 6), (8, 7), (8, 9)) or facts.capability >= (12, 0)
    if width <= 64 or facts.capability < (7, 0) or (facts.capability < (8, 0) and not is_half):
        return 64, 64
    if facts.capability < (8, 0):
        return 128, 64
    if is_half and width <= 128:
        if facts.capability in ((8, 6), (8, 9)) and width <= 96 and not has_dropout:
            return 128, 64
        return (64, 64) if has_little_memory else (128, 128)
    return (64, 64) if has_little_memory else (128, 64)


@scratch("_scaled_dot_product_cudnn_attention_backward")
def of_cudnn_backward(
    facts: DeviceFacts, made: Results, grad: TensorSpec, query: TensorSpec, key: TensorSpec, value: TensorSpec,
    *rest: object, **settings: object,
) -> Scratch:  # fmt: skip
    """An estimate, because cuDNN decides at run time: the accumulator of the query's gradient, which such kernels need."""
    batch, heads, rows, width = query.numbers.shape
    accumulated = 4 * batch * heads * align(rows, 128) * width
    return Scratch((accumulated + 4 * batch * heads * rows,), bound=accumulated, is_exact=False)


@scratch("_native_multi_head_attention")
def of_native_attention(
    facts: DeviceFacts, made: Results, query: TensorSpec, key: TensorSpec, value: TensorSpec, width: int, heads: int,
    *rest: object, need_weights: bool = True, **settings: object,
) -> Scratch:  # fmt: skip
    """Queries, keys and values side by side, and the heads' results; with weights, the scores, and a copy by heads."""
    wants_weights = bool(rest[5]) if len(rest) > 5 else need_weights
    all_three, one = 3 * byte_count(query), byte_count(query)
    if not wants_weights:
        return Scratch((all_three, one), is_exact=False)
    batch, rows = query.numbers.shape[:2]
    scores = batch * heads * rows * key.numbers.shape[1] * query.itemsize
    return Scratch((all_three, *for_a_while(all_three), scores, one), is_exact=False)


@scratch("_transformer_encoder_layer_fwd")
def of_encoder_layer(
    facts: DeviceFacts,
    made: Results,
    x: TensorSpec,
    width: int,
    heads: int,
    *rest: object,
    **settings: object,
) -> Scratch:
    """Attention, a norm with its mean and deviation for each row, and the wide layer."""
    one, rows = byte_count(x), int(x.numel) // max(1, width)
    wide = next(iter(spec.numbers.shape[0] for spec in rest[11:12] if isinstance(spec, TensorSpec)), width)
    hidden = rows * wide * x.itemsize
    norm = for_a_while(one, 4 * rows, 4 * rows)
    return Scratch((*for_a_while(3 * one, one), *norm, hidden, one, -hidden, *norm), is_exact=False)


# --- sorting and operators based on it

ONE_TILE = 2304
"""Pairs of 8 bytes that a single block sorts."""
SORT_TILES = {1: 3456, 2: 5632, 4: 5376, 8: 4608}
"""Pairs that a block sorts at once, by the bytes of a key, with values of 8 bytes: of the policy for Hopper."""
SEGMENT_TILE = 5760
MOST_IN_SHARED_MEMORY = 4096
FEW_ROWS, LONG_ROWS = 128, 1_000_000


def _cub(elements: int, key: int = 8, value: int = 8, bits: int | None = None, tile: int = 0) -> int:
    """Temporary storage of cub's radix sort of pairs: second buffers of keys and values if there are several rounds of 8
    bits, counts of digits, and messages between blocks. Each part is aligned."""
    if elements <= ONE_TILE:
        return 1
    rounds = divide_up(8 * key if bits is None else max(1, bits), 8)
    buffers = align(key * elements, 256) + align(value * elements, 256) if rounds > 1 else 0
    blocks = divide_up(elements, tile or SORT_TILES.get(key, 4608))
    return buffers + 2048 * rounds + 256 + 1024 * blocks + 255


def _scan(elements: int, size: int, tile: int) -> int:
    """Temporary storage of a scan by cub: the state of each tile, and of some before the first."""
    return align(size * (divide_up(elements, tile) + 32), 256) + 256 + 255


@scratch("sort")
def of_sort(
    facts: DeviceFacts,
    made: Results,
    x: TensorSpec,
    *rest: object,
    dim: int | None = None,
    **settings: object,
) -> Scratch:
    """Short rows are sorted in shared memory. A few long rows are sorted together, and then by their row; many rows, or
    very long ones, are sorted one by one. Dimensions other than the last are moved to the end first."""
    dim = next((int(value) for value in rest if isinstance(value, int)), -1) if dim is None else dim
    n, key = int(x.numel), x.itemsize
    length = x.numbers.shape[dim] if x.ndim else 1
    rows = n // max(1, length)
    if length <= MOST_IN_SHARED_MEMORY:
        return Scratch((8 * length,))
    moved = () if x.stride[dim] == 1 else (key * n, key * n, 8 * n)
    if rows == 1 or length >= LONG_ROWS:
        return Scratch((*moved, 8 * length, *rows * for_a_while(_cub(length, key))))
    if rows >= FEW_ROWS:
        return Scratch((*moved, 8 * n, (key + 8) * n + 255))
    by_value = for_a_while(key * n, _cub(n, key))
    return Scratch((*moved, 8 * n, 8 * n, *by_value, _cub(n, 4, bits=8, tile=SEGMENT_TILE)))


@scratch("median", "nanmedian")
def of_median(facts: DeviceFacts, made: Results, x: TensorSpec, *rest: object, **settings: object) -> Scratch:
    """All elements are sorted; rows are not."""
    n = int(x.numel)
    return (
        NO_SCRATCH
        if len(made) > 1
        else Scratch((x.itemsize * n, 8 * n, *of_sort(facts, made, x.like((n,))).sizes))
    )


@scratch("_unique2")
def of_unique(
    facts: DeviceFacts, made: Results, x: TensorSpec, is_sorted: bool = True, with_inverse: bool = False,
    *rest: object, **settings: object,
) -> Scratch:  # fmt: skip
    """Sorted elements, their order if it is requested, and space for as many distinct elements."""
    n, key = int(x.numel), x.itemsize
    order = (
        (8 * n, *for_a_while(8 * n, _cub(n, key)), 8 * n) if with_inverse else for_a_while(_cub(n, key, 0))
    )
    return Scratch((key * n, *order, key * n), is_exact=False)


@scratch("unique_dim", "unique_consecutive")
def of_unique_rows(
    facts: DeviceFacts, made: Results, x: TensorSpec, *rest: object, **settings: object
) -> Scratch:
    return Scratch((byte_count(x),), is_exact=False)


@scratch("randperm")
def of_permutation(facts: DeviceFacts, made: Results, n: int, *rest: object, **settings: object) -> Scratch:
    """Random keys, with enough bits that few of them are equal, are sorted together with the numbers from 0."""
    if n < 2:
        return NO_SCRATCH
    bits = min(64, ceil(log2(n - (6 * n * n + 1) / (12 * log(0.9)))))
    key = next(size for size in (1, 2, 4, 8) if bits <= 8 * size)
    value = made[0].itemsize
    return Scratch((value * n, key * n, key * n, _cub(n, key, value, bits)))


LEAST_LENGTHS = ((20, 20_000), (40, 10_000), (80, 8_000), (200, 5_000), (800, 3_000), (4_000, 800))
BLOCK, MOST_ITEMS, LEAST_ITEMS = 256, 64, 4
SCAN_BY_KEY = 1279
"""Bytes of temporary storage for up to some ten thousand elements."""
BLOCKS_PER_MULTIPROCESSOR = 65_536 // (40 * BLOCK)
"""The registers of a multiprocessor are enough for this many."""


@scratch("topk")
def of_topk(
    facts: DeviceFacts, made: Results, x: TensorSpec, k: int, dim: int = -1, *rest: object, **settings: object
) -> Scratch:
    """Rows that are long for their number are counted by several blocks: digits of the elements, and how many were found."""
    n = int(x.numel)
    length = x.numbers.shape[dim] if x.ndim else 1
    rows = n // max(1, length)
    if length < next((least for most, least in LEAST_LENGTHS if rows <= most), 400):
        return NO_SCRATCH
    threads = max(1, facts.multiprocessors) * BLOCKS_PER_MULTIPROCESSOR * BLOCK
    items = BLOCK * min(MOST_ITEMS, max(LEAST_ITEMS, divide_up(n, threads)))
    blocks = rows * divide_up(length, items)
    found = (
        x.itemsize * rows,
        8 * rows,
        8 * rows,
        2 * BLOCK * blocks,
        4 * BLOCK * rows,
        4 * blocks,
        4 * blocks,
    )
    many = x.like((rows, k))
    sort = (
        (8 * rows * k, byte_count(many), *of_sort(facts, made, many).sizes)
        if k > MOST_IN_SHARED_MEMORY
        else ()
    )
    return Scratch((*copy_if(not x.is_contiguous, x), *for_a_while(*found, SCAN_BY_KEY), *sort))


@scratch("cumsum", "cumprod")
def of_scan(facts: DeviceFacts, made: Results, x: TensorSpec, *rest: object, **settings: object) -> Scratch:
    """One dimension is summed by cub, several are not. A sum in another dtype makes a copy first."""
    summed = made[0]
    copied = copy_if(x.dtype is not summed.dtype or not x.is_contiguous, summed)
    if x.ndim > 1 and max(x.shape) != x.numel:
        return Scratch(copied)
    is_long = summed.itemsize == 8
    return Scratch((*copied, _scan(int(x.numel), 16 if is_long else 8, 896 if is_long else 1920)))


@scratch("nonzero", "masked_select")
def of_nonzero(
    facts: DeviceFacts, made: Results, x: TensorSpec, *rest: object, **settings: object
) -> Scratch:
    """Elements are counted, by several blocks if they are many; then their positions are found."""
    n = int(x.numel)
    counts = align(4 * 5 * 8 * facts.multiprocessors, 256) + 255 if n > 8192 else 1
    return Scratch((4, *for_a_while(counts), _scan(n, 8, 4224)), is_exact=False)


@scratch("embedding")
def of_embedding(
    facts: DeviceFacts,
    made: Results,
    weight: TensorSpec,
    indices: TensorSpec,
    *rest: object,
    **settings: object,
) -> Scratch:
    """Indices of several dimensions are first viewed as one, with a copy if necessary."""
    is_copied = indices.ndim > 1 and view_strides(indices, (indices.numel,)) is None
    return Scratch(copy_if(is_copied, indices), first=1)


@scratch("pow")
def of_power(
    facts: DeviceFacts, made: Results, base: TensorSpec | complex, *rest: object, **settings: object
) -> Scratch:
    """A number becomes a tensor, unless it is 1."""
    return (
        NO_SCRATCH
        if isinstance(base, TensorSpec) or base == 1
        else Scratch((NUMBER_DTYPES[type(base)].itemsize,))
    )


@scratch("index", "_unsafe_index")
def of_index(facts: DeviceFacts, made: Results, x: TensorSpec, indices: Sequence[Maybe]) -> Scratch:
    """Several indices are brought to one layout; those of 4 bytes become longer."""
    copied = _copied_indices(indices)
    return Scratch(copied, first=len(copied))


def _copied_indices(indices: Sequence[Maybe]) -> tuple[int, ...]:
    used = [index for index in indices if index is not None and index.dtype is not torch.bool]
    elements = _count_broadcast(used)
    layouts = {(index.shape, index.stride) for index in used}
    copies = [8 * int(index.numel) for index in used if index.dtype is torch.int32]
    return (*copies, *(len(used) * [8 * elements] if len(layouts) > 1 else []))


@scratch("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")
def of_index_put(
    facts: DeviceFacts, made: Results, x: TensorSpec, indices: Sequence[Maybe], values: TensorSpec,
    accumulate: bool = False, *rest: object, **settings: object,
) -> Scratch:  # fmt: skip
    """Accumulating sorts the indices, with their order, and reads the values one after the other."""
    used = [index for index in indices if index is not None]
    if not accumulate or not used:
        return Scratch(_copied_indices(indices))
    n = _count_broadcast(used)
    places = [place for place, index in enumerate(indices) if index is not None]
    sizes = x.numbers.shape
    is_apart = len(places) > 1 and places[-1] - places[0] >= len(places)
    indexed = prod(sizes[place] for place in places)
    written = n * (int(x.numel) // max(1, indexed))
    is_copied = not values.is_contiguous or int(values.numel) != written
    converted = [8 * int(index.numel) for index in used if index.dtype is torch.int32]
    linear = (
        8 * n,
        8 * n,
        -8 * n,
        *(len(used) - 1) * for_a_while(8 * n, 8 * n),
        *(-size for size in converted),
    )
    copied = (*copy_if(is_apart, x), *((written * x.itemsize,) if is_copied else ()))
    sort = 8 * n, 8 * n, 8 * n, _cub(n, bits=indexed.bit_length())
    return Scratch(
        (*converted, *linear, *copied, *sort), is_exact=not any(i.dtype is torch.bool for i in used)
    )


def _count_broadcast(indices: Sequence[TensorSpec]) -> int:
    shapes = (reversed(index.numbers.shape) for index in indices)
    return prod(0 if 0 in sizes else max(sizes) for sizes in zip_longest(*shapes, fillvalue=1))


FEW_INDICES, ROWS_AT_ONCE = 3072, 10


@scratch("embedding_dense_backward")
def of_embedding_backward(
    facts: DeviceFacts, made: Results, grad: TensorSpec, indices: TensorSpec, num_weights: int, padding_idx: int,
    scale_grad_by_freq: bool = False, **settings: object,
) -> Scratch:  # fmt: skip
    """Few indices need no temporary memory. Many are sorted together with their order, and rows of one index are summed ten
    at a time in float32: the temporary memory of the sort is free by then. If few rows have many indices each, they are
    summed up in place."""
    copied = copy_if(not indices.is_contiguous, indices) + copy_if(not grad.is_contiguous, grad)
    if indices.numel <= FEW_INDICES and not scale_grad_by_freq:
        return Scratch(copied, first=len(copied))
    return _sum_by_index(facts, grad, indices, num_weights, scale_grad_by_freq, copied)


MOST_OF_BAG = 2


@scratch("_embedding_bag_dense_backward")
def of_bags_backward(
    facts: DeviceFacts, made: Results, grad: TensorSpec, indices: TensorSpec, bags: TensorSpec, sizes: TensorSpec,
    largest: TensorSpec, num_weights: int, scale_grad_by_freq: bool, mode: int, *rest: object, **settings: object,
) -> Scratch:  # fmt: skip
    """As the gradient of an embedding, for any number of indices; the positions of the largest of a bag are known."""
    copied = copy_if(not grad.is_contiguous, grad)
    if mode == MOST_OF_BAG:
        return Scratch(copied, first=len(copied))
    return _sum_by_index(facts, grad, indices, num_weights, scale_grad_by_freq, copied)


@scratch("_embedding_bag_backward")
def of_any_bags_backward(
    facts: DeviceFacts, made: Results, grad: TensorSpec, indices: TensorSpec, offsets: TensorSpec, bags: TensorSpec,
    sizes: TensorSpec, largest: TensorSpec, num_weights: int, scale_grad_by_freq: bool, mode: int, sparse: bool,
    *rest: object, **settings: object,
) -> Scratch:  # fmt: skip
    if sparse:
        return Scratch(is_exact=False)
    return of_bags_backward(
        facts, made, grad, indices, bags, sizes, largest, num_weights, scale_grad_by_freq, mode
    )


def _sum_by_index(
    facts: DeviceFacts,
    grad: TensorSpec,
    indices: TensorSpec,
    num_weights: int,
    is_scaled: bool,
    copied: tuple[int, ...],
) -> Scratch:
    n = int(indices.numel)
    width = grad.numbers.shape[-1] if grad.ndim else 1
    segments = min(n, num_weights)
    partial = segments + n // ROWS_AT_ONCE
    size = indices.itemsize
    counts = (size * n, *for_a_while(SCAN_BY_KEY), *for_a_while(SCAN_BY_KEY)) if is_scaled else ()
    sort = for_a_while(size * n, _cub(n, size, size, num_weights.bit_length()))
    starts = (size * n, 8, *for_a_while(size * n, SCAN_BY_KEY))
    order = (*copied, size * n, size * n, *sort, *counts)
    lists = (size * segments, size * segments, *for_a_while(SCAN_BY_KEY), 8, size * partial)
    has_few_rows = segments < 4 * facts.multiprocessors and partial > 4 * segments
    sums = size * partial if has_few_rows else max(4, grad.itemsize) * partial * width
    return Scratch((*order, *starts, *lists, sums), first=len(order))
