"""A listener that is told which events are births and which are deaths."""

from __future__ import annotations

from understudy.simulation.events import Listener, MemoryRecord


class BirthsAndDeaths(Listener):
    room = -1

    def __init__(self) -> None:
        self.living: dict[int, MemoryRecord] = {}

    def on_events(self, events: list[MemoryRecord]) -> None:
        for record in events:
            is_birth = self.living.pop(id(record), None) is None
            if is_birth:
                self.living[id(record)] = record
            self.on_event(record, is_birth)

    def on_event(self, record: MemoryRecord, is_birth: bool) -> None:
        raise NotImplementedError
