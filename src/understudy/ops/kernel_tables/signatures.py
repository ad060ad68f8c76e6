"""The signature of a call: a symbol for each argument that is a tensor, a list of tensors, a number or a dtype.

torch.float32      a tensor, a list of tensors of one dtype, or an argument that is a dtype
(torch.float32,)   a tensor without dimensions beside tensors that have some: promotion counts it less
int, float, …      a Python number, where the schema has a Scalar
None               an argument that is not given
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from understudy._torch import OpOverload
from understudy.shapes.node import SymNode

Symbol = Any
Signature = tuple[Symbol, ...]
TENSOR_TYPES = (
    "Tensor",
    "Optional[Tensor]",
    "List[Tensor]",
    "List[Optional[Tensor]]",
    "Optional[List[Tensor]]",
)
NUMBER_TYPES = ("number", "Optional[number]")
DTYPE_NAMES = ("dtype", "out_dtype", "input_dtype")
"""Arguments that are dtypes; to a schema they are integers."""


NUMBER_KINDS = frozenset({bool, int, float, complex, SymNode})


class Column:
    """One argument of a signature: its position in the schema, its name, and its default if it is a number."""

    __slots__ = ("default", "is_keyword", "kind", "name", "position")

    def __init__(self, position: int, name: str, kind: str, is_keyword: bool, default: object) -> None:
        self.position, self.name, self.kind, self.is_keyword = position, name, kind, is_keyword
        self.default: Any = default if kind == "number" else None


def columns_of(op: OpOverload, called: OpOverload | None = None) -> tuple[Column, ...]:
    """The columns of an operator's signatures. `out=` arguments have none; if `called` is a variant with `out=` that has
    no argument for a dtype, the dtype is that of `out=`."""
    columns = []
    names = {argument.name for argument in (called or op)._schema.arguments}
    for position, argument in enumerate(op._schema.arguments):
        kind = str(argument.type)
        if argument.kwarg_only and argument.alias_info is not None and argument.alias_info.is_write:
            continue
        if kind in TENSOR_TYPES:
            kind = "tensor"
        elif kind in NUMBER_TYPES:
            kind = "number"
        elif argument.name in DTYPE_NAMES:
            kind = "dtype"
        else:
            continue
        if kind == "dtype" and argument.name not in names and "out" in names:
            columns.append(Column(position, "out", "dtype", True, None))
            continue
        columns.append(Column(position, argument.name, kind, argument.kwarg_only, argument.default_value))
    return tuple(columns)


SYMBOLIC_NUMBERS: dict[type, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}


def signature_of(
    columns: tuple[Column, ...], args: Sequence[Any], kwargs: dict[str, Any]
) -> Signature | None:
    """The signature of a call, with specs or with real tensors; None if a list mixes dtypes or has numbers."""
    count = len(args)
    symbols: list[Symbol] = []
    small: list[int] = []
    has_dims = False
    for column in columns:
        value = args[column.position] if column.position < count and not column.is_keyword else None
        if value is None:
            value = kwargs.get(column.name, column.default) if kwargs else column.default
        if value is None or column.kind == "dtype":
            symbols.append(getattr(value, "dtype", value))
        elif column.kind == "number" or type(value) in NUMBER_KINDS or type(value) in SYMBOLIC_NUMBERS:
            symbols.append(_kind_of_number(value))
        elif type(value) is list or type(value) is tuple:
            dtypes = {part.dtype for part in value if part is not None}
            if len(dtypes) > 1:
                return None
            symbols.append(next(iter(dtypes), None))
            has_dims = True
        else:
            if value.shape:
                has_dims = True
            else:
                small.append(len(symbols))
            symbols.append(value.dtype)
    if has_dims:
        for position in small:
            symbols[position] = (symbols[position],)
    return tuple(symbols)


def _kind_of_number(value: Any) -> Symbol:
    kind: Any = type(value)
    if kind is SymNode:
        return value.pytype
    if kind in SYMBOLIC_NUMBERS:  # of a ShapeEnv of torch's
        return SYMBOLIC_NUMBERS[kind]
    return value.dtype if hasattr(value, "dtype") else kind


# --- text -------------------------------------------------------------------------------------------------------------

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
        torch.float32, torch.float64, torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64,
        torch.complex32, torch.bfloat16.to_complex(), torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz,
        torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
    )
}  # fmt: skip
"""All dtypes that kernels are asked about, by name."""
NUMBERS: dict[str, type] = {"bool()": bool, "int()": int, "float()": float, "complex()": complex}
SYMBOLS: dict[str, Symbol] = {
    **DTYPES,
    **{f"0-d:{name}": (dtype,) for name, dtype in DTYPES.items()},
    **NUMBERS,
    "-": None,
}
NAMES: dict[Symbol, str] = {symbol: name for name, symbol in SYMBOLS.items()}
