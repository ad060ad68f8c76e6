"""What is known of a value while a program is traced."""

from __future__ import annotations

from typing import Any

import torch

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class _Unknown:
    def __repr__(self) -> str:
        return "unknown"


UNKNOWN = _Unknown()
"""The metadata of a value of which nothing is known."""

FACTS = (int, float, complex, str, torch.dtype, torch.layout, torch.memory_format, torch.qscheme, *SYMBOLIC)


def is_fact(value: Any) -> bool:
    """A plain answer about a tensor: numbers, a dtype, sizes. In a graph it is a constant, or computed from sizes."""
    if isinstance(value, (tuple, list)):
        return all(is_fact(part) for part in value)
    return isinstance(value, FACTS)
