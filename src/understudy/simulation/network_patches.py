"""torch.distributed in a rehearsed process: process groups without communication, objects that travel by the network."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from understudy import _torch
from understudy.lines import user_line
from understudy.patching import OBSERVATION, SIMULATION, patch, patch_call
from understudy.simulation.machine import ACTIVE
from understudy.simulation.network import CLUSTER, Network, network_of
from understudy.simulation.storages import ObservedMode

Function = Callable[..., Any]
C10D = "torch.distributed.distributed_c10d"


def current_network() -> Network | None:
    """Return the network of the program in this thread; None without a process group or a rehearsal."""
    return network_of(_torch.active_fake_mode())


# --- process groups ----------------------------------------------------------------------------------------------------

IS_THERE = "The simulated software has NCCL."


@patch("torch.distributed.is_nccl_available", f"{C10D}.is_nccl_available", during=SIMULATION, reason=IS_THERE)
def report_nccl_available(original: Function) -> Function:
    return lambda: True


class ProcessGroupNCCL:
    """In place of the class that a build without NCCL lacks: no group is one, and its options have no effect."""

    class Options:
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            self.config = SimpleNamespace()


@patch("torch.distributed.ProcessGroupNCCL", f"{C10D}.ProcessGroupNCCL", during=SIMULATION, reason=IS_THERE,
       is_new=not hasattr(torch.distributed, "ProcessGroupNCCL"))  # fmt: skip
def provide_class_of_nccl(original: Any) -> Any:
    return original or ProcessGroupNCCL


@patch_call(f"{C10D}._set_pg_timeout", during=OBSERVATION)
def set_no_timeout(original: Function, *args: object, **kwargs: object) -> Any:
    """Nothing waits for long. torch warns of a group that is neither NCCL's nor gloo's."""
    return original(*args, **kwargs) if current_network() is None else None


@patch_call("torch.distributed.init_process_group", f"{C10D}.init_process_group",
       "torch.distributed.device_mesh.init_process_group", during=OBSERVATION)  # fmt: skip
def start_without_communication(
    original: Function, backend: object = None, init_method: object = None, timeout: object = None,
    world_size: int = -1, rank: int = -1, *args: object, **kwargs: object,
) -> Any:  # fmt: skip
    """NCCL needs devices, gloo needs the other processes. torch's fake process group takes every collective, and does
    nothing."""
    mode = _torch.active_fake_mode()
    if not isinstance(mode, ObservedMode) or backend == "fake":
        return original(backend, init_method, timeout, world_size, rank, *args, **kwargs)
    world_size = int(os.environ.get("WORLD_SIZE", "1")) if world_size < 0 else world_size
    rank = int(os.environ.get("RANK", "0")) if rank < 0 else rank
    if mode.network is None:
        mode.network = Network(mode, rank, world_size, CLUSTER.peers)
        mode.add_listener(mode.network)
    network = mode.network
    if world_size > 1 and network.peers is None:
        network.note(f"process group of {world_size} processes: rank {rank} is rehearsed alone")
    network.has_bound_device = kwargs.pop("device_id", None) is not None
    kwargs.pop("store", None)
    network.default_backend = (
        "nccl" if backend is None and ACTIVE.machine is not None else str(backend or "gloo")
    )
    return original("fake", store=network.make_store(), rank=rank, world_size=world_size, **kwargs)


@patch_call(f"{C10D}._new_process_group_helper", during=OBSERVATION)
def make_fake_group(
    original: Function, group_size: int, group_rank: int, ranks: Any, backend: object, store: object, group_name: str,
    *args: object, **kwargs: Any,
) -> Any:  # fmt: skip
    """All groups are torch's fake ones, whatever backend they are to have."""
    network = current_network()
    if network is None:
        return original(group_size, group_rank, ranks, backend, store, group_name, *args, **kwargs)
    asked = network.default_backend if str(backend) == "fake" else str(backend)
    network.add_group(group_name, ranks, asked, str(kwargs.get("group_desc") or ""))
    kwargs.update(backend_options=None, device_id=None)
    return original(
        group_size, group_rank, ranks, torch.distributed.Backend("fake"), store, group_name, **kwargs
    )


@patch_call("torch.distributed.get_backend", f"{C10D}.get_backend", "torch.distributed.device_mesh.get_backend",
       during=OBSERVATION)  # fmt: skip
def report_asked_backend(original: Function, group: object = None) -> Any:
    """The backend that the program has named: of "cpu:gloo,cuda:nccl", the one of its devices."""
    backend, network = original(group), current_network()
    if backend != "fake" or network is None:
        return backend
    asked = network.find_group(group or torch.distributed.group.WORLD).backend or "nccl"
    return dict(part.split(":") for part in asked.split(",")).get("cuda", "gloo") if ":" in asked else asked


