"""Sets of signatures in few lines: a box has the main dtypes, and for each column the symbols that it includes.

The main dtype of a signature is that of a column chosen for each operator: the first of those that usually have one dtype. A
cell is a set of symbols, or `=` for the main dtype, `!` for every other dtype, `*` for every dtype. `0-d:=`, `0-d:!` and
`0-d:*` are the same for tensors without dimensions.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import Any, Union

import torch

from understudy.ops.kernel_tables.signatures import DTYPES, Signature, Symbol

Cell = Union[str, frozenset[Symbol]]
Box = tuple[Cell, ...]
Form = tuple[tuple[Cell, "Form"], ...]
"""Boxes as a tree: cells of a column, each with the cells of the columns after it."""
EVERY_DTYPE = frozenset(DTYPES.values())
Dtype = torch.dtype


def main_dtype(signature: Signature, column: int) -> Symbol:
    """Return the dtype in this column, or None."""
    symbol = signature[column] if signature else None
    return symbol[0] if type(symbol) is tuple else symbol if type(symbol) is Dtype else None


def with_main(signature: Signature, main: Symbol, alike: Container[int]) -> Signature:
    """The signature with the main dtype for tensors that are not given, in columns that usually have it; unless another one
    of these has a dtype of its own."""
    if any(
        symbol is not None and symbol is not main
        for column, symbol in enumerate(signature)
        if column in alike
    ):
        return signature
    return tuple(
        main if symbol is None and column in alike else symbol for column, symbol in enumerate(signature)
    )


def cover(refused: set[Signature], column: int) -> list[Box]:
    """Boxes that include these signatures, and no others. All signatures have one length, and the main dtype is in this
    column."""
    beside_main = {(main_dtype(signature, column), *signature) for signature in refused}
    by_main: dict[Form, set[Symbol]] = {}
    for main in {signature[0] for signature in beside_main}:
        form = _form(_rests(beside_main, main), main)
        by_main.setdefault(form, set()).add(main)
    return [
        ("*" if mains == EVERY_DTYPE else frozenset(mains), *rest)
        for form, mains in by_main.items()
        for rest in _paths(form)
    ]


def _rests(signatures: Iterable[Signature], head: Symbol) -> set[Signature]:
    return {signature[1:] for signature in signatures if signature[0] == head}


def _form(refused: set[Signature], main: Symbol) -> Form:
    if () in refused:
        return ()
    grouped: dict[Form, set[Symbol]] = {}
    for symbol in {signature[0] for signature in refused}:
        grouped.setdefault(_form(_rests(refused, symbol), main), set()).add(symbol)
    cells = [(_cell(symbols, main), rest) for rest, symbols in grouped.items()]
    return tuple(sorted(cells, key=repr))


def _cell(symbols: set[Any], main: Symbol) -> Cell:
    for prefix, wrap in (("", _as_it_is), ("0-d:", _as_small)):
        if symbols == {wrap(main)} and main is not None:
            return f"{prefix}="
        if symbols == set(map(wrap, EVERY_DTYPE - {main})):
            return f"{prefix}!"
        if symbols == set(map(wrap, EVERY_DTYPE)):
            return f"{prefix}*"
    return frozenset(symbols)


def _as_it_is(symbol: Symbol) -> Symbol:
    return symbol


def _as_small(symbol: Symbol) -> Symbol:
    return (symbol,)


def _paths(form: Form) -> Iterator[Box]:
    if not form:
        yield ()
    for cell, rest in form:
        for path in _paths(rest):
            yield (cell, *path)


def includes(box: Box, main: Symbol, signature: Signature) -> bool:
    """Whether a box includes a signature with this main dtype."""
    for cell, symbol in zip(box, (main, *signature), strict=True):
        if type(cell) is not str:
            if symbol not in cell:
                return False
            continue
        if cell[:4] == "0-d:":
            if type(symbol) is not tuple:
                return False
            cell, (symbol,) = cell[4:], symbol
        if (
            type(symbol) is not Dtype
            or (symbol is main and cell == "!")
            or (symbol is not main and cell == "=")
        ):
            return False
    return True
