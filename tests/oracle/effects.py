"""What a run of a program did to the world, values included, and where two runs differ."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from tests.oracle.compare import Account, differences, observe, versions_of


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
    return [
        f"{where}.values: {difference}"
        for where, a, b in pairs
        if (difference := values_differ(a, b, rounded))
    ]


def values_differ(a: Any, b: Any, rounded: bool = False) -> str:
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
    tolerance = {} if rounded else {"rtol": 0, "atol": 0}
    try:
        torch.testing.assert_close(a, b, equal_nan=True, check_stride=False, **tolerance)
    except AssertionError as error:
        return " ".join(str(error).split())[:300]
    return ""
