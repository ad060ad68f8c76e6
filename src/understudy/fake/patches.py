"""What torch answers otherwise for as long as a fake mode is active, and why.

Each function takes torch's own object and gives the one that stands in its place: an answer for threads in which a fake
mode is active, or for stand-ins, and torch's own answer for all others.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from understudy import _torch
from understudy._torch import active_fake_mode, while_active
from understudy.errors import Context, MixedTensorsError
from understudy.fake import autocast, higher_order, initialisers, packed, pooling, recurrent, spacing
from understudy.fake.composites import among_classes
from understudy.fake.encoders import drops_padding, encoded
from understudy.fake.from_values import with_tensors_of_lengths
from understudy.fake.linear_cross_entropy import loss_of_classes
from understudy.fake.loading import drawn, in_this_process, order_drawn
from understudy.fake.tensor import FakeTensor
from understudy.fake.transforms import with_rules
from understudy.fake.upsampling import upsampled
from understudy.infer.call import flat
from understudy.lines import user_line

Function = Callable[..., Any]


def _answer(place: str, answer: bool) -> None:
    @while_active(place)
    def patch(original: Function) -> Function:
        def asked(*args: Any, **kwargs: Any) -> Any:
            return answer if active_fake_mode() is not None else original(*args, **kwargs)

        return asked


# torch.autocast("cuda") switches itself off, or refuses bfloat16, where there is no CUDA.
_answer("cuda autocast is unavailable", False)
_answer("cuda has bfloat16", True)
# Warns, for every recurrent module on a CUDA device, that this build has no cuDNN.
_answer("cudnn takes a tensor", False)


@while_active("ctc_loss")
def lengths_in_tensors(original: Function) -> Function:
    @functools.wraps(original)
    def loss(*args: Any, **kwargs: Any) -> Any:
        if active_fake_mode() is not None:
            args, kwargs = with_tensors_of_lengths(args, kwargs)
        return original(*args, **kwargs)

    return loss


for _place in ("levels of vmap", "levels of grad", "levels of jvp"):
    while_active(_place)(with_rules)
for _sampler in _torch.SAMPLERS:
    while_active(f"order of {_sampler}")(order_drawn)
while_active("loading by workers")(in_this_process)
while_active("beginning to load data")(drawn)
while_active("splitting data")(drawn)


@while_active("encoders with padding")
def with_whole_batches(original: Function) -> Function:
    @functools.wraps(original)
    def forward(
        self: Any, src: Any, mask: Any = None, src_key_padding_mask: Any = None, is_causal: bool | None = None
    ) -> Any:
        is_seen = _torch.is_stand_in(src) or _torch.is_recording()
        if is_seen and drops_padding(self, src, mask, src_key_padding_mask):
            return encoded(self, src, src_key_padding_mask)
        return original(self, src, mask, src_key_padding_mask, is_causal)

    return forward


@while_active("leaving autocast")
def forget_casts(original: Function) -> Function:
    """Weights that were cast in a region are cast again in the next one."""

    def leave(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        outermost = torch.autocast_increment_nesting() == 1
        torch.autocast_decrement_nesting()
        if outermost:
            autocast.forget_casts()
        return result

    return leave


@while_active("grouping by device")
def group_by_device_that_is_meant(original: Function) -> Function:
    """Optimizers and the clipping of gradients choose their kernels by the device of each group."""

    def grouped(*args: Any, **kwargs: Any) -> Any:
        meant = _torch.stand_in_devices
        return {
            (meant.get(device, device), dtype): rest
            for (device, dtype), rest in original(*args, **kwargs).items()
        }

    return grouped


@while_active("deepcopy of a Parameter")
@while_active("deepcopy of a Tensor")
def real_stays_real(original: Function) -> Function:
    """`copy.deepcopy` of a real tensor copies its storage by operators; in a fake mode, too, it gives a real one."""

    def deepcopy(self: torch.Tensor, memo: Any) -> Any:
        if not _is_real(self):
            return original(self, memo)
        with _torch.without_fake_mode():
            return original(self, memo)

    return deepcopy


class RealData:
    """`tensor.data`: C++ gives a real tensor the storage of a stand-in, past every dispatch, and who reads it then reads
    memory that is not there. Asked of the class, it is torch's own, which torch functions are known by."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __get__(self, tensor: torch.Tensor | None, owner: Any = None) -> Any:
        return self._original if tensor is None else self._original.__get__(tensor, owner)

    def __set__(self, tensor: torch.Tensor, data: Any) -> None:
        is_plain = _is_real(tensor) and _torch.unwrapped(tensor) is None
        # A mode for torch functions is told, and may have another way.
        if type(data) is FakeTensor and is_plain and _torch.count_function_modes() == 0:
            raise MixedTensorsError(
                f"a real tensor can't be given the data of a stand-in, {data._spec}: it would be left without memory",
                context=Context(
                    line=user_line(),
                    hint="make the model inside the mode, or exchange the parameter itself: "
                    "module.weight = torch.nn.Parameter(data)",
                ),
            )
        self._original.__set__(tensor, data)


