"""Patches that a test registers, or a page of the documentation, are forgotten afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from understudy.patching import ENGINE


@contextmanager
def forget_new_patches() -> Iterator[None]:
    before, found_before = set(ENGINE.registered), list(ENGINE.found_places)
    yield
    ENGINE.found_places[:] = found_before
    new = {
        patch for patch in ENGINE.registered  # a room of the library that was loaded meanwhile keeps its patches
        if patch not in before and not patch.make.__module__.startswith("understudy.")
    }  # fmt: skip
    for patches in (ENGINE.registered, ENGINE._unresolved):
        patches[:] = [patch for patch in patches if patch not in new]
    for key, place in list(ENGINE._places.items()):
        if new & set(place.patches):
            del ENGINE._places[key]
    ENGINE._changes.clear()
