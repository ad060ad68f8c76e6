"""`datasets.load_dataset` of a data set that is not here: an error that names it, or made-up rows."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from understudy import _torch
from understudy.simulation.catalogue import read_toml
from understudy.simulation.libraries import MissingFileError, when_imported
from understudy.simulation.offline.columns import (
    RATE,
    cast_made_up,
    find_seconds,
    make_audio,
    make_sound_file,
    make_value,
)
from understudy.simulation.offline.open_columns import (
    add_columns,
    is_marked,
    list_names,
    mark_made_up,
    open_arguments,
)
from understudy.simulation.offline.switch import is_made_up, note_made_up
from understudy.simulation.run_notes import add_note

Function = Callable[..., Any]
ROWS, FEWER_ROWS = 512, 128
"""Rows of splits for training, or of the one that a program asks for; rows of the others. The table may have another number
for all of them."""
TABLE = Path(__file__).with_name("data_sets.toml")
SPLITS = ("train", "validation", "test")


@functools.cache
def _read_table() -> list[dict[str, Any]]:
    return read_toml(TABLE)["data_set"]


def find_data_set(name: str, config: str = "") -> dict[str, Any]:
    """The row of the table with the longest part of this name; a column of texts for names that are not in it."""
    name, config = name.lower(), config.lower()
    best: tuple[int, dict[str, Any]] = (0, {"columns": {"text": "text"}})
    for row in _read_table():
        matched = max((len(part) for part in row["names"] if part in name), default=0)
        if matched > best[0] and ("config" not in row or any(part in config for part in row["config"])):
            best = matched, row
    return best[1]


@when_imported("datasets.load", "load_dataset")
@when_imported("datasets", "load_dataset")
def find_missing_data(original: Function) -> Function:
    """A data set that is not here is named in the error, or made up."""

    def load_dataset(path: object, name: object = None, *args: object, **kwargs: Any) -> Any:
        try:
            return original(path, name, *args, **kwargs)
        except (OSError, ValueError, RuntimeError) as error:
            if _torch.active_fake_mode() is None or isinstance(error, MissingFileError):
                raise
            if is_made_up():
                config = str(name or kwargs.get("data_dir") or "")
                return make_data(str(path), config, kwargs.get("split"), bool(kwargs.get("streaming")))
            if not isinstance(error, OSError):
                raise
            raise MissingFileError(
                f"load_dataset({str(path)!r}): the data set is not on this machine, and a rehearsal downloads "
                "nothing; store it there (a few rows with the same columns are enough), allow the network with "
                "--online, or generate rows with --offline-data"
            ) from error

    return load_dataset


def make_data(name: str, config: str = "", split: Any = None, is_streamed: bool = False) -> Any:
    """A made-up `Dataset`, or a `DatasetDict` of all splits."""
    datasets: Any = importlib.import_module("datasets")
    found = find_data_set(name, config)
    kinds: dict[str, str] = found["columns"]
    made = datasets.Dataset.from_list([{c: make_value(k, i) for c, k in kinds.items()} for i in range(ROWS)])
    for column, kind in kinds.items():
        made = cast_made_up(made, column, kind)
    rows = found.get("rows", ROWS)
    if rows != ROWS:
        made = made.select([i % ROWS for i in range(rows)])
    names = found.get("splits", SPLITS)
    fewer = found.get("rows", FEWER_ROWS)
    counts = {part: rows if part == names[0] or "train" in part else fewer for part in names}
    asked = () if split is None else split if isinstance(split, (list, tuple)) else (split,)
    made.info.splits = _describe_splits(
        datasets, counts | {str(part).partition("[")[0]: rows for part in asked}
    )
    note_made_up(
        name,
        f"load_dataset({name!r}): not on this machine; {rows} rows were generated, with the columns {', '.join(kinds)}",
    )
    mark_made_up(made)
    if split is not None:
        part = _stream(made) if is_streamed else made
        return [part for _ in split] if isinstance(split, (list, tuple)) else part
    parts = {name: made.select(range(count)) for name, count in counts.items()}
    if is_streamed:
        return datasets.IterableDatasetDict({name: _stream(part) for name, part in parts.items()})
    return datasets.DatasetDict(parts)


def _stream(made: Any) -> Any:
    streamed = made.to_iterable_dataset()
    mark_made_up(streamed)
    return streamed


def _describe_splits(datasets: Any, counts: dict[str, int]) -> Any:
    """As `Dataset.info.splits` has them."""
    splits = datasets.splits.SplitDict()
    for name, rows in counts.items():
        splits.add(datasets.splits.SplitInfo(name=name, num_examples=rows))
    return splits


@when_imported("datasets.arrow_dataset", "Dataset.select")
def select_beyond_the_end(original: Function) -> Function:
    """A script may select as many rows as the real data set has: made-up rows repeat. A list of rows that a script has
    searched for, and that is empty, selects all of them."""

    def select(self: Any, indices: Iterable[int], *args: object, **kwargs: object) -> Any:
        if is_made_up() and len(self):
            wanted = indices if isinstance(indices, range) else list(indices)
            if not isinstance(wanted, range) and not wanted and is_marked(self):
                return _keep_all(self)
            indices = [index % len(self) for index in wanted]
        return original(self, indices, *args, **kwargs)

    return select


@when_imported("datasets.arrow_dataset", "Dataset.filter")
def keep_rows_of_filters(original: Function) -> Function:
    """A filter that would drop every made-up row, such as one by length or language, keeps them. It may read columns that
    were not generated."""

    def filter(self: Any, function: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not (is_made_up() and is_marked(self) and len(self)):
            return original(self, function, *args, **kwargs)
        add_columns(self, list_names((), kwargs))
        kept = original(
            self, function and open_arguments(function, bool(kwargs.get("batched"))), *args, **kwargs
        )
        return kept if len(kept) else _keep_all(self)

    return filter


def _keep_all(made: Any) -> Any:
    add_note("a filter of generated rows would have dropped all of them; all were kept")
    return made


@when_imported("datasets.features.audio", "Audio.decode_example")
def decode_made_up_sound(original: Function) -> Function:
    """Silence, at the rate that the program asks for: made-up files have no samples, and no decoder is needed."""

    def decode_example(self: Any, value: Any, *args: object, **kwargs: object) -> Any:
        seconds = find_seconds(value) if is_made_up() else None
        if seconds is None:
            return original(self, value, *args, **kwargs)
        return make_audio(seconds, self.sampling_rate or RATE)

    return decode_example


@when_imported("datasets.features.audio", "Audio.encode_example")
def encode_made_up_sound(original: Function) -> Function:
    """Encoded made-up audio is silence of the same length."""

    def encode_example(self: Any, value: Any, *args: object, **kwargs: object) -> Any:
        if not is_made_up() or not isinstance(value, dict) or "array" not in value:
            return original(self, value, *args, **kwargs)
        return make_sound_file(len(value["array"]) // (value.get("sampling_rate") or RATE))

    return encode_example


@when_imported("datasets.arrow_dataset", "Dataset.train_test_split")
def split_fewer_rows(original: Function) -> Function:
    """A script may split off more rows than were made up: a tenth of them is split off."""

    def train_test_split(self: Any, test_size: Any = None, train_size: Any = None, **kwargs: object) -> Any:
        if is_made_up() and is_marked(self):
            add_columns(self, list_names((), kwargs))
        too_many = [size for size in (test_size, train_size) if isinstance(size, int) and size >= len(self)]
        if is_made_up() and too_many:
            test_size, train_size = 0.1, None
        return original(self, test_size=test_size, train_size=train_size, **kwargs)

    return train_test_split