while_active("data")(RealData)


def _is_real(tensor: Any) -> bool:
    if _torch.is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return all(_is_real(getattr(tensor, name)) for name in names)
    return not _torch.uses_python_dispatch(type(tensor))


# The wrappers of torch.func are plain tensors, and C++ answers for them with the device that stands for another.


@while_active("device")
def device_that_is_meant(original: Any) -> Any:
    def device(tensor: torch.Tensor) -> torch.device:
        answer = original.__get__(tensor)
        return _torch.stand_in_devices.get(answer, answer)

    return property(device)


@while_active("is_cuda")
def is_meant_as_cuda(original: Any) -> Any:
    def is_cuda(tensor: torch.Tensor) -> bool:
        meant = _torch.stand_in_devices.get(_torch.native_device(tensor))
        return original.__get__(tensor) if meant is None else meant.type == "cuda"

    return property(is_cuda)


@while_active("broadcasting a mask")
def broadcast_if_ranks_differ(original: Function) -> Function:
    """torch.masked compares the shapes of mask and input. Python compares their sizes one by one before it looks how many
    there are, which asks of symbols whether they are equal where no answer matters."""

    def input_mask(input: Any, *args: Any, **kwargs: Any) -> Any:
        mask = kwargs.get("mask")
        if isinstance(mask, FakeTensor) and mask.layout is torch.strided and mask.ndim < input.ndim:
            kwargs["mask"] = torch.broadcast_to(mask.clone(), input.shape).to(dtype=torch.bool)
        return original(input, *args, **kwargs)

    return input_mask


@while_active("linear_cross_entropy")
def loss_by_ranks(original: Function) -> Function:
    def linear_cross_entropy(*args: Any, **kwargs: Any) -> Any:
        mode = active_fake_mode()
        if mode is not None and mode.shape_env is not None and len(args) == 3:
            loss = loss_of_classes(*args, **kwargs)
            if loss is not NotImplemented:
                return loss
        return original(*args, **kwargs)

    return linear_cross_entropy


@while_active("least size in torch._lowrank")
@while_active("least size in torch.nn.functional")
def smaller_whichever(original: None) -> Function:
    """For `q <= min(m, n)` Python's own `min` asks which of the two is the smaller, where that is all that matters."""
    return lambda *numbers: functools.reduce(torch.sym_min, numbers if len(numbers) > 1 else numbers[0])


@while_active("compile")
def compiled_elsewhere(original: Function) -> Function:
    """torch's compiler does not know stand-ins, and there is nothing to win: what they run is run as it is.
    Higher-order operators that are called eagerly compile themselves."""

    def compile(model: Any = None, **options: Any) -> Any:
        if active_fake_mode() is None and not _records_branches(_torch.active_recorder()):
            return original(model, **options)
        return (lambda function: function) if model is None else model

    return compile


@while_active("higher-order operators")
def run_in_the_open(original: Function) -> Function:
    """torch's own way makes graphs of the functions that the operator is given, with its own mode and tracer."""

    def dispatch(self: Any, key: Any, /, *args: Any, **kwargs: Any) -> Any:
        key = _torch.key_without_spare(self, key, args, kwargs)
        recorder = _torch.active_recorder()
        if _records_branches(recorder):
            return recorder.call_higher_order(original, self, key, args, kwargs)
        run = higher_order.RUNS.get(self.name())
        mode = active_fake_mode()
        if (
            run is None
            or mode is None
            or type(mode) is _torch.torch_fake_mode_class()
            or _torch.is_recording()
        ):
            return original(self, key, *args, **kwargs)
        return run(*args, **kwargs)

    return dispatch


def _records_branches(recorder: Any) -> bool:
    """Whether this is a recorder of ours: it wants to hear of a higher-order operator before autograd does."""
    return hasattr(type(recorder), "call_higher_order")


@while_active("operands of cond")
def any_structure(original: Function) -> Function:
    """Operands may be structures: for torch its compiler has taken them apart before, for us the recorder does."""

    def check(operands: Any) -> None:
        if not _records_branches(_torch.active_recorder()):
            original(operands)

    return check


