"""Dataclasses as JSON documents: written as they are, read with a check of every value, and described by a JSON Schema.

    class Rehearsal(Document): …            a dataclass with `schema_version`, and `kind` where there are several
    rehearsal.to_json(), Rehearsal.from_json(text)
    make_document_schema(Rehearsal, {"verdict": VERDICTS})

A file may come from anywhere: each error is a ValueError that names the place.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

MOST = 1 << 80
"""Upper limit for sizes and counts in a file."""

Record = TypeVar("Record")
Saved = TypeVar("Saved", bound="Document")


class Document:
    """A dataclass that is saved to files. `TITLE` is its name in messages. The defaults of its fields `kind` and
    `schema_version` are those that it reads."""

    TITLE = ""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)  # type: ignore[call-overload]

    def to_json(self, indent: int | None = 2) -> str:
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_json(cls: type[Saved], text: str | bytes) -> Saved:
        return cls.from_dict(json.loads(text))

    @classmethod
    def from_dict(cls: type[Saved], data: dict[str, Any]) -> Saved:
        if not isinstance(data, dict):
            raise ValueError(f"expected a {cls.TITLE}, got JSON of another form")
        own = _find_marks(cls)
        if any(data.get(name) != value for name, value in own.items()):
            given = ", ".join(f"{name} {data[name]!r}" if name in data else f"no {name}" for name in own)
            raise ValueError(f"expected a {cls.TITLE} of schema_version {own['schema_version']}, got {given}")
        document = read_record(cls, data)
        document._check()
        return document

    def _check(self) -> None:
        """Raise ValueError for values that contradict each other."""


def _find_marks(kind: Any) -> dict[str, Any]:
    """What identifies the documents that this version reads."""
    return {f.name: f.default for f in dataclasses.fields(kind) if f.name in ("kind", "schema_version")}


@functools.cache
def _get_hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def read_record(kind: Callable[..., Record], data: Any, path: str = "") -> Record:
    """A dataclass with these values, each of which is checked against its type."""
    if not isinstance(data, dict):
        raise ValueError(
            f"{path.rstrip('.') or kind.__name__}: expected an object, got {type(data).__name__}"
        )
    hints = _get_hints(kind)
    unknown = sorted(set(data) - set(hints))
    if unknown:
        raise ValueError(f"{path}{unknown[0]}: unknown field")
    values = {name: _read_value(hints[name], value, f"{path}{name}") for name, value in data.items()}
    required = [
        entry.name
        for entry in dataclasses.fields(kind)  # type: ignore[arg-type]
        if entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING
    ]
    missing = [name for name in required if name not in values]
    if missing:
        raise ValueError(f"{path}{missing[0]}: missing field")
    return kind(**values)


def _read_value(hint: Any, value: Any, path: str) -> Any:
    arguments = get_args(hint)
    parts: Any = value
    if hint is Any or (value is None and type(None) in arguments):
        return value
    if type(None) in arguments:
        return _read_value(arguments[0], value, path)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return read_record(hint, value, f"{path}.")
    origin = get_origin(hint) or hint
    expected = (int, float) if origin is float else origin
    if not isinstance(value, expected) or (isinstance(value, bool) and origin is not bool):
        raise ValueError(
            f"{path}: expected {_PLAIN.get(origin, origin.__name__)}, got {type(value).__name__}"
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{path}: expected a finite number, got {value}")
    if isinstance(value, int) and abs(value) > MOST:
        raise ValueError(f"{path}: {value} is out of range")
    if origin is list:
        return [_read_value(arguments[0], part, f"{path}[{i}]") for i, part in enumerate(parts)]
    if origin is dict:
        return {key: _read_value(arguments[1], part, f"{path}.{key}") for key, part in parts.items()}
    return value


_PLAIN = {int: "integer", float: "number", str: "string", bool: "boolean"}


def make_schema(kind: type) -> dict[str, Any]:
    """The JSON Schema of a dataclass."""
    hints = get_type_hints(kind)
    return {
        "type": "object",
        "description": (kind.__doc__ or "").split("\n")[0],
        "properties": {name: _make_schema_of_type(hint) for name, hint in hints.items()},
        "required": sorted(hints),
        "additionalProperties": False,
    }


def _make_schema_of_type(hint: object) -> dict[str, Any]:
    if hint in _PLAIN:
        return {"type": _PLAIN[hint]}
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return make_schema(hint)
    arguments = get_args(hint)
    if get_origin(hint) is list:
        return {"type": "array", "items": _make_schema_of_type(arguments[0])}
    if get_origin(hint) is dict:
        return {"type": "object", "additionalProperties": _make_schema_of_type(arguments[1])}
    if type(None) in arguments:
        return {"anyOf": [_make_schema_of_type(arguments[0]), {"type": "null"}]}
    return {}


def make_document_schema(kind: type[Document], choices: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """The whole schema of a document; `choices`: the values of a field (`verdict`), or of a part (`isolation.level`)."""
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"{kind.TITLE.capitalize()} of understudy",
    }
    schema = head | make_schema(kind)
    for path, values in choices.items():
        *outer, name = path.split(".")
        part = functools.reduce(lambda found, step: found["properties"][step], outer, schema)
        part["properties"][name] = {"enum": [*values]}
    schema["properties"] |= {name: {"const": value} for name, value in _find_marks(kind).items()}
    return schema
