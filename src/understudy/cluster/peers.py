"""A rank's end of the broker: exchanges of values, and a store that all ranks share."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from understudy.lines import user_line
from understudy.simulation.network import Meeting
from understudy.simulation.steps import EndOfScript


class RankEnded(EndOfScript):
    """What the rank waits for will not come: another rank has failed, or all wait. The script is ended."""


class BrokerPeers:
    """The other ranks of this process."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._stores: list[torch.distributed.Store] = []
        """C++ holds a store without its Python object."""
        self.was_cut_off = False
        """Whether the rank was ended while it waited."""

    def exchange(self, meeting: Meeting, payload: object, wanted: tuple[int, ...]) -> dict[int, Any]:
        with self._lock:
            self._connection.send(("exchange", meeting, payload, wanted))
            return self._receive() if wanted else {}

    def ask_store(self, what: str, key: object, value: object = None) -> Any:
        with self._lock:
            self._connection.send(("store", what, key, value, user_line()))
            return self._receive()

    def finish(self, result: object) -> None:
        self._connection.send(("done", result))

    def make_store(self) -> torch.distributed.Store:
        store = BrokerStore(self)
        self._stores.append(store)
        return store

    def _receive(self) -> Any:
        what, value = self._connection.recv()
        if what == "end":
            self.was_cut_off = True
            raise RankEnded
        return value


class BrokerStore(torch.distributed.Store):
    """The store of all ranks, kept by the broker. Timeouts do not count: time stands still in a rehearsal."""

    def __init__(self, peers: BrokerPeers, prefix: str = "") -> None:
        super().__init__()
        self._peers, self._prefix = peers, prefix

    def _name(self, key: object) -> str:
        return f"{self._prefix}{key}"

    def set(self, key: str, value: Any) -> None:
        self._peers.ask_store(
            "set", self._name(key), value.encode() if isinstance(value, str) else bytes(value)
        )

    def get(self, key: str) -> bytes:
        return bytes(self._peers.ask_store("get", self._name(key)))

    def add(self, key: str, value: int) -> int:
        return int(self._peers.ask_store("add", self._name(key), value))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._peers.ask_store("check", [self._name(key) for key in keys]))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._peers.ask_store("wait", [self._name(key) for key in keys])

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        values = [value.encode() if isinstance(value, str) else bytes(value) for value in (expected, desired)]
        return bytes(self._peers.ask_store("compare_set", self._name(key), values))

    def delete_key(self, key: str) -> bool:
        return bool(self._peers.ask_store("delete", self._name(key)))

    def num_keys(self) -> int:
        return int(self._peers.ask_store("count", ""))

    def set_timeout(self, timeout: timedelta) -> None:
        """Nothing waits for long."""