@while_active("initial trunc_normal")
def drawn_once(original: Function) -> Function:
    """torch draws again until no value is outside of the bounds, and asks the values whether there is one."""

    def draw(tensor: Any, mean: float, std: float, a: float, b: float, generator: Any = None) -> Any:
        if not _torch.is_stand_in(tensor):
            return original(tensor, mean, std, a, b, generator)
        if type(tensor) is FakeTensor and initialisers.draw_normal(tensor, mean, std, generator):
            return tensor
        with torch.no_grad():
            return tensor.normal_(mean, std, generator=generator)

    return draw


def _at_once(place: str, write: Callable[..., bool]) -> None:
    @while_active(place)
    def patch(original: Function) -> Function:
        """What torch.nn.init does with gradients switched off: switching costs more than the rest."""

        def initialise(tensor: Any, *numbers: Any, **others: Any) -> Any:
            is_usual = type(tensor) is FakeTensor and not others
            return tensor if is_usual and write(tensor, *numbers) else original(tensor, *numbers, **others)

        return initialise


_at_once("initial normal", initialisers.draw_normal)
_at_once("initial uniform", initialisers.draw_uniform)
_at_once("initial fill", initialisers.fill)
_at_once("initial zero", initialisers.zero)


_kaiming, _uniform = torch.nn.init.kaiming_uniform_, torch.nn.init.uniform_


@while_active("initial Linear")
@while_active("initial _ConvNd")
def layer_at_once(original: Function) -> Function:
    """A layer draws from an interval that its sizes give; without values, there is no need to work it out.

    Who exchanges the functions of torch.nn.init (not to initialise at all, say) is asked.
    """

    def reset_parameters(self: Any) -> None:
        init, weight, bias = torch.nn.init, self.weight, self.bias
        if (
            type(weight) is not FakeTensor
            or not (bias is None or type(bias) is FakeTensor)
            or init.kaiming_uniform_ is not _kaiming
            or init.uniform_ is not _uniform
            or len(weight._spec.shape) < 2
            or 0 in weight._spec.shape
            or not initialisers.draw_uniform(weight, -1.0, 1.0)
        ):
            return original(self)
        if bias is not None and not initialisers.draw_uniform(bias, -1.0, 1.0):
            bound = 1 / math.sqrt(weight._spec.numel / weight._spec.shape[0])
            init.uniform_(bias, -bound, bound)
        return None

    return reset_parameters


def in_python(place: str, original: Function) -> Function:
    """C++ reads the sizes of its inputs as integers here, which symbols are not."""

    def called(*args: Any, **kwargs: Any) -> Any:
        mode = active_fake_mode()
        if mode is None or mode.shape_env is None or not _has_symbols(args):
            return original(*args, **kwargs)
        if "upsample" in place:
            result = upsampled(place, args, kwargs)
            if result is not NotImplemented:
                return result
        is_whole = kwargs or _torch.is_recorded_above_autograd()
        if place == "lstm" and not is_whole and recurrent.takes_onednn(args):
            return recurrent.by_onednn(*args)
        with _torch.python_versions():
            return original(*args, **kwargs)

    return called


def _has_symbols(args: Any) -> bool:
    if _torch.is_transformed():  # stand-ins are inside of wrappers
        sizes = [size for tensor in flat(torch.Tensor, args, {}) for size in tensor.shape]
        return any(isinstance(size, torch.SymInt) for size in (*sizes, *flat(torch.SymInt, args, {})))
    return any(
        value._spec.is_symbolic if type(value) is FakeTensor else type(value) is torch.SymInt
        for value in flat((FakeTensor, torch.SymInt), args, {})
    )


for _place in _torch.WITH_CONCRETE_SIZES:
    while_active(_place)(functools.partial(in_python, _place))
while_active("torch.lstm")(functools.partial(in_python, "lstm"))  # modules call the one of torch._VF


@while_active("scripted functions")
def as_python_has_it(original: Function) -> Function:
    """TorchScript knows sizes as integers only, and makes real tensors of numbers. What it was made of does neither."""

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_watched = active_fake_mode() is not None or _torch.active_recorder() is not None
        written = _torch.function_behind(self) if is_watched else None
        return original(self, *args, **kwargs) if written is None else written(*args, **kwargs)

    return called


def _to_symbols(place: str) -> None:
    @while_active(place)
    def patch(original: Function) -> Function:
        def called(*args: Any, **kwargs: Any) -> Any:
            result = NotImplemented if kwargs or active_fake_mode() is None else pooling.pooled(place, args)
            return original(*args, **kwargs) if result is NotImplemented else result

        return called