ISSUING = (
    "allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single",
    "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "broadcast", "allgather", "_allgather_base",
    "all_gather_single", "allgather_coalesced", "allgather_into_tensor_coalesced", "all_gather_single_coalesced",
    "alltoall", "alltoall_base", "all_to_all_single", "gather", "scatter", "send", "recv", "recv_anysource", "barrier",
)  # fmt: skip
"""Methods of process groups; a release of torch has some of them."""


@patch_call(
    *(
        f"torch.distributed.ProcessGroup.{name}"
        for name in ISSUING
        if hasattr(torch.distributed.ProcessGroup, name)
    ),
    during=OBSERVATION,
)
def follow_call(original: Function, self: object, *args: Any, **kwargs: Any) -> Any:
    """Operators hold the reduction (sum, max, …) as an object that Python can't read. What a call has added to the log is
    known by the handle that it returns."""
    network = current_network()
    if network is None:
        return original(self, *args, **kwargs)
    operation: Any = torch.distributed.ReduceOp.SUM
    for value in (*args, *kwargs.values()):
        found = getattr(value, "reduceOp", value)
        if isinstance(found, (torch.distributed.ReduceOp, torch.distributed.ReduceOp.RedOpType)):
            operation = found
    network.reduce_op = operation
    first = len(network.log)
    handle = original(self, *args, **kwargs)
    if handle is not None and len(network.log) > first:
        network.handles[handle] = range(first, len(network.log))
    return handle


@patch_call(*_torch.WORK_WAITS, during=OBSERVATION)
def note_wait(original: Function, self: object, *args: Any, **kwargs: Any) -> Any:
    """The current stream goes on after the collective."""
    network = current_network()
    if network is not None:
        network.wait_for(self)
    return original(self, *args, **kwargs)


@patch_call("torch.distributed.device_mesh.DeviceMesh.__init__", during=OBSERVATION)
def expect_sharded_tensors(original: Function, self: Any, *args: object, **kwargs: object) -> None:
    """Every DTensor has a mesh. What DTensors need is loaded here, because that imports their package."""
    import understudy.simulation.sharding  # noqa: F401  # why: as the docstring says

    original(self, *args, **kwargs)
    network = current_network()
    if network is not None:
        network.add_mesh(self)


@patch("torch.distributed.TCPStore", "torch.distributed.FileStore",
       during=OBSERVATION)  # fmt: skip
def share_store(original: Any) -> Any:
    """A store waits for the other processes, which may not have begun: ranks of a rehearsed cluster share one in their
    parent."""

    def make_store(*args: Any, **kwargs: Any) -> Any:
        if CLUSTER.peers is None or not isinstance(_torch.active_fake_mode(), ObservedMode):
            return original(*args, **kwargs)
        place = ":".join(str(part) for part in (*args[:2], *kwargs.values())[:2])
        return torch.distributed.PrefixStore(place, CLUSTER.peers.make_store())

    return make_store


@patch_call("torch.distributed.batch_isend_irecv", during=OBSERVATION)
def number_batches(original: Function, p2p_op_list: Any) -> Any:
    """Messages of one batch do not wait for each other."""
    network = current_network()
    if network is None:
        return original(p2p_op_list)
    network.batches += 1
    network.batch = network.batches
    try:
        return original(p2p_op_list)
    finally:
        network.batch = 0


@patch_call(f"{C10D}._warn_not_in_group", during=OBSERVATION)
def note_call_of_outsider(original: Function, op_name: str) -> None:
    """torch warns, and does nothing."""
    network = current_network()
    if network is not None:
        network.outsiders.append((op_name, user_line()))
        if network.peers is None:
            network.note(f"{user_line()}: {op_name} does nothing: rank {network.rank} is not in its group")
    original(op_name)


@patch_call("torch.utils.data.DataLoader.__iter__", during=OBSERVATION)
def count_batches(original: Function, self: Any) -> Any:
    """Ranks with different numbers of batches wait for each other at the end of an epoch."""
    network = current_network()
    if network is not None and not isinstance(self.dataset, torch.utils.data.IterableDataset):
        network.loaders.append((user_line(), len(self)))
    return original(self)


# --- objects -----------------------------------------------------------------------------------------------------------

OBJECTS = "Objects travel as bytes of tensors, which stand-ins do not have: the network carries them."


def _is_member(group: object) -> bool:
    return torch.distributed.get_rank(group) >= 0  # type: ignore[arg-type]


def _find_root(group: Any, rank: int | None, group_rank: int | None) -> int:
    if group_rank is not None:
        whole: Any = torch.distributed.group.WORLD
        return torch.distributed.get_global_rank(group or whole, group_rank)
    return rank or 0


