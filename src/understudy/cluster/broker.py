"""The parent of all ranks: it exchanges their values, keeps their store, and decides who computes.

    broker = Broker(ranks, jobs=2, start=start)
    outcomes, faults = broker.run()

A rank computes, waits, or has ended; `jobs` of them compute at once. A rank that waits frees its slot, and ranks that have
not begun are started when a slot is free. If no rank computes and none can continue, the waiting ranks are in a deadlock,
or wait for one that has ended: that is a fault, and they are ended.

A rank that is not run has the value of the nearest rank of the group that is run. Where some ranks are run for all
(`is_sample`), its messages are those of the rank at its position in a group that is laid out alike; its value of a
broadcast, too. Ranks from which the first one gets messages or broadcasts are started for that, and so is a rank
without which nobody can continue. `run` may then be called again after `add`: values that ranks have given are kept.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from understudy.cluster.faults import (
    Fault,
    describe_absence,
    describe_deadlock,
    describe_unset_key,
    shorten_line,
)
from understudy.cluster.layout import LayoutError
from understudy.simulation.network import Meeting

GRACE = 10.0
"""Seconds in which ranks that compute may come to an exchange, or their end, after another one has failed."""
MOST_ROOTS = 8
"""Ranks that are run because they broadcast, of a sample: a program may let every rank do so in turn."""
Started = tuple[int, "Connection[Any, Any]"]


def read_private_bytes(pid: int) -> int:
    """Memory that a process does not share with others; 0 where the system does not provide it."""
    return _sum_fields(f"/proc/{pid}/smaps_rollup", ("Private_Clean", "Private_Dirty"))


def read_available_bytes() -> int:
    return _sum_fields("/proc/meminfo", ("MemAvailable",)) or sys.maxsize


def _sum_fields(path: str, names: tuple[str, ...]) -> int:
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line.split() for line in file]
    except OSError:
        return 0
    return sum(1024 * int(line[1]) for line in lines if line and line[0].rstrip(":") in names)


@dataclass
class RankOutcome:
    """How a rank ended. `result`: what its program returned; None if the process was killed, or did not begin.
    `is_whole`: it was neither ended nor left out because another rank failed."""

    rank: int
    result: Any = None
    signal: int = 0
    place: str = ""
    """Where a process waited when it was killed, or its last exchange."""
    is_whole: bool = True

    @property
    def has_failed(self) -> bool:
        return self.is_whole and (self.result is None or bool(self.result.get("has_failed")))


Place = tuple[Any, ...]
"""An exchange, with its ranks counted from the first of the group: those of groups that are laid out alike are equal."""


@dataclass
class _Request:
    """What a rank waits for: values of ranks, or keys of the store. `borrowed`: the place of a value that another group's
    rank gives, and the position of that rank."""

    meeting: Meeting | None
    wanted: frozenset[int] = frozenset()
    borrowed: tuple[Place, int] | None = None
    keys: tuple[str, ...] = ()
    answer: Callable[[], object] = lambda: None
    line: str = ""
    """For a request to the store."""


@dataclass
class _Rank:
    number: int
    pid: int = 0
    connection: Any = None
    watch: int = -1
    """A descriptor that is readable when the process has ended."""
    request: _Request | None = None
    reply: tuple[str, Any] | None = None
    is_computing: bool = False
    turn: int = 0
    """When its reply was ready: the one that waits longest is answered first."""
    polls: int = 0
    """Questions to the store, one after another, that did not wait and changed nothing."""
    polled: tuple[str, str] = "", ""
    """The key of the last one, and the line."""
    last_exchange: str = ""
    outcome: RankOutcome | None = None

    @property
    def has_begun(self) -> bool:
        return self.connection is not None or self.outcome is not None


MOST_POLLS, LAST_POLLS = 32, 2048
"""A rank that has asked the store so often is answered when others can do nothing else; then, it waits for nothing."""


class Broker:
    """`start(rank)` forks a rank; returns its process and the connection to it."""

    def __init__(
        self, ranks: Sequence[int], jobs: int, start: Callable[[int], Started], *, world_size: int = 0,
        is_sample: bool = False,
    ) -> None:  # fmt: skip
        self.world_size = world_size or len(ranks)
        self.ranks: dict[int, _Rank] = {}
        self.add(ranks)
        self.first = min(ranks)
        self.jobs = jobs
        self.is_sample = is_sample
        self.faults: list[Fault] = []
        self._start = start
        self._store: dict[str, bytes] = {}
        self._values: dict[tuple[Any, ...], dict[int, Any]] = {}
        """What was given to each exchange, by rank."""
        self._given: dict[Place, dict[int, Any]] = {}
        """For a sample, the same by place, and by the position of the rank."""
        self._roots = self._turns = 0
        self.borrowed: dict[tuple[str, str], None] = {}
        """Kinds and lines of exchanges with ranks that are not run."""
        self._is_ending = False
        self._deadline: float | None = None
        """When ranks that still compute are killed, because another one has failed."""

    def run(self) -> dict[int, RankOutcome]:
        """Until every rank has ended. Leaves no process behind, whatever happens."""
        try:
            while self._schedule():
                self._receive()
        finally:
            self._end_all()
        return {number: rank.outcome or RankOutcome(number) for number, rank in self.ranks.items()}

    def add(self, ranks: Sequence[int]) -> None:
        """Ranks that are run, too."""
        self.ranks |= {number: _Rank(number) for number in ranks if number not in self.ranks}

    # --- who computes ------------------------------------------------------------------------------------------------

    def _schedule(self) -> bool:
        """Fill the free places. False if all ranks have ended."""
        while True:
            computing = sum(rank.is_computing for rank in self.ranks.values())
            ready = sorted(
                (rank for rank in self.ranks.values() if rank.reply is not None), key=lambda rank: rank.turn
            )
            polling = [rank for rank in ready if rank.polls > MOST_POLLS and not self._is_ending]
            eager = [rank for rank in ready if rank not in polling]
            waiting = [rank for rank in self.ranks.values() if not rank.has_begun]
            if computing < self.jobs and eager:
                self._answer(eager[0])
            elif computing < self.jobs and waiting and not self._is_ending:
                self._begin(waiting[0])
            elif computing:
                return True
            elif polling and any(rank.polls <= LAST_POLLS for rank in polling):
                self._answer(polling[0])
            elif polling:
                for rank in polling:
                    key, line = rank.polled
                    rank.reply, rank.request = None, _Request(None, keys=(key,), line=line)
            elif any(rank.request is not None for rank in self.ranks.values()):
                if self._is_ending or not self._start_missing():
                    self._end_stuck()
            else:
                for rank in waiting:
                    rank.outcome = RankOutcome(rank.number, is_whole=False)
                return False

    def _begin(self, rank: _Rank) -> None:
        self._check_memory()
        rank.pid, rank.connection = self._start(rank.number)
        rank.is_computing = True
        if hasattr(os, "pidfd_open"):
            rank.watch = os.pidfd_open(rank.pid)

    def _check_memory(self) -> None:
        """Ranks that wait for each other are alive at once, so that all of them have to be in the memory of this machine."""
        alive = [rank for rank in self.ranks.values() if rank.pid and rank.outcome is None]
        each = read_private_bytes(alive[0].pid) if alive else 0
        available = read_available_bytes()
        if each and available < 2 * each:
            more = sum(not rank.has_begun for rank in self.ranks.values())
            raise LayoutError(
                f"{len(alive)} ranks are alive at once with {each >> 20:,} MiB each, and {available >> 20:,} MiB are left "
                f"for {more} more; rehearse with --ranks classes"
            )

    def _answer(self, rank: _Rank) -> None:
        reply, rank.reply = rank.reply, None
        rank.is_computing = True
        try:
            rank.connection.send(reply)
        except OSError:
            self._bury(rank)

    # --- messages ----------------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        alive = [rank for rank in self.ranks.values() if rank.connection is not None and rank.outcome is None]
        sources: dict[Any, _Rank] = {rank.connection: rank for rank in alive}
        sources |= {rank.watch: rank for rank in alive if rank.watch >= 0}
        timeout = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        found = wait(list(sources), timeout)
        if not found:
            for rank in alive:
                self._stop(rank)
        for source in found:
            rank = sources[source]
            if rank.outcome is not None:
                continue
            try:
                if rank.connection.poll():
                    self._take(rank, rank.connection.recv())
                elif source is rank.watch:
                    self._bury(rank)
            except (EOFError, OSError):
                self._bury(rank)

    def _take(self, rank: _Rank, message: tuple[Any, ...]) -> None:
        what, *rest = message
        if what == "exchange":
            self._exchange(rank, *rest)
        elif what == "store":
            self._use_store(rank, *rest)
        else:
            assert what == "done", what
            self._finish(rank, RankOutcome(rank.number, rest[0]))

    def _exchange(self, rank: _Rank, meeting: Meeting, payload: Any, wanted: tuple[int, ...]) -> None:
        values = self._values.setdefault(meeting.key, {})
        values[rank.number] = payload
        rank.polls = 0
        rank.last_exchange = (
            f"{meeting.kind} at {shorten_line(meeting.line)}" if meeting.line else meeting.kind
        )
        if self.is_sample:
            self._give_at_place(rank.number, meeting, payload, wanted)
        absent = sorted(set(wanted) - self.ranks.keys())
        if meeting.key[0] == "pair" and absent and not self.is_sample:
            self._reply(rank, ("end", None))
            self.faults.append(describe_absence(rank.number, meeting.kind, meeting.line, absent))
            return
        if wanted:
            self._wait(rank, self._make_request(rank.number, meeting, wanted, absent))
        for other in self.ranks.values():
            if other.request is not None and (
                other.request.borrowed is not None
                or (other.request.meeting is not None and other.request.meeting.key == meeting.key)
            ):
                self._check(other)

    def _make_request(
        self, asking: int, meeting: Meeting, wanted: tuple[int, ...], absent: Sequence[int]
    ) -> _Request:
        if absent:
            self.borrowed[meeting.kind, shorten_line(meeting.line)] = None
        values = self._values[meeting.key]
        if absent and self.is_sample and len(wanted) == 1 and self.first not in meeting.group.ranks:
            borrowed = _place_of(meeting), wanted[0] - meeting.group.ranks[0]
            place, position = borrowed
            return _Request(
                meeting, borrowed=borrowed, answer=lambda: {wanted[0]: self._given[place][position]}
            )
        sources = {number: self._substitute(number, meeting, asking) for number in wanted}
        return _Request(
            meeting,
            frozenset(sources.values()),
            answer=lambda: {number: values[source] for number, source in sources.items()},
        )

    def _give_at_place(self, number: int, meeting: Meeting, payload: Any, wanted: tuple[int, ...]) -> None:
        """For ranks of groups that are laid out alike. In a group of the first rank, those that send are run."""
        first = meeting.group.ranks[0]
        self._given.setdefault(_place_of(meeting), {}).setdefault(number - first, payload)
        if self.first not in meeting.group.ranks:
            return
        if meeting.key[0] == "pair":
            self.add(meeting.key[3:5])
        elif len(wanted) == 1 and wanted[0] not in self.ranks and self._roots < MOST_ROOTS:
            self._roots += 1
            self.add(wanted)

    def _substitute(self, number: int, meeting: Meeting, asking: int) -> int:
        """The rank that is run in place of another: the nearest of its group."""
        if number in self.ranks:
            return number
        run = [other for other in meeting.group.ranks if other in self.ranks]
        return min(run or [asking], key=lambda other: abs(other - number))

    def _start_missing(self) -> bool:
        """Nobody can continue without a rank that is not run: it is run now. Of a broadcast, the value of another rank is
        taken."""
        for rank in self.ranks.values():
            request = rank.request
            if request is not None and request.borrowed is not None and request.meeting is not None:
                meeting = request.meeting
                root = meeting.group.ranks[0] + request.borrowed[1]
                if meeting.key[0] == "pair":
                    self.add([root])
                rank.request = self._make_plain_request(rank.number, meeting, root)
                self._check(rank)
                return True
        return False

    def _make_plain_request(self, asking: int, meeting: Meeting, root: int) -> _Request:
        values, source = self._values[meeting.key], self._substitute(root, meeting, asking)
        return _Request(meeting, frozenset([source]), answer=lambda: {root: values[source]})

    def _wait(self, rank: _Rank, request: _Request) -> None:
        rank.is_computing = False
        rank.request = request
        self._check(rank)
        if rank.request is not None and self._is_ending:
            self._end(rank)

    def _check(self, rank: _Rank) -> None:
        """Whether a rank that waits can go on."""
        request = rank.request
        assert request is not None
        if request.borrowed is not None:
            place, position = request.borrowed
            is_met = position in self._given.get(place, ())
        elif request.meeting is not None:
            values = self._values[request.meeting.key]
            is_met = request.wanted <= values.keys()
        else:
            is_met = all(key in self._store for key in request.keys)
        if is_met:
            self._reply(rank, ("ok", request.answer()))
            if request.meeting is not None and not self.is_sample:
                self._forget(request.meeting)

    def _forget(self, meeting: Meeting) -> None:
        """Values that all ranks of the group have given and taken are not kept."""
        is_pair = meeting.key[0] == "pair"
        members = 2 if is_pair else sum(number in self.ranks for number in meeting.group.ranks)
        is_wanted = any(
            rank.request is not None
            and rank.request.meeting is not None
            and rank.request.meeting.key == meeting.key
            for rank in self.ranks.values()
        )
        if not is_wanted and len(self._values[meeting.key]) >= members:
            del self._values[meeting.key]

    # --- the store ---------------------------------------------------------------------------------------------------

    def _use_store(self, rank: _Rank, what: str, key: Any, value: Any, line: str) -> None:
        answer: Any = None
        if what in ("get", "wait"):
            keys = tuple(key) if what == "wait" else (key,)
            self._wait(
                rank,
                _Request(
                    None, keys=keys, answer=lambda: self._store[keys[0]] if what == "get" else None, line=line
                ),
            )
            return
        before = dict(self._store) if what in ("add", "compare_set") else {}
        if what == "set":
            self._store[key] = value
        elif what == "add":
            answer = int(self._store.get(key, b"0")) + value
            self._store[key] = str(answer).encode()
        elif what == "check":
            answer = all(each in self._store for each in key)
        elif what == "compare_set":
            expected, desired = value
            if self._store.get(key, b"") == expected:
                self._store[key] = desired
            answer = self._store.get(key, expected)
        elif what == "delete":
            answer = self._store.pop(key, None) is not None
        else:
            answer = len(self._store)
        self._reply(rank, ("ok", answer))
        if what in ("check", "count") or before == self._store:
            rank.polls, rank.polled = rank.polls + 1, (key[0] if what == "check" else key, line)
            return
        for other in self.ranks.values():
            other.polls = 0
            if other.request is not None and other.request.meeting is None:
                self._check(other)

    def _reply(self, rank: _Rank, reply: tuple[str, Any]) -> None:
        self._turns += 1
        rank.is_computing, rank.request, rank.reply, rank.turn = False, None, reply, self._turns

    # --- the end -----------------------------------------------------------------------------------------------------

    def _finish(self, rank: _Rank, outcome: RankOutcome) -> None:
        rank.outcome, rank.is_computing, rank.request, rank.reply = outcome, False, None, None
        if outcome.has_failed:
            self._is_ending = True
            self._deadline = self._deadline or time.monotonic() + GRACE
            for other in self.ranks.values():
                if other.request is not None:
                    self._end(other)

    def _bury(self, rank: _Rank) -> None:
        """A process that ended without a result."""
        code = self._reap(rank)
        where = (
            f"{'after' if rank.request is None else 'in'} {rank.last_exchange}" if rank.last_exchange else ""
        )
        self._finish(rank, RankOutcome(rank.number, signal=-code if code < 0 else 0, place=where))

    def _stop(self, rank: _Rank) -> None:
        os.kill(rank.pid, signal.SIGKILL)
        self._reap(rank)
        self._finish(rank, RankOutcome(rank.number, is_whole=False))

    def _reap(self, rank: _Rank) -> int:
        if not rank.pid:
            return 0
        _, status = os.waitpid(rank.pid, 0)
        rank.pid = 0
        if rank.watch >= 0:
            os.close(rank.watch)
            rank.watch = -1
        rank.connection.close()
        return os.waitstatus_to_exitcode(status)

    def _end(self, rank: _Rank) -> None:
        """End a waiting rank: it gets `end` as its reply."""
        self._reply(rank, ("end", None))

    def _end_stuck(self) -> None:
        """Nobody computes, and some wait."""
        waiting = [rank for rank in self.ranks.values() if rank.request is not None]
        blocked: dict[int, tuple[str, str, tuple[int, ...]]] = {}
        for rank in waiting:
            request = rank.request
            assert request is not None
            if request.meeting is None:
                blocked[rank.number] = (f"a store, for the key {request.keys[0]!r}", request.line, ())
            else:
                missing = request.wanted - self._values[request.meeting.key].keys()
                blocked[rank.number] = (request.meeting.kind, request.meeting.line, tuple(sorted(missing)))
        ended = {
            number: rank.outcome.result or {}
            for number, rank in self.ranks.items()
            if rank.outcome is not None and rank.outcome.is_whole
        }
        has_keys = any(rank.request is not None and rank.request.meeting is None for rank in waiting)
        if self._is_ending:
            pass
        elif has_keys and len(self.ranks) < self.world_size:
            self.faults.append(describe_unset_key(blocked))
        elif (fault := describe_deadlock(blocked, ended)) is not None:
            self.faults.append(fault)
        self._is_ending = True
        for rank in waiting:
            self._end(rank)

    def _end_all(self) -> None:
        """Processes that still run are killed."""
        for rank in self.ranks.values():
            if rank.pid:
                if rank.outcome is None:
                    os.kill(rank.pid, signal.SIGKILL)
                code = self._reap(rank)
                if rank.outcome is None:
                    rank.outcome = RankOutcome(rank.number, signal=-code if code < 0 else 0)


def _place_of(meeting: Meeting) -> Place:
    what, _, ranks, *rest = meeting.key
    first = ranks[0]
    ends = [number - first for number in rest[:2]] if what == "pair" else []
    return (what, tuple(number - first for number in ranks), *ends, *rest[len(ends) :])
