"""Dicts whose values are made when somebody reads them: most of what a large graph says, nobody looks at."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

NOT_GIVEN: Any = object()


class LateDict(dict[str, Any]):
    """A dict in which some values are pending: nobody who asks for one gets anything else than the value.

    It hears of every way in which a dict gives its values away. `__iter__` is among them because Python copies a dict
    with another `__iter__` (`dict(table)`, `{**table}`, `update`) by asking for each value, and any other past all methods.
    """

    __slots__ = ()
    pending: type
    """The type of what stands for a value until it is read."""

    def _made(self, pending: Any) -> Any:
        raise NotImplementedError

    def settle(self) -> None:
        """Make all values."""
        for key, value in list(dict.items(self)):
            if type(value) is self.pending:
                self[key] = self._made(value)

    def __getitem__(self, key: str) -> Any:
        value = dict.__getitem__(self, key)
        if type(value) is self.pending:
            value = self[key] = self._made(value)
        return value

    def get(self, key: str, default: Any = None) -> Any:
        value = dict.get(self, key, default)
        return self[key] if type(value) is self.pending else value

    def pop(self, key: str, default: Any = NOT_GIVEN) -> Any:
        self.settle()
        return dict.pop(self, key) if default is NOT_GIVEN else dict.pop(self, key, default)

    def popitem(self) -> tuple[str, Any]:
        self.settle()
        return dict.popitem(self)

    def setdefault(self, key: str, default: Any = None) -> Any:
        self.settle()
        return dict.setdefault(self, key, default)

    def values(self) -> Any:
        self.settle()
        return dict.values(self)

    def items(self) -> Any:
        self.settle()
        return dict.items(self)

    def __iter__(self) -> Iterator[str]:
        return dict.__iter__(self)

    def __eq__(self, other: object) -> bool:
        self.settle()
        return dict.__eq__(self, other)

    __hash__ = None

    def __repr__(self) -> str:
        self.settle()
        return dict.__repr__(self)

    def __or__(self, other: Any) -> Any:
        return dict(self) | other

    def __ror__(self, other: Any) -> Any:
        return other | dict(self)

    def copy(self) -> Any:
        return dict(self)

    def __copy__(self) -> Any:
        return self.copy()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copied deeply and pickled as the dict that it looks like."""
        return dict, (dict(self),)


class Pending:
    """Stands for something that a node says, such as its `val`: what it is, and its number among those of its kind."""

    __slots__ = ("kind", "number")

    def __init__(self, kind: str, number: int) -> None:
        self.kind = kind
        self.number = number


class Source(Protocol):
    """Knows what is pending."""

    def made(self, pending: Pending) -> Any:
        """The same object each time, if it is a tensor."""


class LateMeta(LateDict):
    """The `meta` of a node, in which some of what it says is pending."""

    __slots__ = ("source",)
    pending = Pending
    source: Source

    def _made(self, pending: Pending) -> Any:
        return self.source.made(pending)

    def copy(self) -> Any:
        """A dict that shares the values, also those that nobody has asked for yet."""
        other = LateMeta()
        for key in self:
            dict.__setitem__(other, key, dict.__getitem__(self, key))
        other.source = self.source
        return other
