"""Patches of modules, data loading, files and storages."""

from __future__ import annotations

import functools
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from understudy import _torch
from understudy.errors import MixedTensorsError, NoDataError, UnderstudyError
from understudy.fake import initial_values
from understudy.fake.tensor import FakeTensor
from understudy.fake.values.answers import answers_of, number_from_program
from understudy.fake.values.data_dependent import is_known
from understudy.ops.nn.attention import drops_padding, encode
from understudy.patching import (
    ANY_MODE,
    DATA_PARALLEL,
    ENGINE,
    RECORDING,
    STORAGES,
    Hold,
    patch_call,
    patch_found,
)
from understudy.spec.call import flat, map_structure
from understudy.spec.error_context import with_line

Function = Callable[..., Any]


@patch_call("torch.nn.TransformerEncoder.forward", during=ANY_MODE)
def encode_padded_batch(
    original: Function, self: object, src: torch.Tensor, mask: object = None, src_key_padding_mask: object = None,
    is_causal: bool | None = None,
) -> object:  # fmt: skip
    """Eager removes padding with a nested tensor, whose sizes are data-dependent. The padded batch gives the same
    metadata."""
    is_seen = _torch.is_stand_in(src) or _torch.is_recording()
    if is_seen and drops_padding(self, src, mask, src_key_padding_mask):
        return encode(self, src, src_key_padding_mask)
    return original(self, src, mask, src_key_padding_mask, is_causal)


@patch_call("torch.nn.init._no_grad_trunc_normal_", during=ANY_MODE)
def draw_truncated_normal_once(
    original: Function, tensor: Any, mean: float, std: float, a: float, b: float, generator: object = None
) -> object:
    """torch draws again until all values are in bounds, which reads the values."""
    if not _torch.is_stand_in(tensor):
        return original(tensor, mean, std, a, b, generator)
    if type(tensor) is FakeTensor and initial_values.draw_normal(tensor, mean, std, generator):
        return tensor
    with _torch.grad_mode(False):
        if not _torch.is_recording():
            return tensor.normal_(mean, std, generator=generator)
        # In a graph the numbers count: uniform ones between the quantiles of the bounds, through the inverse of the
        # distribution.
        low, high = (math.erf((bound - mean) / (std * math.sqrt(2))) for bound in (a, b))
        tensor.uniform_(low, high, generator=generator).erfinv_()
        return tensor.mul_(std * math.sqrt(2)).add_(mean).clamp_(a, b)


@patch_call("torch._is_all_true", during=(ANY_MODE, RECORDING))
def assume_valid_args(original: Function, valid: Any) -> Any:
    """torch.distributions checks that its arguments are in their domains (a positive scale). Unknown values are assumed
    to be; in a real trace the check adds nothing to the graph."""
    result = original(valid)
    if type(result) is FakeTensor:
        if (
            answers_of(result.fake_mode) is None
            and not is_known(result)
            and number_from_program(result) is None
        ):
            return True
    elif type(result) is torch.Tensor and _torch.is_recording() and not _torch.has_transforms():
        with _torch.no_modes():
            return bool(result)
    return result


# --- The samples of a `DataLoader`, and their order, are drawn for real -------------------------------------
# A sampler draws random indices and reads them. No tensor of the program takes part in that: in a fake mode the indices
# are those of a run without it, and the samples are what the data set returns inside the mode.


SAMPLING: weakref.WeakKeyDictionary[Any, tuple[torch.Tensor, torch.Tensor]] = weakref.WeakKeyDictionary()
"""For each mode: the state of the program's default generator, and the state after the last draw of indices."""


@contextmanager
def draw_for_real() -> Iterator[None]:
    """Outside of the mode, and on the CPU, whatever the default device is: continue the mode's own stream of random numbers;
    the program's generator is left unchanged."""
    mode = _torch.active_fake_mode()
    with _torch.without_fake_mode(), torch.device("cpu"):
        real = torch.get_rng_state()
        before = SAMPLING.get(mode)
        own = before[1] if before is not None and torch.equal(before[0], real) else real
        try:
            torch.set_rng_state(own)
            yield
            SAMPLING[mode] = real, torch.get_rng_state()
        finally:
            torch.set_rng_state(real)


DRAWN_FOR_REAL = (
    "Samplers draw real indices in a fake mode, too: the order and choice of examples is that of a real run."
)


@patch_call("torch.utils.data.dataset.randperm", during=ANY_MODE, reason=DRAWN_FOR_REAL)
def draw_outside_of_mode(original: Function, *args: object, **kwargs: object) -> Any:
    if _torch.active_fake_mode() is None:
        return original(*args, **kwargs)
    with draw_for_real():
        return original(*args, **kwargs)


