"""What a run of a program did to the world, values included, and where two runs differ."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.testing._comparison import default_tolerances
from torch.utils._pytree import tree_flatten

from tests.oracle.compare import Account, differences, observe, tensors_in, versions_of


@dataclass
class Effect:
    """The account of a run's metadata, and all values afterwards."""

    account: Account
    results: list[Any]
    inputs: Sequence[torch.Tensor]


def effect_of(run: Callable[[], Any], tensors: Sequence[torch.Tensor]) -> Effect:
    """Run it; `tensors` are those of its inputs."""
    torch.default_generator.manual_seed(
        0
    )  # torch.manual_seed remembers a stack trace for each device that is not here
    before = versions_of(tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = run()
    account = observe(result, tensors, before)
    account = replace(
        account, structure=account.structure.replace("(Size,", "(tuple,")
    )  # which pytree makes of it
    return Effect(account, tree_flatten(result)[0], tensors)


def effects_differ(
    program: Effect, graph: Effect, compare_values: bool = True, *, rounded: bool = False
) -> list[str]:
    """Where they differ; if `rounded`, values only where they do so by more than rounding explains."""
    found = [str(difference) for difference in differences(program.account, graph.account)]
    if found or not compare_values:
        return found
    pairs = [
        *((f"out[{i}]", a, b) for i, (a, b) in enumerate(zip(program.results, graph.results, strict=True))),
        *((f"in[{i}]", a, b) for i, (a, b) in enumerate(zip(program.inputs, graph.inputs, strict=True))),
    ]
    tolerance = _rounding([*tensors_in(program.results), *program.inputs]) if rounded else EXACT
    return [
        f"{where}.values: {difference}"
        for where, a, b in pairs
        if (difference := values_differ(a, b, tolerance))
    ]


EXACT = {"rtol": 0.0, "atol": 0.0}


def _rounding(tensors: Sequence[torch.Tensor]) -> dict[str, float]:
    """What rounding explains in the least exact of their dtypes: `out=` may be more exact than what is computed."""
    rtol, atol = default_tolerances(torch.bool, *[tensor.dtype for tensor in tensors])
    in_8_bits = [
        torch.finfo(t.dtype).eps for t in tensors if t.dtype.is_floating_point and t.dtype.itemsize == 1
    ]
    return {"rtol": max(rtol, *in_8_bits, 0.0), "atol": atol}


def values_differ(a: Any, b: Any, tolerance: dict[str, float]) -> str:
    """How the values of two tensors differ; empty if they do not. NaN is itself here."""
    if not isinstance(a, torch.Tensor):
        return ""  # numbers are in the account
    if a.layout != torch.strided:
        a, b = (tensor.detach().to_dense() for tensor in (a, b))
    a, b = (tensor.detach().resolve_conj().resolve_neg() for tensor in (a, b))
    if a.is_quantized:
        a, b = a.int_repr(), b.int_repr()
    if a.dtype is not torch.complex32 and torch.equal(a, b):
        return ""
    is_rounded = a.dtype.is_floating_point or a.is_complex()
    try:
        torch.testing.assert_close(
            a, b, equal_nan=True, check_stride=False, **(tolerance if is_rounded else EXACT)
        )
    except AssertionError as error:
        return " ".join(str(error).split())[:300]
    return ""
