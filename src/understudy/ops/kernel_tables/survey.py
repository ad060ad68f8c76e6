"""Asks real CPU kernels which dtypes they take, in child processes: a kernel that ends its process costs one row.

The calls are those that torch's database of operators makes. Each is repeated with other dtypes: all combinations where two
arguments have dtypes; else one argument at a time, beside arguments of each main dtype. A signature is refused if every
sample is refused, with its own values, with ones, and with identities.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch

from understudy import _torch
from understudy.ops.kernel_tables.boxes import Box, Cell, cover, main_dtype, with_main
from understudy.ops.kernel_tables.signatures import (
    DTYPES,
    NAMES,
    NUMBERS,
    Column,
    Signature,
    Symbol,
    columns_of,
    signature_of,
)

CPU_ISA = "AVX512_CORE_FP16"
"""The instruction set that oneDNN is limited to, so that a table does not depend on the machine."""
SAMPLES = 8
"""Samples of an entry that are recorded."""
MOST_ENTRIES = 3
"""Entries of an operator that are tried. All of them, if strings select the computation."""
REPEATED = 2
"""Calls of each pattern of arguments that are repeated."""
MOST_SECONDS = 90.0
"""Limit of processor time for one operator. Remaining combinations count as accepted."""
LARGEST = 1 << 16
"""Elements of the largest tensor of a call that is repeated."""
REFUSALS = (RuntimeError, IndexError, ValueError, TypeError)
ABOUT_DTYPES = ("not implemented for", "dtype", "scalar type", "not supported for", "Could not run")
NOT_ABOUT_DTYPES = ("shape of the mask", "out of bounds", "out of range", "must be nonzero")
"""Parts of messages that come from indices that became masks, and from numbers that a dtype can't hold, or cuts to 0."""


class KernelAnswers:
    """What an operator answers to signatures: the class that it raises, None if it accepts one."""

    def __init__(self, samples: list[Signature]) -> None:
        self.main = main_column(samples[0]) if samples else 0
        dtype = main_dtype(samples[0], self.main) if samples else None
        usual = [sample for sample in samples if main_dtype(sample, self.main) is dtype]
        alike = {
            column for sample in usual for column in range(len(sample)) if main_dtype(sample, column) is dtype
        }
        self.alike = tuple(sorted(alike - {self.main})) if dtype is not None else ()
        self.by_signature: dict[Signature, str | None] = {}
        self.refuses_empty: bool | None = None
        "Whether it refuses tensors without elements as well, for which many kernels are not called; None if not known."

    def add(self, signature: Signature, answer: str | None) -> None:
        """A signature is accepted if one sample is."""
        if self.by_signature.get(signature, "") is not None:
            self.by_signature[signature] = answer

    def merge(self, other: KernelAnswers) -> None:
        for signature, answer in other.by_signature.items():
            self.add(signature, answer)
        self.note_empty(other.refuses_empty)

    def note_empty(self, is_refused: bool | None) -> None:
        if is_refused is not None:
            self.refuses_empty = is_refused and self.refuses_empty is not False


def survey(names: list[str] | None = None) -> Iterator[tuple[str, KernelAnswers | None]]:
    """(operator, answers) of all operators that the database calls, or of those under these names of the database; None for
    an operator that ends its process. An operator that several entries call comes more than once."""
    if os.environ.get("ONEDNN_MAX_CPU_ISA") != CPU_ISA:
        raise RuntimeError(
            f"expected ONEDNN_MAX_CPU_ISA={CPU_ISA} in the environment before torch is imported"
        )
    done: Counter[str] = Counter()
    crashed: set[str] = set()
    for entry in _torch.sampled_operators():
        if names is None or entry.name in names:
            yield from _survey_entry(entry, done, crashed)


