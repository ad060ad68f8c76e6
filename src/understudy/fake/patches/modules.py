"""Patches of modules, their construction and initialisation, data loading, files and storages."""

from __future__ import annotations

import functools
import math
import os
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from types import BuiltinFunctionType, FunctionType, WrapperDescriptorType
from typing import Any, NamedTuple

import torch
from torch import nn

from understudy import _torch, errors
from understudy.contexts import ReplacedWhere, contextmanager, run_to_the_end
from understudy.errors import MixedTensorsError, NoDataError, UnderstudyError, UnsupportedFakeTensorException
from understudy.fake import initial_values
from understudy.fake.native import current_indices, is_grad_enabled, prepare
from understudy.fake.tensor import FakeTensor
from understudy.fake.values.answers import answers_of, number_from_program
from understudy.fake.values.data_dependent import is_known
from understudy.fake.values.determined import DeterminedContents
from understudy.infer.engine import cache
from understudy.ops.nn.attention import drops_padding, encode
from understudy.patching import (
    ANY_MODE,
    DATA_PARALLEL,
    ENGINE,
    LAYERS,
    RECORDING,
    STORAGES,
    Hold,
    patch,
    patch_call,
    patch_found,
)
from understudy.spec import TensorSpec
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
    is_torchs = is_own(original)
    write = INITIALISERS[original.__name__] if is_torchs else original

    @functools.wraps(original)
    def initialise(tensor: FakeTensor, *numbers: object, **others: object) -> FakeTensor:
        is_usual = is_torchs and not others and begin_for_stand_in(tensor)
        return tensor if is_usual and write(tensor, *numbers) else original(tensor, *numbers, **others)

    return initialise


@patch_call("torch.nn.init._calculate_correct_fan", during=ANY_MODE)
def notice_layers(original: Function, tensor: Any, mode: object) -> object:
    """The first layer of a model is being initialised: the others are built faster."""
    begin_for_stand_in(tensor)
    return original(tensor, mode)


def begin_for_stand_in(tensor: object) -> bool:
    """Begin the patches of layers if this is a stand-in, until the last mode is left. Returns whether it is one."""
    is_fake = type(tensor) is FakeTensor
    if is_fake and not ENGINE.active & LAYERS.bit:
        ENGINE.begin_until_left(LAYERS)
    return is_fake


_kaiming, _uniform = torch.nn.init.kaiming_uniform_, torch.nn.init.uniform_


@patch("torch.nn.Linear.reset_parameters", "torch.nn.modules.conv._ConvNd.reset_parameters", during=LAYERS)
def initialise_layer_at_once(original: Function) -> Function:
    """A layer computes the bounds of its random values from its sizes; without values, that can be skipped. Functions
    that the user has replaced (to skip initialisation, say) are still called."""
    is_torchs = is_own(original)

    @functools.wraps(original)
    def reset_parameters(self: Any) -> None:
        init, weight, bias = torch.nn.init, self.weight, self.bias
        if (
            type(weight) is not FakeTensor
            or not is_torchs
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


# --- Layers that are built again with the same arguments are replayed ----------------------------------------------------
# The constructor of a layer checks names, makes tensors by operators, and computes initial values. That gives the same
# attributes whenever the arguments and the defaults are the same, so it is run once, and its result is kept: a
# `ConstructorPlan`.
# Nothing is said here about what a constructor does. It is run again wherever somebody could notice the difference: the
# layer is of a subclass, another mode listens, a hook for new parameters is registered, or a function that constructors
# call was replaced, by the user or by another package.


KINDS = frozenset({
    nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d,
    nn.Conv1d, nn.Conv2d, nn.Conv3d,
})  # fmt: skip
"""Not their subclasses, which may do anything in their constructors; and only layers with tensors, as others are built
faster than a plan is found."""
ARGUMENT_TYPES = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device})
"""Types of arguments by whose value and type a plan is found."""
SHARED_TYPES = ARGUMENT_TYPES | {torch.Size}
"""Types of attributes that all layers with the same arguments may share."""
TENSOR_ATTRIBUTES = frozenset({"_is_param", "_determined"})
METHODS = (
    "__init__", "__setattr__", "register_parameter", "register_buffer", "reset_parameters", "reset_running_stats",
)  # fmt: skip
"""Methods that constructors of layers call."""
FACTORIES = ("empty", "zeros", "ones", "tensor")
INIT_FUNCTIONS = ("kaiming_uniform_", "uniform_", "normal_", "ones_", "zeros_", *INITIALISERS)
TORCH, UNDERSTUDY = (os.path.join(os.path.dirname(file), "") for file in (torch.__file__, errors.__file__))
"""The folders of both packages."""
active_fake_mode, can_skip_dispatch_for = _torch.active_fake_mode, _torch.can_skip_dispatch_for
count_writes, make_wrapper = _torch.count_writes, _torch.make_wrapper
default_dtype = torch.get_default_dtype
set_attribute = object.__setattr__


