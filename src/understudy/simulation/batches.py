"""Batches of data loaders: the longest ones on request, and a check that they have the requested size."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch

from understudy.patching import REHEARSAL, patch_call
from understudy.simulation.libraries import when_imported
from understudy.simulation.run_notes import add_note, add_warning

Function = Callable[..., Any]

MOST_BATCHES = 1000
"""That are looked at for the longest one."""
_takes_longest: list[bool] = []
_wanted_sizes: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""The requested rows of a loader, by its iterators."""


@patch_call("torch.utils.data.DataLoader.__iter__", during=REHEARSAL)
def take_longest_batch(original: Function, self: object) -> Iterator[Any]:
    """With `--longest`, every batch is the one with the most numbers in it: a rehearsal takes only the first few."""
    batches = original(self)
    size = getattr(self, "batch_size", None) or getattr(
        getattr(self, "batch_sampler", None), "batch_size", None
    )
    if isinstance(size, int):
        _wanted_sizes[batches] = size
    if not _takes_longest or not _takes_longest[-1]:
        return batches
    return _repeat_longest(batches)


def _repeat_longest(batches: Iterator[object]) -> Iterator[Any]:
    longest, most, count = None, -1, 0
    for batch in islice(batches, MOST_BATCHES):
        count += 1
        size = sum(tensor.numel() for tensor in find_tensors(batch))
        if size > most:
            longest, most = batch, size
    if not count:
        return
    shapes = ", ".join(str(list(tensor.shape)) for tensor in find_tensors(longest))
    of = f"the first {count:,}" if count == MOST_BATCHES else f"{count:,}"
    add_note(f"--longest: every batch is the longest of {of}: {shapes}")
    for _ in range(count):
        # Programs take entries out of a batch (`batch.pop("labels")`).
        yield copy_containers(longest)


def find_tensors(batch: object) -> list[torch.Tensor]:
    """The tensors of a batch, whatever its containers are."""
    if isinstance(batch, torch.Tensor):
        return [batch]
    if isinstance(batch, Mapping):
        return [tensor for part in batch.values() for tensor in find_tensors(part)]
    if isinstance(batch, (list, tuple)):
        return [tensor for part in batch for tensor in find_tensors(part)]
    return [value for value in getattr(batch, "__dict__", {}).values() if isinstance(value, torch.Tensor)]


def copy_containers(batch: Any) -> Any:
    """The same tensors in new containers."""
    if isinstance(batch, torch.Tensor) or (isinstance(batch, tuple) and hasattr(batch, "_fields")):
        return batch
    if isinstance(batch, Mapping):
        new = copy.copy(batch)
        if isinstance(new, MutableMapping):
            new.update({key: copy_containers(part) for key, part in batch.items()})
        return new
    if type(batch) in (list, tuple):
        return type(batch)(copy_containers(part) for part in batch)
    return copy.copy(batch)


@contextmanager
def take_longest(is_wanted: bool) -> Iterator[None]:
    _takes_longest.append(is_wanted)
    try:
        yield
    finally:
        _takes_longest.pop()


# --- the requested size ---------------------------------------------------------------------------------------------


class BatchSizes:
    """The largest batch of rows that was drawn, for each size that a loader was asked for; and lengths of texts."""

    def __init__(self) -> None:
        self.drawn: dict[int, int] = {}
        self.longest_text = 0
        """The number of tokens that texts are cut to."""

    def __enter__(self) -> BatchSizes:
        _sizes.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        _sizes.remove(self)

    def warn(self) -> None:
        for wanted, rows in self.drawn.items():
            if rows < wanted:
                add_warning(
                    f"a data loader returned at most {rows} rows per batch, less than its batch_size {wanted}: "
                    "too few rows"
                )


_sizes: list[BatchSizes] = []


@patch_call("torch.utils.data.dataloader._BaseDataLoaderIter._next_index", during=REHEARSAL)
def count_rows(original: Function, self: Any) -> Any:
    """The report warns of batches with fewer rows than requested."""
    index = original(self)
    wanted = _wanted_sizes.get(self)
    if _sizes and wanted is not None and isinstance(index, list):
        drawn = _sizes[-1].drawn
        drawn[wanted] = max(drawn.get(wanted, 0), len(index))
    return index


@when_imported("transformers.tokenization_utils_base", "PreTrainedTokenizerBase.__call__")
def note_length(original: Function) -> Function:
    """Texts shorter than the truncation length may need less memory than those of the real run."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        length = kwargs.get("max_length")
        if _sizes and isinstance(length, int) and (kwargs.get("truncation") or kwargs.get("padding")):
            _sizes[-1].longest_text = max(_sizes[-1].longest_text, length)
        return original(self, *args, **kwargs)

    return call
