"""Configuration files that a command line names: JSON, TOML, YAML.

    entries = read_entries(text, "train.toml")          {"training.batch_size": 8, …}: numbers, words and switches
    set_entry(text, "train.toml", "training.batch_size", 16)

A value is replaced where it stands: the rest of the text stays as it is.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from understudy.errors import UnderstudyError
from understudy.plans.axes import Value

SUFFIXES = (".json", ".toml", ".yaml", ".yml")
MOST_BYTES = 200_000
"""A longer file is data."""


def find_configurations(words: Sequence[str]) -> dict[str, str]:
    """The texts of the configuration files among these words, by path as it is written: `c.yaml`, `--config=c.yaml`."""
    found: dict[str, str] = {}
    for word in words:
        path = word.partition("=")[2] if word.startswith("-") else word
        if path.endswith(SUFFIXES) and os.path.isfile(path) and os.path.getsize(path) <= MOST_BYTES:
            with open(path, encoding="utf-8", errors="replace") as file:
                text = file.read()
            if read_entries(text, path):
                found[path] = text
    return found


def read_entries(text: str, path: str) -> dict[str, Value]:
    """Single values by their dotted names; none of a file that can't be read."""
    try:
        content = _parse(text, path)
    except ValueError:
        return {}
    return dict(_flatten(content, "")) if isinstance(content, dict) else {}


def _parse(text: str, path: str) -> Any:
    """Raises `ValueError`."""
    if path.endswith(".json"):
        return json.loads(text)
    if path.endswith(".toml"):
        return importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli").loads(text)
    try:
        yaml = importlib.import_module("yaml")
    except ImportError:
        return None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _flatten(content: dict[Any, Any], above: str) -> Iterator[tuple[str, Value]]:
    for key, value in content.items():
        name = f"{above}{key}"
        if isinstance(value, dict):
            yield from _flatten(value, f"{name}.")
        elif isinstance(value, (bool, int, float, str)):
            yield name, value


def set_entry(text: str, path: str, name: str, value: Value) -> str:
    """The text with another value of this entry: of the places that look like it, the one that changes nothing else."""
    wanted = {**read_entries(text, path), name: value}
    key = re.escape(name.rpartition(".")[2])
    one_value = r"\"[^\"\n]*\"|'[^'\n]*'|[^\s,#}\]\"']+"
    for place in re.finditer(rf"(?<![\w.-])[\"']?{key}[\"']?\s*[:=]\s*({one_value})", text):
        changed = text[: place.start(1)] + _write(value) + text[place.end(1) :]
        if read_entries(changed, path) == wanted:
            return changed
    raise UnderstudyError(
        f"{path}: the entry {name} could not be set to {value}; write its value on one line"
    )


def _write(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value)
    return str(value)
