"""What the report has to say of a run, collected from wherever it is found out.

with RunNotes() as notes:
    add_note("weights not read")                          # from anywhere inside
    widen_margin(0.15, "torch.compile: …")                # memory is less sure than usual
    add_warning("the data loader gave 3 of 8 rows")       # under the verdict
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class RunNotes:
    """`margins`: parts of reserved memory, by their reasons."""

    notes: list[str] = field(default_factory=list)
    margins: dict[str, float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    made_up: list[str] = field(default_factory=list)
    """Data sets and tokenizers that were not here."""
    has_made_up_rows: bool = False
    """Whether a data set of the `datasets` library was generated."""
    programs: list[str] = field(default_factory=list)
    """That the script has started: they are not measured."""

    def __enter__(self) -> RunNotes:
        _active.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        _active.remove(self)


_active: list[RunNotes] = []


def active_notes() -> RunNotes | None:
    return _active[-1] if _active else None


def add_note(text: str) -> None:
    """Something that the report has to say of this run."""
    if _active and text not in _active[-1].notes:
        _active[-1].notes.append(text)


def add_warning(text: str) -> None:
    """Something because of which the verdict may not be that of the real run."""
    if _active and text not in _active[-1].warnings:
        _active[-1].warnings.append(text)


def widen_margin(part: float, reason: str) -> None:
    """The figures may be off by this part of reserved memory."""
    if _active:
        _active[-1].margins[reason] = part