for _place in _torch.POOLING_TO_INTEGERS:
    _to_symbols(_place)


@while_active("adaptive_avg_pool1d")
def averaged_to_symbols(original: Function) -> Function:
    def adaptive_avg_pool1d(*args: Any, **kwargs: Any) -> Any:
        is_plain = not kwargs and len(args) == 2 and active_fake_mode() is not None
        result = pooling.averaged(*args) if is_plain else NotImplemented
        return original(*args, **kwargs) if result is NotImplemented else result

    return adaptive_avg_pool1d


@while_active("share of fractional_max_pool2d")
@while_active("share of fractional_max_pool3d")
def shares_as_symbols(original: Function) -> Function:
    """torch makes an integer of the share of each size that is to be left."""
    dims = 3 if "3d" in original.__name__ else 2

    def fractional_max_pool(
        input: Any, kernel_size: Any, output_size: Any = None, output_ratio: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if output_size is None and output_ratio is not None and active_fake_mode() is not None:
            output_size = pooling.share_of(input, output_ratio, dims)
        return original(input, kernel_size, output_size, output_ratio, *args, **kwargs)

    return fractional_max_pool


@while_active("places of torch.tensor_split")
@while_active("places of Tensor.tensor_split")
def split_at_what_can_be_read(original: Function) -> Function:
    """C++ reads a tensor of places from memory, past every dispatch."""

    def tensor_split(input: Any, indices_or_sections: Any = None, *args: Any, **kwargs: Any) -> Any:
        places = kwargs.pop("tensor_indices_or_sections", indices_or_sections)
        if type(places) is FakeTensor:
            places = places.tolist() if places.ndim else int(places.item())
        places = () if places is None else (places,)
        return original(input, *places, *args, **kwargs)

    return tensor_split


@while_active("one_hot")
def one_hot_of_symbols(original: Function) -> Function:
    """C++ takes how many classes there are for a plain number. Where only data tells, or it is a symbol: the same steps."""

    def one_hot(tensor: Any, num_classes: Any = -1) -> Any:
        mode = active_fake_mode()
        is_open = type(tensor) is FakeTensor and mode is not None and mode.allow_scalar_outputs
        if not is_open or (type(num_classes) is int and num_classes != -1) or tensor.dtype is not torch.int64:
            return original(tensor, num_classes)
        return among_classes(tensor, tensor.max().item() + 1 if type(num_classes) is int else num_classes)

    return one_hot


@while_active("symbols among arguments")
def no_function_of_its_own(original: None) -> Any:
    """C++ asks every symbol among the arguments of a call for this. A symbol has none, and to find that out costs a fifth
    of the call: Python writes a message each time, which nobody reads. That one says the same at once."""
    return _torch.no_torch_function


@while_active("unpacking a sequence")
def unpacked_by_operators(original: Function) -> Function:
    def pad(data: Any, batch_sizes: Any, batch_first: bool, value: Any, total_length: int) -> Any:
        if not _torch.is_stand_in(data):
            return original(data, batch_sizes, batch_first, value, total_length)
        return packed.pad_packed(data, batch_sizes.tolist(), batch_first, value, total_length)

    return pad


@while_active("padding sequences")
def padded_by_operators(original: Function) -> Function:
    """C++ reads the lengths as plain numbers."""

    def pad_sequence(sequences: Any, *args: Any, **kwargs: Any) -> Any:
        mode = active_fake_mode()
        if mode is None or mode.shape_env is None or not _has_symbols((sequences,)):
            return original(sequences, *args, **kwargs)
        return packed.pad_sequence(sequences, *args, **kwargs)

    return pad_sequence


@while_active("linspace")
def spaced_by_symbols(original: Function) -> Any:
    """C++ takes how many points there are for a plain number."""
    return Spaced(original)


class Spaced:
    """`torch.linspace`, and equal to it: `torch.device("cuda")` as a context looks functions up that make tensors."""

    def __init__(self, original: Function) -> None:
        functools.update_wrapper(self, original)
        self._original = original

    def __call__(self, start: Any, end: Any, steps: Any = None, *args: Any, **kwargs: Any) -> Any:
        is_symbolic = type(steps) is torch.SymInt and not args and active_fake_mode() is not None
        result = spacing.spaced(start, end, steps, **kwargs) if is_symbolic else NotImplemented
        if result is not NotImplemented:
            return result
        return self._original(start, end, *(() if steps is None else (steps,)), *args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return other is self._original or (isinstance(other, Spaced) and other._original is self._original)

    def __hash__(self) -> int:
        return hash(self._original)
