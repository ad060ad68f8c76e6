"""Columns that a program reads and a made-up data set lacks: they are generated when they are read.

The name of a column says what it holds (`[[column]]` in `data_sets.toml`); other names are texts.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from understudy.simulation.catalogue import read_toml
from understudy.simulation.libraries import when_imported
from understudy.simulation.offline.columns import cast_made_up, make_value
from understudy.simulation.offline.switch import is_made_up, note_made_up
from understudy.simulation.run_notes import active_notes

Function = Callable[..., Any]
TABLE = Path(__file__).with_name("data_sets.toml")
MARK = "generated rows"
"""The description of a made-up data set; `map`, `select` and their kind keep it."""
NAMED = (
    "column", "columns", "column_names", "column_mapping", "original_column_name", "input_columns", "remove_columns",
    "stratify_by_column",
)  # fmt: skip
"""Arguments that name columns."""


def mark_made_up(made: Any) -> None:
    made.info.description = MARK
    notes = active_notes()
    if notes is not None:
        notes.has_made_up_rows = True


def is_marked(data: Any) -> bool:
    return MARK in (data.info.description or "")


def has_made_up_rows() -> bool:
    """Whether rows may be those of a made-up data set: they do not name it."""
    notes = active_notes()
    return is_made_up() and notes is not None and notes.has_made_up_rows


@functools.cache
def find_kind(column: str) -> str:
    """The kind of the column with this name: that of the longest part of the name in the table."""
    name = column.lower()
    best, found = 0, "text"
    for row in read_toml(TABLE)["column"]:
        for part in row["names"]:
            is_named = name == part[1:] if part.startswith("=") else part in name
            if is_named and len(part) > best:
                best, found = len(part), row["kind"]
    return found


def add_columns(made: Any, names: Iterable[str]) -> None:
    """Add the columns that are missing to the made-up data set, in place: methods that name a column return a part of it."""
    datasets: Any = importlib.import_module("datasets")
    for name in names:
        if name in made.column_names:
            continue
        kind = find_kind(name)
        values = datasets.Dataset.from_list([{name: make_value(kind, i)} for i in range(len(made))])
        wider = datasets.concatenate_datasets([made, cast_made_up(values, name, kind)], axis=1)
        made._data, made._indices, made._fingerprint = wider._data, wider._indices, wider._fingerprint
        made._info.features = wider._info.features
        _note(name, kind)


def _note(name: str, kind: str) -> None:
    what = f"column {name!r}"
    note_made_up(what, f"{what}: not in the generated rows; generated as {kind.partition(' ')[0]}")


def list_names(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """The names of columns among the arguments of a method."""
    given = [*args, *(kwargs[name] for name in NAMED if name in kwargs)]
    names: list[str] = []
    for value in given:
        if isinstance(value, str):
            names.append(value)
        elif isinstance(value, (list, tuple, dict)):
            names += [name for name in value if isinstance(name, str)]
    return names


@when_imported(
    "datasets.arrow_dataset", "Dataset.__getitem__", "Dataset.map", "Dataset.unique", "Dataset.sort",
    "Dataset.class_encode_column", "Dataset.cast_column", "Dataset.select_columns", "Dataset.remove_columns",
    "Dataset.rename_column", "Dataset.rename_columns",
)  # fmt: skip
def add_named_columns(original: Function) -> Function:
    """A missing column is generated when a method names it."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_made_up() and is_marked(self):
            add_columns(self, list_names(args[:1], kwargs))
        return original(self, *args, **kwargs)

    return functools.wraps(original)(method)


@when_imported("datasets.arrow_dataset", "Dataset.set_format", "Dataset.with_format")
def add_formatted_columns(original: Function) -> Function:
    """Columns are named after the first argument, a format."""

    def method(self: Any, type: Any = None, *args: Any, **kwargs: Any) -> Any:
        if is_made_up() and is_marked(self):
            add_columns(self, list_names(args[:1], kwargs))
        return original(self, type, *args, **kwargs)

    return functools.wraps(original)(method)