class RealOrder:
    """The indices of a sampler, drawn outside of the mode. Tensors among them become stand-ins with known values."""

    def __init__(self, sampler: Iterable[object]) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[object]:
        indices = iter(self.sampler)
        end = object()
        while True:
            if _torch.active_fake_mode() is None:
                index = next(indices, end)
            else:
                with draw_for_real():
                    index = next(indices, end)
                index = map_structure(torch.ops.aten.lift_fresh, torch.Tensor, index)
            if index is end:
                return
            yield index


@patch_found("torch.utils.data.dataloader._BaseDataLoaderIter.__init__, while a loader makes an iterator",
             during=ANY_MODE, reason=DRAWN_FOR_REAL)  # fmt: skip
def draw_order_for_real(original: Function) -> Function:
    @functools.wraps(original)
    def __init__(self: Any, loader: object) -> None:
        if _torch.active_fake_mode() is None:
            original(self, loader)
            return
        with draw_for_real():
            original(self, loader)
        self._index_sampler = RealOrder(self._index_sampler)
        self._sampler_iter = iter(self._index_sampler)

    return __init__


@patch_call("torch.utils.data.DataLoader._get_iterator", during=ANY_MODE)
def load_in_this_process(original: Function, self: Any) -> object:
    """Fakes can't be sent between processes, and loading them takes no time: samples are loaded in this process."""
    if _torch.active_fake_mode() is None:
        return original(self)
    before = self.num_workers, self.timeout
    self.num_workers = self.timeout = 0
    try:
        with Hold() as hold:
            hold.replace(_torch.data_loader_iterator_class(), "__init__", draw_order_for_real)
            return original(self)
    finally:
        self.num_workers, self.timeout = before


# --- files and storages ---------------------------------------------------------------------------------


@patch_call("torch.UntypedStorage.data_ptr", during=STORAGES)
def refuse_pointers(original: Function, self: Any) -> Any:
    """C++ raises an unclear error about an invalid storage; `safetensors` calls this when it writes a file."""
    try:
        return original(self)
    except RuntimeError:
        raise with_line(
            NoDataError("UntypedStorage.data_ptr(): the storage of a stand-in has no data"),
            "UntypedStorage.data_ptr", f"{len(self)} bytes on {self.device}",
            "use torch.save, which writes the metadata of a stand-in",
        ) from None  # fmt: skip


@patch_call("torch.storage._StorageBase.__repr__", "torch.storage.TypedStorage.__str__", during=STORAGES)
def show_without_data(original: Function, self: Any) -> Any:
    """As storages on the meta device are shown: their elements can't be read."""
    storage = getattr(self, "_untyped_storage", self)
    if not hasattr(storage, "is_of_fake"):
        return original(self)
    dtype = "" if storage is self else f"dtype={self.dtype}, "
    return f"...\n[{torch.typename(self)}({dtype}device={storage.device}) of size {len(self)}]"


def name_device(value: Any) -> Any:
    """The CUDA device for an integer; any other value unchanged."""
    return torch.device("cuda", value) if type(value) is int else value


