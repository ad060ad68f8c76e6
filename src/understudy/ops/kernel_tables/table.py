"""Reads a file: the signatures that the CPU kernels of a release refuse, and the facts in which releases differ.

A file has lines of three kinds:

    fact clamp_saturates no
    set s3 = bool uint8 int8
    aten::mm 0=1 s3:  = *; s4:  = !   the main dtype is in column 0, and usually in column 1; refused: one of s3 with
                                      anything, one of s4 with another dtype
    aten::sin 0e s5:  =               refused for tensors without elements as well
"""

from __future__ import annotations

import functools
import re
import warnings
from pathlib import Path
from typing import NamedTuple

import torch

from understudy.ops.kernel_tables.boxes import Box, Cell
from understudy.ops.kernel_tables.signatures import SYMBOLS

FOLDER = Path(__file__).parent
RELATIONS = ("=", "!", "*", "0-d:=", "0-d:!", "0-d:*")
Release = tuple[int, int]


class RowText(NamedTuple):
    """The row of an operator."""

    main: int
    "The column of the main dtype."
    alike: tuple[int, ...]
    "Other columns that usually have it."
    refuses_empty: bool
    "Whether tensors without elements are refused as well: many kernels are not called for them."
    boxes: tuple[tuple[str, Box], ...]
    "What is refused, each with the class that eager raises if it is neither a RuntimeError nor a NotImplementedError."


class KernelTable:
    """The contents of a file."""

    def __init__(self, text: str) -> None:
        self.facts: dict[str, bool] = {}
        self.rows: dict[str, str] = {}
        self._sets: dict[str, frozenset[object]] = {}
        for line in text.splitlines():
            name, _, rest = line.partition(" ")
            if name == "fact":
                fact, _, holds = rest.partition(" ")
                self.facts[fact] = holds == "yes"
            elif name == "set":
                short, _, members = rest.partition(" = ")
                self._sets[short] = frozenset(
                    SYMBOLS[member] for member in members.split() if member in SYMBOLS
                )
            elif name and name != "#":
                self.rows[name] = rest

    def row(self, name: str) -> RowText | None:
        """What an operator refuses; None if nothing is known."""
        text = self.rows.get(name)
        if text is None:
            return None
        head, _, boxes = text.partition(" ")
        main, _, alike = head.partition("=")
        return RowText(
            main=int(main.rstrip("e")),
            alike=tuple(map(int, alike.split(","))) if alike else (),
            refuses_empty=main.endswith("e"),
            boxes=tuple(map(self._parse, boxes.split(";"))),
        )

    def _parse(self, text: str) -> tuple[str, Box]:
        """`IndexError s4: = !`: the class if it is none of the usual ones, the main dtypes, the other cells."""
        mains, _, cells = text.partition(":  ")
        error, _, mains = mains.strip().rpartition(" ")
        return error, tuple(map(self._parse_cell, (mains, *cells.split())))

    def _parse_cell(self, text: str) -> Cell:
        if text in RELATIONS:
            return text
        found = self._sets.get(text)
        return (
            frozenset(SYMBOLS[name] for name in text.split(",") if name in SYMBOLS)
            if found is None
            else found
        )


def available_releases() -> dict[Release, Path]:
    found = {}
    for path in FOLDER.glob("cpu-*.txt"):
        major, minor = path.stem.removeprefix("cpu-").split(".")
        found[int(major), int(minor)] = path
    return found


def nearest_release(release: Release) -> Release:
    """The release whose table is used: the latest one that is not later, else the earliest."""
    known = sorted(available_releases())
    return max((each for each in known if each <= release), default=known[0])


@functools.cache
def current_table() -> KernelTable:
    """The table of the installed torch. Warns once if another release's has to be used."""
    match = re.match(r"(\d+)\.(\d+)", torch.__version__)
    release = (int(match[1]), int(match[2])) if match else (0, 0)
    used = nearest_release(release)
    if used != release:
        warnings.warn(
            f"understudy has no table of CPU kernels for torch {torch.__version__}; using that of {used[0]}.{used[1]}, so "
            "unsupported dtypes may be reported differently than by this release",
            stacklevel=2,
        )
    return KernelTable(available_releases()[used].read_text())


def holds(fact: str) -> bool:
    """Whether a fact in which releases differ holds for the installed torch."""
    return current_table().facts[fact]