@patch_call("torch.distributed.all_gather_object", during=OBSERVATION, reason=OBJECTS)
def gather_objects_everywhere(
    original: Function, object_list: list[Any], obj: object, group: Any = None
) -> None:
    network = current_network()
    if network is None or not _is_member(group):
        return original(object_list, obj, group)
    found = network.find_group(group or torch.distributed.group.WORLD)
    data = pickle.dumps(obj)
    received = network.exchange_objects("all_gather", found, None, data)
    network.add("all_gather", found, 8 * found.size, "int64")
    network.add("all_gather", found, max(map(len, received.values())) * found.size, "uint8")
    object_list[:] = [pickle.loads(received[rank]) for rank in found.ranks]
    return None


@patch_call("torch.distributed.gather_object", during=OBSERVATION, reason=OBJECTS)
def gather_objects_on_one(
    original: Function, obj: object, object_gather_list: list[Any] | None = None, dst: int | None = None,
    group: Any = None, group_dst: int | None = None,
) -> None:  # fmt: skip
    network = current_network()
    if network is None or not _is_member(group):
        return original(obj, object_gather_list, dst, group, group_dst)
    found = network.find_group(group or torch.distributed.group.WORLD)
    root, data = _find_root(group, dst, group_dst), pickle.dumps(obj)
    received = network.exchange_objects("gather", found, root, data)
    network.add("all_gather", found, 8 * found.size, "int64")
    network.add("gather", found, len(data) * (found.size if root == network.rank else 1), "uint8", peer=root)
    if root == network.rank and object_gather_list is not None:
        object_gather_list[:] = [pickle.loads(received[rank]) for rank in found.ranks]
    return None


@patch_call("torch.distributed.broadcast_object_list", during=OBSERVATION, reason=OBJECTS)
def broadcast_objects(
    original: Function, object_list: list[Any], src: int | None = None, group: Any = None, device: object = None,
    group_src: int | None = None,
) -> None:  # fmt: skip
    network = current_network()
    if network is None or not _is_member(group):
        return original(object_list, src, group, device, group_src)
    found = network.find_group(group or torch.distributed.group.WORLD)
    root = _find_root(group, src, group_src)
    data = [pickle.dumps(value) for value in object_list]
    received = network.exchange_objects("broadcast", found, root, data)[root]
    network.add("broadcast", found, 8 * len(object_list), "int64", peer=root)
    network.add("broadcast", found, sum(map(len, received)), "uint8", peer=root)
    if root != network.rank:
        object_list[:] = [pickle.loads(part) for part in received]
    return None


@patch_call("torch.distributed.scatter_object_list", during=OBSERVATION, reason=OBJECTS)
def scatter_objects(
    original: Function, scatter_object_output_list: list[Any], scatter_object_input_list: list[Any] | None = None,
    src: int | None = None, group: Any = None, group_src: int | None = None,
) -> None:  # fmt: skip
    network = current_network()
    if network is None or not _is_member(group):
        return original(scatter_object_output_list, scatter_object_input_list, src, group, group_src)
    found = network.find_group(group or torch.distributed.group.WORLD)
    root = _find_root(group, src, group_src)
    data = [pickle.dumps(value) for value in scatter_object_input_list or []] if root == network.rank else []
    parts = network.exchange_objects("scatter", found, root, data)[root]
    network.add("broadcast", found, 8, "int64", peer=root)
    network.add("scatter", found, max(map(len, parts)), "uint8", peer=root)
    network.add("scatter", found, 8, "int64", peer=root)
    scatter_object_output_list[0] = pickle.loads(parts[found.ranks.index(network.rank)])
    return None


@patch_call("torch.distributed.send_object_list", during=OBSERVATION, reason=OBJECTS)
def send_objects(
    original: Function, object_list: list[Any], dst: int | None = None, group: Any = None, device: object = None,
    group_dst: int | None = None, use_batch: bool = False,
) -> None:  # fmt: skip
    network = current_network()
    if network is None or not _is_member(group):
        return original(object_list, dst, group, device, group_dst, use_batch)
    found = network.find_group(group or torch.distributed.group.WORLD)
    peer, data = _find_root(group, dst, group_dst), [pickle.dumps(value) for value in object_list]
    network.exchange_objects("send", found, peer, data)
    network.add("send", found, 8 * len(data), "int64", peer=peer)
    network.add("send", found, sum(map(len, data)), "uint8", peer=peer)
    return None


@patch_call("torch.distributed.recv_object_list", during=OBSERVATION, reason=OBJECTS)
def receive_objects(
    original: Function, object_list: list[Any], src: int | None = None, group: Any = None, device: object = None,
    group_src: int | None = None, use_batch: bool = False,
) -> Any:  # fmt: skip
    network = current_network()
    if network is None or not _is_member(group):
        return original(object_list, src, group, device, group_src, use_batch)
    found = network.find_group(group or torch.distributed.group.WORLD)
    peer = _find_root(group, src, group_src)
    data = network.exchange_objects("recv", found, peer, None)[peer]
    network.add("recv", found, 8 * len(data), "int64", peer=peer)
    network.add("recv", found, sum(map(len, data)), "uint8", peer=peer)
    object_list[:] = [pickle.loads(part) for part in data]
    return peer