@patch_call("torch.nn.Module.to", "torch.nn.Module.cuda", during=ANY_MODE)
def explain_real_modules(original: Function, self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Moving a real module inside a mode fails in C++, with errors that depend on the build: this one names the
    parameter."""
    if _torch.active_fake_mode() is not None:
        args = tuple(map(name_device, args))
        kwargs = {name: name_device(value) for name, value in kwargs.items()}
    try:
        return original(self, *args, **kwargs)
    except (RuntimeError, AssertionError) as error:
        real = next((name for name, part in self.named_parameters() if not _torch.is_stand_in(part)), None)
        is_other = isinstance(error, UnderstudyError) and not isinstance(error, MixedTensorsError)
        if _torch.active_fake_mode() is None or real is None or is_other:
            raise
        seen = str(error).partition("\n")[0]
        raise with_line(
            MixedTensorsError(f"{type(self).__name__}.{original.__name__}: the parameter {real!r} is real ({seen})"),
            f"{type(self).__name__}.{original.__name__}", ", ".join(map(repr, args)),
            "build the module inside the mode, or convert it first: mode.from_module(module)",
        ) from error  # fmt: skip


# --- DistributedDataParallel, which reads the data of parameters in C++ -----------------------------------------------

SENT_IN_CPP = (
    "DistributedDataParallel compares and sends the data of parameters in C++, and stand-ins have none."
)


@patch_call("torch.distributed._verify_params_across_processes", during=ANY_MODE, reason=SENT_IN_CPP)
def compare_no_data(original: Function, group: Any, tensors: Any, *args: object) -> object:
    if not any(type(tensor) is FakeTensor for tensor in tensors):
        return original(group, tensors, *args)
    if (network := tensors[0].fake_mode.network) is not None:
        sizes = sum(2 * tensor.dim() for tensor in tensors)
        found = network.find_group(group)
        network.add("all_gather", found, 8 * found.size, "int64")
        network.add("broadcast", found, 8 * sizes, "int64", peer=found.ranks[0])
    return None


@patch_call("torch.distributed._broadcast_coalesced", during=ANY_MODE, reason=SENT_IN_CPP)
def send_no_data(
    original: Function, process_group: Any, tensors: Any, buffer_size: int, src: int = 0
) -> object:
    if not any(type(tensor) is FakeTensor for tensor in tensors):
        return original(process_group, tensors, buffer_size, src)
    if tensors[0].fake_mode.network is not None:
        _broadcast_in_buckets(process_group, tensors, buffer_size, src)
    return None


def _broadcast_in_buckets(group: Any, tensors: list[torch.Tensor], size: int, source: int) -> None:
    """As in C++: buckets are flattened, and two of them are in flight."""
    in_flight: deque[tuple[list[torch.Tensor], torch.Tensor]] = deque()

    def finish() -> None:
        bucket, flat = in_flight.popleft()
        for tensor, part in zip(bucket, _torch.unflatten_tensors(flat, bucket), strict=True):
            tensor.copy_(part)

    with torch.no_grad():
        for indices in _torch.assign_buckets(tensors, size):
            bucket = [tensors[index] for index in indices]
            in_flight.append((bucket, _torch.flatten_tensors(bucket)))
            torch.distributed.broadcast(in_flight[-1][1], group=group, group_src=source)
            if len(in_flight) == 2:
                finish()
        while in_flight:
            finish()


@patch_call("torch.distributed._compute_bucket_assignment_by_size", during=ANY_MODE)
def notice_data_parallel(original: Function, tensors: Any, *args: object, **kwargs: object) -> Any:
    """DistributedDataParallel is being constructed: if its parameters are fakes, its other patches are needed."""
    if any(type(tensor) is FakeTensor for tensor in tensors):
        ENGINE.begin_with_modes(DATA_PARALLEL)
    return original(tensors, *args, **kwargs)


@patch_call(
    "torch.nn.parallel.distributed.DistributedDataParallel._passing_sync_batchnorm_handle",
    during=DATA_PARALLEL,
)
def reduce_within_rank(original: Function, self: Any, module: Any) -> None:
    """The reducer waits in C++ for results of the process group. For stand-ins, each bucket is its own sum: a
    communication hook returns it. Installed here, because this is called once the reducer exists."""
    original(self, module)
    if any(type(parameter) is FakeTensor for parameter in module.parameters()):
        _torch.set_bucket_hook(self.reducer, self.process_group, _keep_bucket)
        self.logger = _LoggerWithoutTimes(self.logger)


class _LoggerWithoutTimes:
    """The logger's timers are for CPU and CUDA tensors; it prints a warning for others."""

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logger, name)

    def set_runtime_stats_and_log(self) -> None:
        """There is nothing to measure."""


def _keep_bucket(state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations with its own objects
    buffer = bucket.buffer()
    if (network := buffer.fake_mode.network) is not None:
        network.reduce_bucket(state, buffer)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future


@patch_call("torch.distributed.Reducer._rebuild_buckets", during=DATA_PARALLEL)
def rebuild_buckets(original: Function, self: object) -> object:
    """After the first step DistributedDataParallel orders its buckets as gradients came, and broadcasts the order in C++."""
    mode = _torch.active_fake_mode()
    if mode is None:
        return original(self)
    with _RealIndices(mode):
        return original(self)


class _RealIndices(_torch.TorchDispatchMode):
    """The order of buckets is in tensors of integers, which C++ reads: they are real, whatever device they are to be on."""

    def __init__(self, mode: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._network = mode.network

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = flat(torch.Tensor, args, kwargs)
        is_own = (
            all(type(tensor) is torch.Tensor for tensor in tensors)
            if tensors
            else kwargs.get("dtype") is torch.int32
        )
        if not is_own:
            return func(*args, **kwargs)
        if func.namespace == "c10d" and self._network is not None:
            group = self._network.find_group(args[1])
            self._network.add("broadcast", group, 4 * tensors[0].numel(), "int32", peer=group.ranks[0])
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        with _torch.PastDispatch():
            return func(*args, **kwargs)
