"""LazyDict: a dict in which some values are made on first access."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

NOT_GIVEN: Any = object()


class LazyDict(dict[str, Any]):
    """A dict in which some values are pending: every access makes the value first.

    It overrides every method that returns values. `__iter__` is overridden because Python copies a dict (`dict(table)`,
    `{**table}`, `update`) without calling any method, unless its class overrides `__iter__`.
    """

    __slots__ = ()
    pending: type
    """The type of the placeholders of pending values."""

    def _make(self, pending: Any) -> Any:
        raise NotImplementedError

    def make_all(self) -> None:
        """Make all values."""
        for key, value in list(dict.items(self)):
            if type(value) is self.pending:
                self[key] = self._make(value)

    def __getitem__(self, key: str) -> Any:
        value = dict.__getitem__(self, key)
        if type(value) is self.pending:
            value = self[key] = self._make(value)
        return value

    def get(self, key: str, default: Any = None) -> Any:
        value = dict.get(self, key, default)
        return self[key] if type(value) is self.pending else value

    def pop(self, key: str, default: object = NOT_GIVEN) -> Any:
        self.make_all()
        return dict.pop(self, key) if default is NOT_GIVEN else dict.pop(self, key, default)

    def popitem(self) -> tuple[str, object]:
        self.make_all()
        return dict.popitem(self)

    def setdefault(self, key: str, default: object = None) -> Any:
        self.make_all()
        return dict.setdefault(self, key, default)

    def values(self) -> Any:
        self.make_all()
        return dict.values(self)

    def items(self) -> Any:
        self.make_all()
        return dict.items(self)

    def __iter__(self) -> Iterator[str]:
        return dict.__iter__(self)

    def __eq__(self, other: object) -> bool:
        self.make_all()
        return dict.__eq__(self, other)

    __hash__ = None

    def __repr__(self) -> str:
        self.make_all()
        return dict.__repr__(self)

    def __or__(self, other: Any) -> Any:
        return dict(self) | other

    def __ror__(self, other: Any) -> Any:
        return other | dict(self)

    def copy(self) -> Any:
        return dict(self)

    def __copy__(self) -> Any:
        return self.copy()

    def __reduce_ex__(self, protocol: object) -> Any:
        """Pickled and deep-copied as a plain dict."""
        return dict, (dict(self),)