@when_imported("datasets.arrow_dataset", "Dataset.features")
def add_described_columns(original: Any) -> Any:
    """`features[name]` also generates a missing column."""

    def features(self: Any) -> Any:
        found = original.fget(self)
        if not (found and is_made_up() and is_marked(self)):
            return found
        return _open_features(found.__class__)(found, self)

    return property(features)


@functools.cache
def _open_features(features: type) -> Any:
    class OpenFeatures(features):  # type: ignore[misc]
        """The features of a made-up data set. One that is missing is added with its column."""

        def __init__(self, found: Any, made: Any) -> None:
            super().__init__(found)
            self._made = made

        def __missing__(self, name: str) -> Any:
            add_columns(self._made, [name])
            self[name] = self._made._info.features[name]
            return self[name]

        def __reduce__(self) -> Any:
            return features, (dict(self),)

    return OpenFeatures


class OpenRow(dict[str, Any]):
    """A row of a made-up data set, or a batch of `count` rows as columns."""

    count: int | None = None

    def __missing__(self, name: str) -> Any:
        self[name] = _make_missing(name, self.count)
        return self[name]

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def _make_missing(name: str, count: int | None) -> Any:
    kind = find_kind(name)
    _note(name, kind)
    return make_value(kind, 0) if count is None else [make_value(kind, i) for i in range(count)]


def open_arguments(function: Function, is_batched: bool) -> Function:
    """The function of a filter, or of a `map` of streamed rows, which get copies of rows."""

    def open_row(value: Any) -> Any:
        if type(value) is not dict:
            return value
        row = OpenRow(value)
        row.count = len(next(iter(value.values()), ())) if is_batched else None
        return row

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*map(open_row, args), **kwargs)

    return call


@when_imported("datasets.iterable_dataset", "IterableDataset.map", "IterableDataset.filter")
def open_streamed_arguments(original: Function) -> Function:
    """Functions called with streamed rows can read each column."""

    def method(self: Any, function: Any = None, *args: Any, **kwargs: Any) -> Any:
        if function is not None and is_made_up() and is_marked(self):
            function = open_arguments(function, bool(kwargs.get("batched")))
        return original(self, function, *args, **kwargs)

    return functools.wraps(original)(method)


@when_imported("datasets.iterable_dataset", "IterableDataset.__iter__")
def open_streamed_rows(original: Function) -> Function:
    """Programs that read the stream can read each column."""

    def iterate(self: Any) -> Any:
        is_open = is_made_up() and is_marked(self)
        for row in original(self):
            yield OpenRow(row) if is_open and type(row) is dict else row

    return iterate


@when_imported("datasets.formatting.formatting", "PythonFormatter.format_row", "PythonFormatter.format_batch")
def open_rows(original: Function) -> Function:
    """Rows that a program reads have each column that it asks for."""

    def format_rows(self: Any, pa_table: Any) -> Any:
        row = original(self, pa_table)
        if type(row) is not dict or not has_made_up_rows():
            return row
        opened = OpenRow(row)
        opened.count = pa_table.num_rows if original.__name__ == "format_batch" else None
        return opened

    return functools.wraps(original)(format_rows)


@when_imported("datasets.formatting.formatting", "LazyDict.__getitem__")
def open_mapped_rows(original: Function) -> Function:
    """Rows and batches passed to the function of a `map` have each requested column; its result does not contain them."""

    def read(self: Any, key: Any) -> Any:
        if key in self.data or not has_made_up_rows():
            return original(self, key)
        made = vars(self).setdefault("made_up", OpenRow())
        made.count = self.pa_table.num_rows if type(self).__name__ == "LazyBatch" else None
        return made[key]

    return read


@when_imported("datasets.formatting.formatting", "LazyDict.get")
def read_optional_columns(original: Function) -> Function:
    """A column with a default is optional, and not generated."""

    def get(self: Any, key: Any, default: Any = None) -> Any:
        return self[key] if key in self.data else default

    return get
