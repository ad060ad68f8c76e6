"""Collectives between processes: the tensors that each operator sends and fills, and the shapes of functional results.

    fact = record_of(torch.ops.c10d.allreduce_.default).collective
    fact.kind, fact.sent, fact.filled          "all_reduce", ("tensors",), ("tensors",)

Operators of `c10d` fill tensors among their arguments; those of `_c10d_functional` return new ones. Message sizes follow the
usual convention: the larger of what one process sends and receives.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from understudy.ops.registry import OpFacts, rule
from understudy.ops.traits.flops import moves
from understudy.spec import Same, TensorSpec


class Collective(NamedTuple):
    """`sent`, `filled`: names of arguments; nothing is `filled` where the results are new tensors. `group`: the argument
    with the process group, or its name. `root`: the argument with the rank that sends or receives, as the group counts."""

    kind: str
    sent: tuple[str, ...] = ()
    filled: tuple[str, ...] = ()
    group: str = "process_group"
    root: str = ""


collective = OpFacts.collective


def _register(name: str, kind: str, sent: str = "", filled: str = "", root: str = "") -> None:
    group = "process_group" if name.startswith("c10d::") else "group_name"
    collective.register(Collective(kind, tuple(sent.split()), tuple(filled.split()), group, root), name)
    moves.register(True, name)


for _name, *_fields in (
    ("allreduce_", "all_reduce", "tensors", "tensors"),
    ("allreduce_coalesced_", "all_reduce", "tensors", "tensors"),
    ("_allgather_base_", "all_gather", "input_tensor", "output_tensor"),
    ("allgather_", "all_gather", "input_tensors", "output_tensors"),
    ("allgather_coalesced_", "all_gather", "input_list", "output_lists"),
    ("allgather_into_tensor_coalesced_", "all_gather", "inputs", "outputs"),
    ("_reduce_scatter_base_", "reduce_scatter", "input_tensor", "output_tensor"),
    ("reduce_scatter_", "reduce_scatter", "input_tensors", "output_tensors"),
    ("reduce_scatter_tensor_coalesced_", "reduce_scatter", "inputs", "outputs"),
    ("alltoall_", "all_to_all", "input_tensors", "output_tensors"),
    ("alltoall_base_", "all_to_all", "input", "output"),
    ("broadcast_", "broadcast", "tensors", "tensors", "root_rank"),
    ("reduce_", "reduce", "tensors", "tensors", "root_rank"),
    ("gather_", "gather", "input_tensors", "output_tensors", "root_rank"),
    ("scatter_", "scatter", "input_tensors", "output_tensors", "root_rank"),
    ("send", "send", "tensors", "", "dst"),
    ("recv_", "recv", "", "tensors", "src"),
    ("recv_any_source_", "recv", "", "tensors"),
    ("barrier", "barrier"),
    ("monitored_barrier_", "barrier"),
):
    _register(f"c10d::{_name}", *_fields)

for _name, *_fields in (
    ("all_reduce", "all_reduce", "input"),
    ("all_reduce_", "all_reduce", "input", "input"),
    ("all_reduce_coalesced", "all_reduce", "inputs"),
    ("all_reduce_coalesced_", "all_reduce", "inputs", "inputs"),
    ("all_gather_into_tensor", "all_gather", "input"),
    ("all_gather_into_tensor_out", "all_gather", "input", "out"),
    ("all_gather_into_tensor_coalesced", "all_gather", "inputs"),
    ("reduce_scatter_tensor", "reduce_scatter", "input"),
    ("reduce_scatter_tensor_out", "reduce_scatter", "input", "out"),
    ("reduce_scatter_tensor_coalesced", "reduce_scatter", "inputs"),
    ("all_to_all_single", "all_to_all", "input"),
    ("broadcast", "broadcast", "input", "", "src"),
    ("broadcast_", "broadcast", "input", "input", "src"),
):
    _register(f"_c10d_functional::{_name}", *_fields)
_register("_dtensor::shard_dim_alltoall", "all_to_all", "input")
moves.register(False, "_c10d_functional::wait_tensor")
moves.register(True, "fsdp::all_gather_copy_in", "fsdp::split_with_sizes_copy", "fsdp::chunk_cat")


# --- functional collectives -----------------------------------------------------------------------------------------


@rule("_c10d_functional::wait_tensor")
def wait_tensor(tensor: TensorSpec) -> Same:
    return Same(0)


@rule("_c10d_functional::all_reduce", "_c10d_functional::broadcast")
def all_reduce(input: TensorSpec, *args: object) -> TensorSpec:
    return input.like(tuple(input.shape))


@rule("_c10d_functional::all_reduce_coalesced")
def all_reduce_coalesced(inputs: list[TensorSpec], *args: object) -> list[TensorSpec]:
    return [all_reduce(spec) for spec in inputs]


@rule("_c10d_functional::all_gather_into_tensor")
def all_gather_into_tensor(input: TensorSpec, group_size: int, group_name: object) -> TensorSpec:
    return input.like((input.shape[0] * group_size, *input.shape[1:]) if input.ndim else (group_size,))


@rule("_c10d_functional::all_gather_into_tensor_coalesced")
def all_gather_coalesced(inputs: list[TensorSpec], group_size: int, group_name: object) -> list[TensorSpec]:
    return [all_gather_into_tensor(spec, group_size, group_name) for spec in inputs]


@rule("_c10d_functional::reduce_scatter_tensor")
def reduce_scatter_tensor(
    input: TensorSpec, reduce_op: str, group_size: int, group_name: object
) -> TensorSpec:
    return input.like((input.shape[0] // group_size, *input.shape[1:]))


@rule("_c10d_functional::reduce_scatter_tensor_coalesced")
def reduce_scatter_coalesced(
    inputs: list[TensorSpec], reduce_op: str, group_size: int, group_name: object
) -> list[TensorSpec]:
    return [reduce_scatter_tensor(spec, reduce_op, group_size, group_name) for spec in inputs]


@rule("_c10d_functional::all_to_all_single")
def all_to_all_single(
    input: TensorSpec, output_split_sizes: Any, input_split_sizes: Any, group_name: object
) -> TensorSpec:
    rows = sum(output_split_sizes) if output_split_sizes else input.shape[0]
    return input.like((rows, *input.shape[1:]))
