"""The steps of several ranks together: a collective starts when the last of its ranks has come.

    replay({0: log, 1: log}, seconds_of)      seconds of each phase of each step, by rank
    estimate_cluster(ranks, seconds_of)       the time of a step of all of them

Each rank's own estimate takes collectives to start when it comes to them. Here the logs are replayed together: stages of a
pipeline wait for their inputs, and uneven ranks for the slowest.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import exp, hypot, log

from understudy.timing.estimate import COMMUNICATION_ERROR, choose_steps, is_counted
from understudy.timing.rank_logs import (
    Awaited,
    EventWait,
    LocalWork,
    LoggedCollective,
    PhaseEnd,
    RankLog,
    Recorded,
    Synchronized,
)
from understudy.timing.step_time import TimeEstimate

OTHER_RANKS = "waiting for other ranks"
SecondsOf = Callable[[LoggedCollective], float]


@dataclass(frozen=True)
class RankTime:
    """A rank that was run, for itself and others. `time`: its own estimate; `steps`: that it has completed."""

    log: RankLog
    time: TimeEstimate
    steps: int
    count: int = 1
    """How many ranks it stands for, itself included."""


def estimate_cluster(
    ranks: Mapping[int, RankTime], seconds_of: SecondsOf, data_ranks: int | None = None
) -> TimeEstimate:
    """`data_ranks`: how many ranks have inputs of their own; rates are not known without it. What bounds the step is that of
    the rank with the most work of its own."""
    phases = replay({rank: found.log for rank, found in ranks.items()}, seconds_of)
    steps = {rank: _step_of(phases[rank], found) for rank, found in ranks.items()}
    seconds = max(sum(step.values()) for step in steps.values())
    busiest = max(ranks, key=lambda rank: ranks[rank].time.seconds_per_step)
    own = ranks[busiest].time
    part = min(1.0, own.seconds_per_step / seconds)
    shares = {name: share * part for name, share in own.bound_by.items()}
    if part < 1:
        shares[OTHER_RANKS] = 1 - part
    error = hypot(log(own.high_seconds / own.seconds_per_step), COMMUNICATION_ERROR * (1 - part))
    count = sum(found.count for found in ranks.values())

    def utilisation(name: str) -> float:
        work = sum(
            found.count * getattr(found.time, name) * found.time.seconds_per_step for found in ranks.values()
        )
        return work / count / seconds

    def rate(name: str) -> float | None:
        rates = [
            getattr(found.time, name) * found.time.seconds_per_step
            for found in ranks.values()
            if getattr(found.time, name)
        ]
        return max(rates) * data_ranks / seconds if rates and data_ranks else None

    return replace(
        own,
        seconds_per_step=seconds,
        low_seconds=seconds * exp(-error),
        high_seconds=seconds * exp(error),
        mfu=utilisation("mfu"),
        hfu=utilisation("hfu"),
        tokens_per_second=rate("tokens_per_second"),
        samples_per_second=rate("samples_per_second"),
        bound_by=dict(sorted(shares.items(), key=lambda item: -item[1])),
        phases=steps[busiest],
    )


def _step_of(phases: Mapping[tuple[int, str], float], rank: RankTime) -> dict[str, float]:
    """Seconds of each phase of a step."""
    chosen = choose_steps(rank.steps, {step for step, _ in phases})
    found: dict[str, float] = defaultdict(float)
    for (step, phase), seconds in phases.items():
        if step in chosen and is_counted(phase):
            found[phase] += seconds / rank.time.steps
    return dict(found)


# --- replay ----------------------------------------------------------------------------------------------------------


def replay(logs: Mapping[int, RankLog], seconds_of: SecondsOf) -> dict[int, dict[tuple[int, str], float]]:
    """Seconds of each phase of each step, by rank. Of ranks without a log, none is waited for."""
    found = _Replay(logs, seconds_of)
    found.run()
    return found.phases


@dataclass(eq=False)
class _Transfer:
    """A collective, or a message, that some of its ranks have come to."""

    expected: frozenset[int]
    seconds: float
    channel: Hashable
    is_message: bool
    arrivals: dict[int, float] = field(default_factory=dict)
    end: float | None = None


@dataclass
class _Replay:
    """All ranks of `logs`, each as far as it can go without the others."""

    logs: Mapping[int, RankLog]
    seconds_of: SecondsOf
    phases: dict[int, dict[tuple[int, str], float]] = field(default_factory=dict)
    _transfers: dict[Hashable, _Transfer] = field(default_factory=dict)
    _ends: dict[Hashable, float] = field(default_factory=dict)
    """The end of the last transfer of each channel."""

    def run(self) -> None:
        ranks = {rank: self._follow(rank, log) for rank, log in self.logs.items()}
        waiting: dict[int, _Transfer] = {}
        ready = deque(ranks)
        while ready or waiting:
            if not ready:  # the logs do not match: a fault that is reported elsewhere
                self._complete(next(iter(waiting.values())))
            else:
                rank = ready.popleft()
                wanted = next(ranks[rank], None)
                if wanted is not None:
                    waiting[rank] = wanted
            for rank in [rank for rank, transfer in waiting.items() if transfer.end is not None]:
                del waiting[rank]
                ready.append(rank)

    def _complete(self, transfer: _Transfer) -> None:
        start = max((*transfer.arrivals.values(), self._ends.get(transfer.channel, 0.0)))
        transfer.end = self._ends[transfer.channel] = start + transfer.seconds

    def _arrive(
        self, rank: int, collective: LoggedCollective, counts: dict[Hashable, int], time: float
    ) -> _Transfer:
        members: Hashable = collective.ranks
        if collective.is_message:
            members = (rank, collective.peer) if collective.kind == "send" else (collective.peer, rank)
        channel = collective.group, collective.tag, members  # groups of other ranks may have the same name
        key = channel, counts[channel]
        counts[channel] += 1
        transfer = self._transfers.get(key)
        if transfer is None:
            expected = self.logs.keys() & set(collective.ranks)
            transfer = _Transfer(
                frozenset(expected), self.seconds_of(collective), channel, collective.is_message
            )
            self._transfers[key] = transfer
        transfer.arrivals[rank] = time
        if transfer.end is None and transfer.arrivals.keys() >= transfer.expected:
            self._complete(transfer)
            del self._transfers[key]
        return transfer

    def _follow(self, rank: int, log: RankLog) -> Generator[_Transfer, None, None]:
        """One rank; yields what it has to wait for."""
        host, before = 0.0, 0.0
        free: dict[Hashable, float] = defaultdict(float)
        events: dict[int, float] = {}
        counts: dict[Hashable, int] = defaultdict(int)
        pending: dict[int, _Transfer] = {}
        phases = self.phases[rank] = defaultdict(float)

        def wait(stream: Hashable, transfer: _Transfer) -> Iterator[_Transfer]:
            if transfer.end is None:
                yield transfer
            assert transfer.end is not None
            free[stream] = max(free[stream], transfer.end)

        for entry in log.entries:
            match entry:
                case LocalWork(stream, seconds, busy, reach):
                    if busy:
                        free[stream] = max(free[stream] + busy, host + reach)
                    host += seconds
                case LoggedCollective():
                    time = max(host, free[entry.stream])
                    transfer = self._arrive(rank, entry, counts, time)
                    if entry.is_waited:
                        yield from wait(entry.stream, transfer)
                    else:
                        pending[entry.number] = transfer
                case Awaited(stream, number):
                    if (found := pending.pop(number, None)) is not None:
                        yield from wait(stream, found)
                case Recorded(event, stream):
                    events[event] = max(host, free[stream])
                case EventWait(event, None):
                    host = max(host, events.get(event, 0.0))
                case EventWait(event, stream):
                    free[stream] = max(free[stream], events.get(event, 0.0))
                case Synchronized(None):
                    host = max((host, *free.values()))
                case Synchronized(stream):
                    host = max(host, free[stream])
                case PhaseEnd(step, phase):
                    for number in [n for n, transfer in pending.items() if not transfer.is_message]:
                        transfer = pending.pop(number)
                        for stream in list(free):
                            yield from wait(stream, transfer)
                    done = max((host, *free.values()))
                    phases[step, phase] += done - before
                    before = done
