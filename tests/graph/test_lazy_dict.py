"""A dict whose values are made on first access returns the values in every way in which a dict is read."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from understudy.graph.lazy_dict import LazyDict


class Pending:
    """A value that was not made yet."""


class Lazy(LazyDict):
    pending = Pending

    def __init__(self, *entries: Any) -> None:
        super().__init__(*entries)
        self.count = 0

    def _make(self, pending: Pending) -> str:
        self.count += 1
        return "made"


def lazy() -> Lazy:
    return Lazy({"val": Pending(), "custom": 1})


def update(table: Lazy) -> dict[str, Any]:
    other: dict[str, Any] = {}
    other.update(table)
    return other


READS: dict[str, Callable[[Lazy], Any]] = {
    "item": lambda table: table["val"],
    "get": lambda table: table.get("val"),
    "items": lambda table: dict(table.items())["val"],
    "values": lambda table: next(iter(table.values())),
    "dict": lambda table: dict(table)["val"],
    "stars": lambda table: {**table}["val"],
    "keywords": lambda table: dict(**table)["val"],
    "update": lambda table: update(table)["val"],
    "or": lambda table: (table | {})["val"],
    "or, right": lambda table: ({} | table)["val"],
    "copy": lambda table: copy.copy(table)["val"],
    "copy method": lambda table: table.copy()["val"],
    "deepcopy": lambda table: copy.deepcopy(table)["val"],
    "pickle": lambda table: pickle.loads(pickle.dumps(table))["val"],
    "pop": lambda table: table.pop("val"),
    "popitem": lambda table: dict([table.popitem(), table.popitem()])["val"],
    "setdefault": lambda table: table.setdefault("val", 3),
}


@pytest.mark.parametrize("read", READS)
def test_each_read_makes_the_value_once(read: str) -> None:
    table = lazy()
    assert READS[read](table) == "made"
    assert table.count == 1


def test_keys_and_other_values_are_read_without_making_it() -> None:
    table = lazy()
    assert "val" in table and list(table) == ["val", "custom"] and len(table) == 2 and table["custom"] == 1
    table["val"] = "another"
    assert table.count == 0 and table["val"] == "another"


def test_it_compares_and_prints_like_a_dict() -> None:
    assert lazy() == {"val": "made", "custom": 1} and lazy() != {"custom": 1}
    assert repr(lazy()) == "{'val': 'made', 'custom': 1}"
    assert lazy().pop("other", 3) == 3 and lazy().get("other", 4) == 4
    with pytest.raises(KeyError):
        lazy().pop("other")
    assert type(copy.deepcopy(lazy())) is dict
