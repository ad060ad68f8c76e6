"""Patches of modules, their initialisation, data loading, files and storages."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from understudy import _torch
from understudy.contexts import contextmanager, run_to_the_end
from understudy.errors import MixedTensorsError, NoDataError, UnderstudyError, UnsupportedFakeTensorException
from understudy.fake import initial_values
from understudy.fake.tensor import FakeTensor
from understudy.fake.values.answers import answers_of, number_from_program
from understudy.fake.values.data_dependent import is_known
from understudy.ops.nn.attention import drops_padding, encode
from understudy.patching import ANY_MODE, DATA_PARALLEL, ENGINE, RECORDING, STORAGES, patch, patch_call
from understudy.spec.call import map_structure
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
def take_arguments_to_be_valid(original: Function, valid: Any) -> Any:
    """torch.distributions asks whether its arguments are in their domains (a positive scale), to raise an error
    otherwise. Where the values are not known they are taken to be; in a real run, looking fixes nothing in the graph."""
    result = original(valid)
    if type(result) is FakeTensor:
        if answers_of(result.fake_mode) is None and not is_known(result) and number_from_program(result) is None:
            return True
    elif type(result) is torch.Tensor and _torch.is_recording() and not _torch.has_transforms():
        with _torch.no_modes():
            return bool(result)
    return result


INITIALISERS: dict[str, Callable[..., bool]] = {
    "_no_grad_normal_": initial_values.draw_normal,
    "_no_grad_uniform_": initial_values.draw_uniform,
    "_no_grad_fill_": initial_values.fill,
    "_no_grad_zero_": initial_values.zero,
}


@patch(*(f"torch.nn.init.{name}" for name in INITIALISERS), during=ANY_MODE)
def write_at_once(original: Function) -> Function:
    """torch.nn.init switches gradients off and on, which costs more than the rest of the call on a fake."""
    write = INITIALISERS[original.__name__]

    @functools.wraps(original)
    def initialise(tensor: FakeTensor, *numbers: object, **others: object) -> FakeTensor:
        is_usual = type(tensor) is FakeTensor and not others
        return tensor if is_usual and write(tensor, *numbers) else original(tensor, *numbers, **others)

    return initialise


_kaiming, _uniform = torch.nn.init.kaiming_uniform_, torch.nn.init.uniform_


@patch("torch.nn.Linear.reset_parameters", "torch.nn.modules.conv._ConvNd.reset_parameters", during=ANY_MODE)
def initialise_layer_at_once(original: Function) -> Function:
    """A layer computes the bounds of its random values from its sizes; without values, that can be skipped. Functions
    of torch.nn.init that the user has replaced (to skip initialisation, say) are still called."""

    def reset_parameters(self: Any) -> None:
        init, weight, bias = torch.nn.init, self.weight, self.bias
        if (
            type(weight) is not FakeTensor
            or not (bias is None or type(bias) is FakeTensor)
            or init.kaiming_uniform_ is not _kaiming
            or init.uniform_ is not _uniform
            or len(weight._spec.shape) < 2
            or 0 in weight._spec.shape
            or not initial_values.draw_uniform(weight, -1.0, 1.0)
        ):
            return original(self)
        if bias is not None and not initial_values.draw_uniform(bias, -1.0, 1.0):
            bound = 1 / math.sqrt(weight._spec.numel / weight._spec.shape[0])
            init.uniform_(bias, -bound, bound)
        return None

    return reset_parameters


# --- The samples of a `DataLoader`, and their order, are drawn for real -------------------------------------
# A sampler draws random indices and reads them. No tensor of the program takes part in that: in a fake mode the indices
# are those of a run without it, and the samples are what the data set returns inside the mode.


SAMPLING: weakref.WeakKeyDictionary[Any, tuple[torch.Tensor, torch.Tensor]] = weakref.WeakKeyDictionary()
"""For each mode: the state of the program's default generator, and the state after the last draw of indices."""


@contextmanager
def draw_for_real() -> Iterator[None]:
    """Outside of the mode, continue the mode's own stream of random numbers; the program's generator is left unchanged."""
    mode = _torch.active_fake_mode()
    with _torch.without_fake_mode():
        real = torch.get_rng_state()
        before = SAMPLING.get(mode)
        own = before[1] if before is not None and torch.equal(before[0], real) else real

        def restore() -> None:
            torch.set_rng_state(real)

        with run_to_the_end(restore):
            torch.set_rng_state(own)
            yield
            SAMPLING[mode] = real, torch.get_rng_state()


DRAWN_FOR_REAL = "Which examples are taken, and in which order, is drawn and read: in a fake mode as in a run without it."


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


