"""Refuses CPU calls for whose dtypes eager has no kernel. Other devices have kernels for other dtypes."""

from __future__ import annotations

from typing import Any

import torch

from understudy._torch import OpOverload
from understudy.errors import ArgumentError, DimensionError, DtypeError, OperatorError
from understudy.ops.kernel_tables.boxes import includes, main_dtype, with_main
from understudy.ops.kernel_tables.signatures import DTYPES, NAMES, Signature, columns_of, signature_of
from understudy.ops.kernel_tables.table import RowText, current_table
from understudy.ops.registry import OpFacts, derives, record_of
from understudy.ops.variants import functional_overload
from understudy.spec import TensorSpec
from understudy.spec.call import Call
from understudy.spec.error_context import OperatorTypeError

STRIDED = torch.strided
ERRORS: dict[str, type[OperatorError]] = {
    "IndexError": DimensionError, "ValueError": ArgumentError, "TypeError": OperatorTypeError, "": DtypeError,
}  # fmt: skip
"""Ours for the built-in classes that eager raises; DtypeError is a RuntimeError and a NotImplementedError."""


class KernelRow:
    """The signatures that an operator refuses on the CPU."""

    def __init__(self, op: OpOverload, text: RowText, called: OpOverload) -> None:
        self.columns = columns_of(op, called)
        self.refuses_empty = text.refuses_empty
        self.accepted: set[tuple[Any, ...]] = set()
        "Dtypes of arguments, and whether they have no dimensions, of calls that were accepted."
        self._main, self._alike, self._boxes = text.main, text.alike, text.boxes
        self._answers: dict[Signature, str | None] = {}

    def refusal(self, signature: Signature) -> str | None:
        """The name of the class that eager raises, "" for RuntimeError or NotImplementedError; None if it is accepted."""
        try:
            return self._answers[signature]
        except KeyError:
            main = main_dtype(signature, self._main)
            given = with_main(signature, main, self._alike)
            found = (error for error, box in self._boxes if includes(box, main, given))
            answer = self._answers[signature] = next(found, None)
            return answer

    def describe_accepted(self, signature: Signature) -> str:
        """The dtypes that are accepted instead of the dtype of most tensors; else, of one argument."""
        usual = main_dtype(signature, self._main)
        names = self._list_accepted(signature, [symbol is usual for symbol in signature])
        if names:
            return f"supported dtypes: {', '.join(names)}"
        for column, symbol in zip(self.columns, signature, strict=True):
            names = self._list_accepted(signature, [other is column for other in self.columns])
            if names and isinstance(symbol, torch.dtype):
                return f"expected {' or '.join(names)} for argument {column.name}"
        return "convert more than one argument"

    def _list_accepted(self, signature: Signature, changes: list[bool]) -> list[str]:
        """The dtypes that are accepted instead of those where `changes` is True."""
        found = []
        for name, dtype in DTYPES.items():
            changed = (
                dtype if is_changed else old for old, is_changed in zip(signature, changes, strict=True)
            )
            if self.refusal(tuple(changed)) is None:
                found.append(name)
        return found


@derives(OpFacts.kernel_row)
def _find_row(record: OpFacts) -> KernelRow | None:
    table = current_table()
    for each in (record.op, functional_overload(record.op)):
        row = None if each is None else table.row(record_of(each).name)
        if each is not None and row is not None:
            return KernelRow(each, row, record.op)
    return None


def check_dtypes(call: Call, row: KernelRow) -> None:
    """Raise if eager has no CPU kernel for the dtypes of a call. `row`: that of its operator."""
    kinds: list[Any] = []
    for value in call.args:
        kind = type(value)
        kinds.append((value.dtype, not value.shape) if kind is TensorSpec else kind)
    is_simple = not call.kwargs and list not in kinds and tuple not in kinds
    seen = tuple(kinds)
    if is_simple and seen in row.accepted:
        return
    signature = signature_of(row.columns, call.args, call.kwargs)
    error = None if signature is None else row.refusal(signature)
    if signature is not None and error is not None:
        _refuse(call, row, signature, error)
    elif is_simple:
        row.accepted.add(seen)


def _refuse(call: Call, row: KernelRow, signature: Signature, error: str) -> None:
    """Raise, unless the call is on another device, or has no elements and the kernel is not called then."""
    device = call.kwargs.get("device")
    if device is not None and device.type != "cpu":
        return
    for spec in call.inputs:
        if (
            spec.device.type != "cpu"
            or spec.layout is not STRIDED
            or (not row.refuses_empty and _has_no_elements(spec))
        ):
            return
    given = ", ".join(
        NAMES.get(symbol, str(symbol))
        for column, symbol in zip(row.columns, signature, strict=True)
        if symbol is not None and (column.position < len(call.args) or column.name in call.kwargs)
    )
    accepted = row.describe_accepted(signature)
    raise ERRORS[error](f"{call.op}: the CPU kernel does not support ({given}); {accepted}")


def _has_no_elements(spec: TensorSpec) -> bool:
    return any(type(size) is int and size == 0 for size in spec.shape)