def _survey_entry(
    entry: Any, done: Counter[str], crashed: set[str]
) -> Iterator[tuple[str, KernelAnswers | None]]:
    """Try in child processes until one of them finishes."""
    context: Any = multiprocessing.get_context("fork")
    while True:
        ours, theirs = context.Pipe()
        child = context.Process(target=_try_entry, args=(entry, done, crashed, theirs), daemon=True)
        child.start()
        theirs.close()
        asking: Any = None
        is_over = False
        with suppress(EOFError):
            while ours.poll(MOST_SECONDS * 5):
                kind, value = ours.recv()
                if kind == "asking":
                    asking = value
                elif kind == "answers":
                    done[asking] += 1
                    yield asking, value
                    asking = None
                else:
                    is_over = True
                    break
        child.kill()
        child.join()
        if is_over or asking is None:
            return
        crashed.add(asking)
        yield asking, None


def _try_entry(entry: Any, done: Counter[str], crashed: set[str], pipe: Connection) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (for the life of this process)
    by_operator: dict[str, list[Any]] = {}
    for call in filter(_can_be_tried, _torch.sample_calls(entry, SAMPLES)):
        by_operator.setdefault(call[0].name().removesuffix(".default"), []).append(call)
    for name, calls in by_operator.items():
        has_names = any(isinstance(mode, str) for mode in _modes(calls[0][1:]))
        if name not in crashed and (done[name] < MOST_ENTRIES or has_names):
            pipe.send(("asking", name))
            pipe.send(("answers", try_kernel(calls)))
    pipe.send(("over", None))


def _modes(arguments: Any) -> list[object]:
    """Return strings and bools among the arguments, which select the computation, such as `rounding_mode=`."""
    return [leaf for leaf in _torch.tree_leaves(arguments) if isinstance(leaf, (str, bool))]


def _can_be_tried(call: Any) -> bool:
    op, *arguments = call
    is_writing_out = any(argument.kwarg_only and argument.alias_info for argument in op._schema.arguments)
    tensors = (leaf for leaf in _torch.tree_leaves(arguments) if isinstance(leaf, torch.Tensor))
    return (
        op.namespace == "aten"
        and not is_writing_out
        and all(each.layout is torch.strided for each in tensors)
    )


def try_kernel(calls: list[Any]) -> KernelAnswers:
    """The answers of one operator to these calls, with other dtypes."""
    columns = columns_of(calls[0][0])
    calls = [*calls, *_more_calls(calls)]
    bases = [_with_default_numbers(columns, signature_of(columns, args, kwargs)) for _, args, kwargs in calls]
    answers = KernelAnswers([base for base in bases if base is not None])
    asked: dict[Signature, int] = {}
    until = time.process_time() + MOST_SECONDS
    for (op, args, kwargs), base in zip(calls, bases, strict=True):
        if base is None or _largest(args, kwargs) > LARGEST or any(part not in NAMES for part in base):
            continue
        pattern = *(_pattern(symbol) for symbol in base), *_modes((args, kwargs))
        asked[pattern] = asked.get(pattern, 0) + 1
        if asked[pattern] > REPEATED:
            continue
        for signature in _variations(columns, base):
            if time.process_time() > until:
                return answers
            filled = with_main(signature, main_dtype(signature, answers.main), answers.alike)
            if answers.by_signature.get(filled, "") is not None:
                answers.add(filled, _ask(op, args, kwargs, columns, signature))
        all_refused = (each for each in _variations(columns, base) if answers.by_signature.get(each))
        refused = min(all_refused, key=lambda each: len(set(each)), default=None)
        for empty in EMPTIES:
            answers.note_empty(_refuses_empty(op, args, kwargs, columns, base, refused, empty))
    return answers


def _more_calls(calls: list[Any]) -> Iterator[Any]:
    """Calls that are not in the database: a number as second operand, no name of a mode."""
    for op, args, kwargs in calls[:REPEATED]:
        is_binary = torch.Tag.pointwise in op.tags and len(args) > 1 and isinstance(args[1], torch.Tensor)
        if is_binary:
            yield op, (args[0], 2.0, *args[2:]), kwargs
        names = [name for name, value in kwargs.items() if isinstance(value, str)]
        if names:
            yield op, args, {**kwargs, **dict.fromkeys(names)}


