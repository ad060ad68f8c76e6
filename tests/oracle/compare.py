"""What a call did to the world, as plain facts, and where two such accounts differ.

    real = observe(result, inputs, before)     the real run
    fake = observe(result, inputs, before)     the same call with stand-ins
    differences(real, fake)                    [] if nobody can tell them apart

An account covers the outputs (metadata, what they share storage with, which inputs they *are*) and the
inputs afterwards (metadata, versions). Values of tensors are never looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten


class Facts(NamedTuple):
    """The metadata of one tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    offset: int | None
    dtype: str
    device: str
    layout: str
    conj: bool
    neg: bool
    sparse: str

    def __str__(self) -> str:
        marks = "".join(f" {name}" for name in ("conj", "neg") if getattr(self, name))
        offset = f"+{self.offset}" if self.offset else ""
        sparse = f" {self.layout} {self.sparse}" if self.sparse else ""
        place = "" if self.device == "cpu" else f"@{self.device}"
        stride = "" if self.stride is None else f"{list(self.stride)}"
        return f"{self.dtype}{list(self.shape)}{stride}{offset}{place}{marks}{sparse}"


class Relations(NamedTuple):
    """How an output hangs together with the inputs and with the outputs before it (positions, or None)."""

    is_input: int | None
    shares_input: int | None
    is_output: int | None
    shares_output: int | None


class Input(NamedTuple):
    """An input after the call."""

    facts: Facts
    written: bool
    """Whether its version grew. By how much says nothing: a composite operator that writes to a subclass of Tensor
    asks the dispatcher for steps (a resize before the write) that it takes silently on a plain one."""


@dataclass(frozen=True)
class Account:
    """Everything that can be observed of one call."""

    structure: str
    leaves: tuple[Any, ...]
    "Facts of a tensor, or the value itself."
    relations: tuple[Relations | None, ...]
    inputs: tuple[Input, ...]


class Difference(NamedTuple):
    where: str
    field: str
    real: str
    fake: str

    def __str__(self) -> str:
        return f"{self.where}.{self.field}: real {self.real}, fake {self.fake}"


def facts_of(tensor: torch.Tensor) -> Facts:
    strided = tensor.layout == torch.strided
    return Facts(
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()) if strided else None,
        offset=int(tensor.storage_offset()) if strided else None,
        dtype=str(tensor.dtype).removeprefix("torch."),
        device=str(tensor.device),
        layout=str(tensor.layout).removeprefix("torch."),
        conj=tensor.is_conj(),
        neg=tensor.is_neg(),
        sparse=_sparse_facts(tensor),
    )


def _sparse_facts(tensor: torch.Tensor) -> str:
    if tensor.layout in (torch.strided, torch._mkldnn):  # type: ignore[attr-defined]
        return ""
    coalesced = f", coalesced={tensor.is_coalesced()}" if tensor.layout == torch.sparse_coo else ""
    return f"sparse_dim={tensor.sparse_dim()}, dense_dim={tensor.dense_dim()}{coalesced}"


def storage_of(tensor: torch.Tensor) -> int | None:
    """An identity for the storage; None for layouts that have none."""
    if tensor.layout != torch.strided:
        return None
    return int(tensor.untyped_storage()._cdata)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors of a tree, in order. Sweeps ask often: what has no containers in it is not flattened."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if type(tree) in (list, tuple):
        return [tensor for part in tree for tensor in tensors_in(part)]
    if tree is None or isinstance(tree, (int, float, str)):
        return []
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def observe(result: Any, inputs: Sequence[torch.Tensor], versions_before: Sequence[int]) -> Account:
    """The account of a call that returned `result`."""
    leaves, structure = tree_flatten(result)
    input_storages = [storage_of(tensor) for tensor in inputs]
    seen: list[Any] = []
    relations: list[Relations | None] = []
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            relations.append(None)
            seen.append((leaf, None))
            continue
        storage = storage_of(leaf)
        relations.append(
            Relations(
                is_input=_position(leaf is tensor for tensor in inputs),
                shares_input=_position(storage is not None and storage == other for other in input_storages),
                is_output=_position(leaf is earlier for earlier, _ in seen),
                shares_output=_position(storage is not None and storage == other for _, other in seen),
            )
        )
        seen.append((leaf, storage))
    after = versions_of(inputs)
    return Account(
        structure=str(structure),
        leaves=tuple(facts_of(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves),
        relations=tuple(relations),
        inputs=tuple(
            Input(facts_of(tensor), now > before)
            for tensor, now, before in zip(inputs, after, versions_before, strict=True)
        ),
    )


def _position(tests: Any) -> int | None:
    return next((position for position, test in enumerate(tests) if test), None)


def differences(real: Account, fake: Account) -> list[Difference]:
    if real.structure != fake.structure:
        return [Difference("result", "structure", real.structure, fake.structure)]
    found: list[Difference] = []
    for position, (a, b) in enumerate(zip(real.leaves, fake.leaves, strict=True)):
        found += _leaf_differences(f"out[{position}]", a, b)
    for position, (left, right) in enumerate(zip(real.relations, fake.relations, strict=True)):
        if left is not None and right is not None:
            found += _field_differences(f"out[{position}]", left, right)
    for position, (before, after) in enumerate(zip(real.inputs, fake.inputs, strict=True)):
        found += _field_differences(f"in[{position}]", before.facts, after.facts)
        if before.written != after.written:
            found.append(Difference(f"in[{position}]", "written", str(before.written), str(after.written)))
    return found


def _leaf_differences(where: str, real: Any, fake: Any) -> list[Difference]:
    if isinstance(real, Facts) and isinstance(fake, Facts):
        return _field_differences(where, real, fake)
    if type(real) is not type(fake):
        return [Difference(where, "type", type(real).__name__, type(fake).__name__)]
    if isinstance(real, (bool, int, float, complex, str, torch.dtype, torch.device)):
        same = real == fake or (real != real and fake != fake)  # NaN is itself here
        return [] if same else [Difference(where, "value", repr(real), repr(fake))]
    return []


def _field_differences(where: str, real: Any, fake: Any) -> list[Difference]:
    return [
        Difference(where, name, str(left), str(right))
        for name, left, right in zip(real._fields, real, fake, strict=True)
        if left != right
    ]