class LayerTensor(NamedTuple):
    """A parameter or buffer of a new layer."""

    spec: TensorSpec
    arguments: tuple[object, ...]
    """Those that make a wrapper for it."""
    is_parameter: bool
    writes: int
    contents: tuple[object, bool] | None

    def make(self, mode: Any) -> FakeTensor:
        fake: FakeTensor = make_wrapper(FakeTensor, *self.arguments)
        fake._spec = self.spec
        fake.fake_mode = mode
        if self.is_parameter:
            fake._is_param = True
        if self.contents is not None:
            fake._determined = DeterminedContents(*self.contents)
        if self.writes:
            count_writes((fake,) * self.writes)
        return fake


class ConstructorPlan(NamedTuple):
    """What a new layer is given.

    `called` are the functions that the constructor may have called: a plan holds as long as they are the same.
    """

    called: list[object]
    attributes: dict[str, object]
    """All of them, in their order; the values of the following ones are made anew."""
    containers: list[tuple[str, Callable[[], object]]]
    tensors: list[tuple[str, dict[str, LayerTensor | None]]]

    def build(self, layer: nn.Module, mode: object) -> None:
        attributes = self.attributes.copy()
        for name, make in self.containers:
            attributes[name] = make()
        for name, parts in self.tensors:
            attributes[name] = {key: None if part is None else part.make(mode) for key, part in parts.items()}
        set_attribute(layer, "__dict__", attributes)


PLACES = (
    "torch.nn.Linear.__init__", "torch.nn.Embedding.__init__", "torch.nn.LayerNorm.__init__", "torch.nn.RMSNorm.__init__",
    "torch.nn.GroupNorm.__init__", "torch.nn.modules.batchnorm._BatchNorm.__init__", "torch.nn.Conv1d.__init__",
    "torch.nn.Conv2d.__init__", "torch.nn.Conv3d.__init__",
)  # fmt: skip


@patch(*PLACES, during=LAYERS)
def build_layer_by_plan(original: Function) -> Function:
    """Layers with the same arguments are given the same attributes: what the constructor did the first time is replayed."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        kind, mode = type(self), active_fake_mode()
        if (
            kind not in KINDS
            or not getattr(mode, "can_skip_dispatch", False)
            or not can_skip_dispatch_for(mode)
            or current_indices
            or not is_grad_enabled()
            or vars(self)
            or _torch.has_registration_hooks()
        ):
            original(self, *args, **kwargs)
            return
        types = tuple(map(type, (*args, *kwargs.values())))
        if not ARGUMENT_TYPES.issuperset(types) or (float in types and has_zero_float(args, kwargs)):
            original(self, *args, **kwargs)
            return
        key = (kind, default_dtype(), mode._facts_number, _torch.device_of_context(), args, *kwargs.items(), types)
        plan: ConstructorPlan | None = cache.layer_plans.get(key)
        called = list(map(getattr, *CALLED[kind]))
        if plan is not None and called == plan.called:
            plan.build(self, mode)
            return
        original(self, *args, **kwargs)
        plan = make_plan(self, called) if all(map(is_own, called)) else None
        if plan is not None:
            cache.add_layer_plan(key, plan)

    return __init__


def has_zero_float(args: Any, kwargs: Any) -> bool:
    """0.0 and -0.0 are equal, and not the same."""
    return any(type(value) is float and not value for value in (*args, *kwargs.values()))


def find_functions(kind: type[nn.Module]) -> tuple[list[object], list[str]]:
    """Owners and names of the functions that the constructor of a layer may call."""
    classes = kind.__mro__[: kind.__mro__.index(nn.Module) + 1]
    found: list[tuple[object, str]] = [(owner, name) for owner in classes for name in METHODS if hasattr(owner, name)]
    found += [(torch, name) for name in FACTORIES]
    found += [(nn.init, name) for name in INIT_FUNCTIONS]
    found += [(nn.Parameter, "__new__"), (sys.modules[kind.__module__], "Parameter")]
    return [owner for owner, _ in found], [name for _, name in found]


CALLED: dict[Any, tuple[list[object], list[str]]] = {kind: find_functions(kind) for kind in KINDS}


def is_own(function: Any) -> bool:
    """Whether it is a function of torch, maybe with our patches around it, and not one by which a program replaced it."""
    if isinstance(function, FunctionType):
        path = function.__code__.co_filename
        return path.startswith(TORCH) or (path.startswith(UNDERSTUDY) and is_own(getattr(function, "__wrapped__", None)))
    return isinstance(function, (BuiltinFunctionType, WrapperDescriptorType)) or function is nn.Parameter


def make_plan(layer: nn.Module, called: list[object]) -> ConstructorPlan | None:
    """The plan for layers like this new one; None if it has attributes that can't be made anew."""
    containers: list[tuple[str, Callable[[], object]]] = []
    tensors: list[tuple[str, dict[str, LayerTensor | None]]] = []
    attributes = vars(layer).copy()
    for name, value in attributes.items():
        if name in ("_parameters", "_buffers"):
            parts = {key: None if tensor is None else describe(tensor) for key, tensor in value.items()}
            if type(value) is not dict or any(part is None and value[key] is not None for key, part in parts.items()):
                return None
            tensors.append((name, parts))
        elif type(value) in (list, set) and all(map(can_share, value)):
            containers.append((name, value.copy().copy))
        elif type(value) in (dict, OrderedDict) and not value:
            containers.append((name, type(value)))
        elif not can_share(value):
            return None
    for name in [name for name, _ in (*containers, *tensors)]:
        attributes[name] = None
    return ConstructorPlan(called, attributes, containers, tensors)