def _refuses_empty(
    op: Any,
    args: Any,
    kwargs: Any,
    columns: tuple[Column, ...],
    base: Signature,
    refused: Signature | None,
    empty: Any,
) -> bool | None:
    """Whether a call without elements is refused with these dtypes; None if it is with those of the sample."""
    args, kwargs = _torch.tree_map(
        lambda leaf: empty(leaf) if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs)
    )
    if refused is None or _largest(args, kwargs) or _ask(op, args, kwargs, columns, base) is not None:
        return None
    return _ask(op, args, kwargs, columns, refused) is not None


def _with_default_numbers(columns: tuple[Column, ...], base: Signature | None) -> Signature | None:
    return base and tuple(
        symbol if column.default is None else type(column.default)
        for column, symbol in zip(columns, base, strict=True)
    )


def main_column(base: Signature) -> int:
    """The first column of the dtype that most columns of a sample have."""
    dtypes = [main_dtype(base, column) for column in range(len(base))]
    found = [dtype for dtype in dtypes if dtype is not None]
    return dtypes.index(max(found, key=found.count)) if found else 0


def _pattern(symbol: Symbol) -> str:
    return (
        "tensor"
        if isinstance(symbol, torch.dtype)
        else "0-d"
        if isinstance(symbol, tuple)
        else "number"
        if symbol
        else "-"
    )


def _largest(args: Any, kwargs: Any) -> int:
    tensors = (leaf for leaf in _torch.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
    return max((tensor.numel() for tensor in tensors), default=0)


def _variations(columns: tuple[Column, ...], base: Signature) -> Iterator[Signature]:
    domains = [list(_domain(column, symbol)) for column, symbol in zip(columns, base, strict=True)]
    if sum(len(domain) > 1 for domain in domains) <= 2:
        yield from itertools.product(*domains)
        return
    yield base
    place = main_column(base)
    main = main_dtype(base, place) if columns[place].kind == "tensor" else None
    for dtype in DTYPES.values():
        uniform = tuple(
            (dtype,) if symbol == (main,) else dtype if symbol is main and column.kind == "tensor" else symbol
            for column, symbol in zip(columns, base, strict=True)
        )
        yield uniform
        for position, domain in enumerate(domains):
            for symbol in domain if position != place or main is None else ():
                yield (*uniform[:position], symbol, *uniform[position + 1 :])
        if main is None:
            return


def _domain(column: Column, symbol: Symbol) -> Iterator[Symbol]:
    if column.kind == "dtype":
        yield from (None, *DTYPES.values())
    elif symbol is None:
        yield None
    elif symbol in NUMBERS.values():
        yield from NUMBERS.values()
    else:
        for dtype in DTYPES.values():
            yield (dtype,) if isinstance(symbol, tuple) else dtype


def _ask(op: Any, args: Any, kwargs: Any, columns: tuple[Column, ...], signature: Signature) -> str | None:
    refusal = ""
    for fill in FILLS:
        new_args, new_kwargs = list(args), dict(kwargs)
        try:
            for column, symbol in zip(columns, signature, strict=True):
                _set_argument(new_args, new_kwargs, column, symbol, fill)
        except REFUSALS:
            continue  # such values can't be made
        try:
            with torch.no_grad():
                op(*new_args, **new_kwargs)
        except REFUSALS as error:
            if isinstance(error, torch.linalg.LinAlgError):
                return None
            if any(words in str(error) for words in NOT_ABOUT_DTYPES):
                return None
            refusal = refusal or _class_of(error)
            if any(words in str(error) for words in ABOUT_DTYPES):
                return refusal
        else:
            return None
    return refusal or None


def _class_of(error: Exception) -> str:
    kinds = (IndexError, ValueError, TypeError, NotImplementedError, RuntimeError)
    return next(kind.__name__ for kind in kinds if isinstance(error, kind))


def _set_argument(
    args: list[Any], kwargs: dict[str, Any], column: Column, symbol: Symbol, fill: Callable[[Any], Any]
) -> None:
    is_positional = not column.is_keyword and column.position < len(args)
    value = args[column.position] if is_positional else kwargs.get(column.name, column.default)
    if column.kind == "dtype":
        new = symbol
    elif value is None:
        return
    elif symbol in NUMBERS.values():
        new = symbol(value.real if isinstance(value, complex) and symbol is not complex else value)
    else:
        dtype = symbol[0] if isinstance(symbol, tuple) else symbol
        new = (
            [None if part is None else fill(_cast(part, dtype)) for part in value]
            if isinstance(value, (list, tuple))
            else fill(_cast(value, dtype))
        )
    if is_positional:
        args[column.position] = new
    elif column.is_keyword or new is not None:
        kwargs[column.name] = new


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if tensor.dtype is dtype:
        return tensor.clone()
    if tensor.is_complex() and not dtype.is_complex:
        tensor = tensor.real
    return (
        tensor.to(torch.float32).to(dtype)
        if dtype.itemsize == 1 and dtype.is_floating_point
        else tensor.to(dtype)
    )


def _fill_ones(tensor: torch.Tensor) -> torch.Tensor:
    return torch.ones(tensor.shape).to(tensor.dtype)


def _fill_identity(tensor: torch.Tensor) -> torch.Tensor:
    filled = torch.zeros(tensor.shape)
    if filled.ndim >= 2:
        filled.diagonal(dim1=-2, dim2=-1).fill_(1)
    return filled.to(tensor.dtype)


def _without_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:0] if tensor.ndim else tensor


