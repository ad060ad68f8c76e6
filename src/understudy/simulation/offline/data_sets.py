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
    find_seconds,
    labels_of,
    make_audio,
    make_sound_file,
    make_value,
)
from understudy.simulation.offline.switch import is_made_up, note_made_up

Function = Callable[..., Any]
ROWS = 512
"""Rows of each split, unless the table has another number."""
TABLE = Path(__file__).with_name("data_sets.toml")
SPLITS = ("train", "validation", "test")


@functools.cache
def _read_table() -> list[dict[str, Any]]:
    return read_toml(TABLE)["data_set"]


def find_data_set(name: str, config: str = "") -> dict[str, Any]:
    """The first row of the table for this name; a column of texts for names that are not in it."""
    name, config = name.lower(), config.lower()
    for row in _read_table():
        is_named = any(part in name for part in row["names"])
        if is_named and ("config" not in row or any(part in config for part in row["config"])):
            return row
    return {"columns": {"text": "text"}}


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
        made = _cast(datasets, made, column, kind)
    rows = found.get("rows", ROWS)
    if rows != ROWS:
        made = made.select([i % ROWS for i in range(rows)])
    names = found.get("splits", SPLITS)
    made.info.splits = _describe_splits(datasets, (*names, *((str(split),) if split else ())), rows)
    note_made_up(
        name,
        f"load_dataset({name!r}): not on this machine; {rows} rows were generated, with the columns {', '.join(kinds)}",
    )
    part = made.to_iterable_dataset() if is_streamed else made
    if isinstance(split, (list, tuple)):
        return [part for _ in split]
    if split is not None:
        return part
    splits = dict.fromkeys(names, part)
    return datasets.IterableDatasetDict(splits) if is_streamed else datasets.DatasetDict(splits)


def _describe_splits(datasets: Any, names: Iterable[str], rows: int) -> Any:
    """As `Dataset.info.splits` has them."""
    splits = datasets.splits.SplitDict()
    for name in dict.fromkeys(name.partition("[")[0] for name in names):
        splits.add(datasets.splits.SplitInfo(name=name, num_examples=rows))
    return splits


def _cast(datasets: Any, made: Any, column: str, kind: str) -> Any:
    if kind.startswith("audio"):
        return made.cast_column(column, datasets.Audio(sampling_rate=int(kind.rpartition(" ")[2])))
    labels = labels_of(kind)
    if labels is not None:
        feature = datasets.ClassLabel(names=list(labels))
        if kind.startswith("boxes"):
            features = {**made.features[column], "category": datasets.Sequence(feature)}
            return made.cast_column(column, features)
        return made.cast_column(column, datasets.Sequence(feature) if kind.startswith("tags") else feature)
    return made


@when_imported("datasets.arrow_dataset", "Dataset.select")
def select_beyond_the_end(original: Function) -> Function:
    """A script may select as many rows as the real data set has: made-up rows repeat."""

    def select(self: Any, indices: Iterable[int], *args: object, **kwargs: object) -> Any:
        if is_made_up():
            indices = [index % len(self) for index in indices] if len(self) else indices
        return original(self, indices, *args, **kwargs)

    return select


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
    """Samples that a program has made of it are as long a silence."""

    def encode_example(self: Any, value: Any, *args: object, **kwargs: object) -> Any:
        if not is_made_up() or not isinstance(value, dict) or "array" not in value:
            return original(self, value, *args, **kwargs)
        return make_sound_file(len(value["array"]) // (value.get("sampling_rate") or RATE))

    return encode_example


@when_imported("datasets.arrow_dataset", "Dataset.train_test_split")
def split_fewer_rows(original: Function) -> Function:
    """A script may split off more rows than were made up: a tenth of them is split off."""

    def train_test_split(self: Any, test_size: Any = None, train_size: Any = None, **kwargs: object) -> Any:
        too_many = [size for size in (test_size, train_size) if isinstance(size, int) and size >= len(self)]
        if is_made_up() and too_many:
            test_size, train_size = 0.1, None
        return original(self, test_size=test_size, train_size=train_size, **kwargs)

    return train_test_split
