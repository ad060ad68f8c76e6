"""Events per second of the simulated allocator, all counters included, in processor time.

    python -m benchmarks.allocator

The program is a made-up training: parameters that stay, then steps of activations, temporaries and gradients of a few
sizes, in both pools. An event is a request or a free; what the loop itself costs is taken off in the second figure.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from understudy.simulation.allocator import Allocator

Event = tuple[int, int]
"""A number and a size for a request; the negative number, and 0, for the free of it."""


def make_program(layers: int = 48, steps: int = 20, seed: int = 0) -> list[Event]:
    draw = random.Random(seed)
    events: list[Event] = []

    def request(size: int) -> int:
        events.append((len(events) + 1, size))
        return len(events)

    def free(number: int) -> None:
        events.append((-number, 0))

    parameters = [draw.choice((4096, 8192, 1 << 14, 4 << 20, 16 << 20, 64 << 20)) for _ in range(layers * 10)]
    for size in parameters:
        request(size)
    for _ in range(steps):
        batch = draw.choice((1, 1, 2))
        kept = []
        for number in range(layers * 14):
            activation = request(draw.choice((512, 2048, 100_000, 3_000_000, 12_000_000, 24_000_000)) * batch)
            if number % 2:
                free(request(draw.choice((512, 5000, 1_500_000, 12_000_000)) * batch))
            if number % 3:
                kept.append(activation)
            else:
                free(activation)
        gradients = []
        for size in reversed(parameters):
            gradients.append(request(size))
            free(request(12_000_000 * batch))
            if kept:
                free(kept.pop())
        for number in (*kept, *gradients):
            free(number)
    return events


def seconds(events: list[Event], allocate: Callable[[int], int], free: Callable[[int], None]) -> float:
    addresses: dict[int, int] = {}
    start = time.process_time()
    for number, size in events:
        if number > 0:
            addresses[number] = allocate(size)
        else:
            free(addresses.pop(-number))
    return time.process_time() - start


def main() -> None:
    events = make_program()
    loop = min(seconds(events, lambda size: 0, lambda address: None) for _ in range(5))
    for settings in ("", "expandable_segments:True", "max_split_size_mb:128"):
        best = float("inf")
        for _ in range(7):
            allocator = Allocator(settings=settings)
            best = min(best, seconds(events, allocator.allocate, allocator.free))
        whole, alone = (len(events) / spent for spent in (best, best - loop))
        print(
            f"{settings or 'default settings':26} {whole:9,.0f} events/s, {alone:9,.0f} without the loop around them"
        )


if __name__ == "__main__":
    main()