def can_share(value: object) -> bool:
    return type(value) in SHARED_TYPES or (type(value) is tuple and all(map(can_share, value)))


def describe(tensor: torch.Tensor) -> LayerTensor | None:
    """How to make a tensor like this one; None if there is more to it than a spec and contents."""
    if type(tensor) is not FakeTensor or not TENSOR_ATTRIBUTES.issuperset(vars(tensor)):
        return None
    spec, known = tensor._spec, tensor._determined
    # torch warns whenever it initialises a tensor without elements.
    if spec.sparse is not None or spec.is_symbolic or spec.conj or spec.neg or not spec.numel or tensor.grad_fn is not None:
        return None
    if known is not None and (
        type(known) is not DeterminedContents or (known.extremes, known.watch, known.counting_mode) != (None, None, None)
    ):
        return None
    arguments: tuple[Any, ...] = prepare(spec)
    if tensor.requires_grad:
        arguments = (*arguments[:7], False, True, *arguments[9:])
    contents = None if known is None else (known.content, known.literal)
    return LayerTensor(spec, arguments, "_is_param" in vars(tensor), tensor._version, contents)


def has_nothing_to_switch(manager: Any) -> bool:
    return not (is_grad_enabled() or getattr(manager, "prev", True) or _torch.has_other_function_modes())


@patch("torch.no_grad.__enter__", during=LAYERS)
def enter_no_grad(original: Function) -> Any:
    """Initialisation is full of functions in `torch.no_grad()` that call each other. To switch gradients off where they
    are off takes longer than to initialise a fake, above all in `with torch.device(...)`, which hears of each switch."""

    def skip(self: Any) -> None:
        """`prev` is False, as gradients are."""

    return ReplacedWhere(original, skip, has_nothing_to_switch) if is_own(original) else original


@patch("torch.no_grad.__exit__", during=LAYERS)
def leave_no_grad(original: Function) -> Any:
    """As for `__enter__`."""

    def skip(self: Any, *exception: object) -> None:
        if is_grad_enabled():  # switched on inside of the block
            original(self, *exception)

    return ReplacedWhere(original, skip, has_nothing_to_switch) if is_own(original) else original


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


@patch_call("torch.storage._StorageBase.__repr__", during=STORAGES)
def print_storage_without_data(original: Function, self: Any) -> Any:
    """torch prints the bytes of a storage; a stand-in has none."""
    try:
        return original(self)
    except RuntimeError:
        return f"[{type(self).__module__}.{type(self).__name__}(device={self.device}) of size {len(self)}, without data]"


@patch_call("torch.TypedStorage.__str__", during=STORAGES)
def print_typed_storage_without_data(original: Function, self: Any) -> Any:
    """The same, as torch prints the storage of a tensor on the device `meta`."""
    try:
        return original(self)
    except RuntimeError:
        return f"...\n[{torch.typename(self)}(dtype={self.dtype}, device={self.device}) of size {len(self)}]"


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


@patch_call("torch.nn.modules.lazy.LazyModuleMixin.__init__", during=ANY_MODE)
def refuse_lazy_modules(original: Function, self: object, *args: object, **kwargs: object) -> Any:
    """Their parameters are of a subclass without sizes, for which there is no stand-in."""
    if _torch.active_fake_mode() is None:
        return original(self, *args, **kwargs)
    raise with_line(
        UnsupportedFakeTensorException("lazy modules (nn.LazyLinear, …) have no sizes that a stand-in could have"),
        type(self).__name__, "",
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