def _without_columns(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[..., :0] if tensor.ndim else tensor


EMPTIES = (_without_rows, _without_columns)
FILLS: tuple[Callable[[Any], Any], ...] = (lambda tensor: tensor, _fill_ones, _fill_identity)


# --- writing ----------------------------------------------------------------------------------------------------------


class TableWriter:
    """Lines of a table. Sets of symbols that several boxes have are written once."""

    def __init__(self) -> None:
        self.sets: dict[str, str] = {}

    def row(self, name: str, answers: KernelAnswers) -> str:
        """A line of the table; "" if nothing is refused."""
        boxes: list[str] = []
        for asked in _by_pattern(answers).values():
            for error in sorted({answer for answer in asked.values() if answer is not None}):
                refused = {signature for signature, answer in asked.items() if answer == error}
                prefix = f"{error} " if error in ("IndexError", "ValueError", "TypeError") else ""
                boxes += [prefix + self._text(box) for box in cover(refused, answers.main)]
        alike = f"={','.join(map(str, answers.alike))}" if answers.alike else ""
        head = f"{answers.main}{'e' if answers.refuses_empty else ''}{alike}"
        return f"{name} {head} {'; '.join(sorted(set(boxes)))}" if boxes else ""

    def _text(self, box: Box) -> str:
        return f"{self._cell(box[0])}:  {' '.join(map(self._cell, box[1:]))}"

    def _cell(self, cell: Cell) -> str:
        if isinstance(cell, str):
            return cell
        order = list(NAMES.values())
        names = sorted((NAMES[symbol] for symbol in cell), key=order.index)
        if len(names) <= 2:
            return ",".join(names)
        return self.sets.setdefault(" ".join(names), f"s{len(self.sets) + 1}")


def _by_pattern(answers: KernelAnswers) -> dict[tuple[str, ...], dict[Signature, str | None]]:
    """RuntimeError and NotImplementedError are one answer: ours is both."""
    grouped: dict[tuple[str, ...], dict[Signature, str | None]] = {}
    for signature, answer in answers.by_signature.items():
        kinds = tuple("0-d" if isinstance(symbol, tuple) else "" for symbol in signature)
        answer = "RuntimeError" if answer == "NotImplementedError" else answer
        grouped.setdefault(kinds, {})[signature] = answer
    return grouped