@patch_call("torch.utils.data.dataloader._BaseDataLoaderIter.__init__", during=ANY_MODE, reason=DRAWN_FOR_REAL)
def draw_order_for_real(original: Function, self: Any, loader: object) -> None:
    if _torch.active_fake_mode() is None:
        original(self, loader)
        return
    with draw_for_real():
        original(self, loader)
    self._index_sampler = RealOrder(self._index_sampler)
    self._sampler_iter = iter(self._index_sampler)


@patch_call("torch.utils.data.DataLoader._get_iterator", during=ANY_MODE)
def load_in_this_process(original: Function, self: Any) -> object:
    """Fakes can't be sent between processes, and loading them takes no time: samples are loaded in this process."""
    if _torch.active_fake_mode() is None or not self.num_workers:
        return original(self)
    before = self.num_workers, self.timeout
    self.num_workers = self.timeout = 0
    try:
        return original(self)
    finally:
        self.num_workers, self.timeout = before


# --- files and storages ---------------------------------------------------------------------------------


@patch_call("torch.storage._StorageBase.__repr__", during=STORAGES)
def print_storage_without_data(original: Function, self: Any) -> Any:
    """torch prints the bytes of a storage; a stand-in has none."""
    try:
        return original(self)
    except RuntimeError:
        return f"[{type(self).__module__}.{type(self).__name__}(device={self.device}) of size {len(self)}, without data]"


@patch_call("torch.UntypedStorage.data_ptr", during=STORAGES)
def refuse_pointers(original: Function, self: Any) -> Any:
    """C++ raises an unclear error about an invalid storage; `safetensors` calls this when it writes a file."""
    try:
        return original(self)
    except RuntimeError:
        raise with_line(
            NoDataError("UntypedStorage.data_ptr(): the storage of a stand-in has no data"),
            "UntypedStorage.data_ptr", f"{len(self)} bytes on {self.device}",
            "nothing of a stand-in can be written to a file but its metadata: torch.save keeps that",
        ) from None  # fmt: skip


@patch_call(
    "torch.nn.parameter.UninitializedParameter.__new__", "torch.nn.parameter.UninitializedBuffer.__new__", during=ANY_MODE
)
def refuse_lazy_parameters(original: Function, cls: Any, *args: object, **kwargs: object) -> Any:
    """A lazy parameter is a subclass without sizes, for which there is no stand-in."""
    if _torch.active_fake_mode() is None:
        return original(cls, *args, **kwargs)
    raise with_line(
        UnsupportedFakeTensorException("lazy modules (nn.LazyLinear, …) have no sizes that a stand-in could have"),
        cls.__name__, "",
        "give the sizes, as in nn.Linear(in_features, out_features); or build the module outside of the mode, run it "
        "once on a real batch, and take mode.from_module(module)",
    )  # fmt: skip


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
            "build the module inside the mode, or move a copy of stand-ins: mode.from_module(module)",
        ) from error  # fmt: skip


# --- DistributedDataParallel, which reads the data of parameters in C++ -----------------------------------------------

SENT_IN_CPP = "DistributedDataParallel compares and sends the data of parameters in C++, and stand-ins have none."


@patch_call("torch.distributed._verify_params_across_processes", "torch.distributed._broadcast_coalesced", during=ANY_MODE,
       reason=SENT_IN_CPP)  # fmt: skip
def send_no_data(original: Function, group: object, tensors: Any, *args: object, **kwargs: object) -> object:
    if any(type(tensor) is FakeTensor for tensor in tensors):
        return None
    return original(group, tensors, *args, **kwargs)


@patch_call("torch.distributed._compute_bucket_assignment_by_size", during=ANY_MODE)
def notice_data_parallel(original: Function, tensors: Any, *args: object, **kwargs: object) -> Any:
    """DistributedDataParallel is being constructed: if its parameters are fakes, its other patches are needed."""
    if any(type(tensor) is FakeTensor for tensor in tensors):
        ENGINE.begin_with_modes(DATA_PARALLEL)
    return original(tensors, *args, **kwargs)


@patch_call("torch.nn.parallel.distributed.DistributedDataParallel._passing_sync_batchnorm_handle", during=DATA_PARALLEL)
def reduce_with_nobody(original: Function, self: Any, module: Any) -> None:
    """The reducer waits in C++ for results of the process group. For stand-ins, each bucket is its own sum: a
    communication hook returns it. Installed here, because this is called once the reducer exists."""
    original(self, module)
    if any(type(parameter) is FakeTensor for parameter in module.parameters()):
        _torch.set_bucket_hook(self.reducer, _keep_bucket)


def _keep_bucket(state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations with its own objects
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@patch_call("torch.distributed.Reducer._rebuild_buckets", during=DATA_PARALLEL)
def keep_buckets(original: Function, self: object) -> object:
    """After the first step DistributedDataParallel reorders its buckets, and broadcasts the order in C++."""
    return original(self) if _torch.active_fake_mode() is None else False
