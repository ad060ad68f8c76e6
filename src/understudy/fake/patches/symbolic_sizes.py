"""What torch answers otherwise for as long as a fake mode is active, and why.

Each function takes torch's own object and gives the one that stands in its place: an answer for threads in which a fake
mode is active, or for stand-ins, and torch's own answer for all others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from understudy import _torch
from understudy._torch import active_fake_mode, while_active
from understudy.fake.tensor import FakeTensor
from understudy.fake.values.data_dependent import with_tensors_of_lengths
from understudy.ops import factories
from understudy.ops.indexing.advanced import among_classes
from understudy.ops.nn import pooling_symbolic, recurrent
from understudy.ops.nn import recurrent as nn_recurrent
from understudy.ops.nn.class_losses import loss_of_classes
from understudy.ops.nn.upsampling import upsample_to_symbols
from understudy.spec.call import flat

Function = Callable[..., Any]

@while_active("ctc_loss")
def lengths_in_tensors(original: Function) -> Function:
    @functools.wraps(original)
    def loss(*args: Any, **kwargs: Any) -> Any:
        if active_fake_mode() is not None:
            args, kwargs = with_tensors_of_lengths(args, kwargs)
        return original(*args, **kwargs)

    return loss


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


def in_python(place: str, original: Function) -> Function:
    """C++ reads the sizes of its inputs as integers here, which symbols are not."""

    def called(*args: Any, **kwargs: Any) -> Any:
        mode = active_fake_mode()
        if mode is None or mode.shape_env is None or not _has_symbols(args):
            return original(*args, **kwargs)
        if "upsample" in place:
            result = upsample_to_symbols(place, args, kwargs)
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


def _to_symbols(place: str) -> None:
    @while_active(place)
    def patch(original: Function) -> Function:
        def called(*args: Any, **kwargs: Any) -> Any:
            is_plain = not kwargs and active_fake_mode() is not None
            result = pooling_symbolic.pool_to_symbols(place, args) if is_plain else NotImplemented
            return original(*args, **kwargs) if result is NotImplemented else result

        return called


for _place in _torch.POOLING_TO_INTEGERS:
    _to_symbols(_place)


@while_active("adaptive_avg_pool1d")
def averaged_to_symbols(original: Function) -> Function:
    def adaptive_avg_pool1d(*args: Any, **kwargs: Any) -> Any:
        is_plain = not kwargs and len(args) == 2 and active_fake_mode() is not None
        result = pooling_symbolic.average_to_symbols(*args) if is_plain else NotImplemented
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
            output_size = pooling_symbolic.share_of(input, output_ratio, dims)
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
        return nn_recurrent.pad_packed(data, batch_sizes.tolist(), batch_first, value, total_length)

    return pad


@while_active("padding sequences")
def padded_by_operators(original: Function) -> Function:
    """C++ reads the lengths as plain numbers."""

    def pad_sequence(sequences: Any, *args: Any, **kwargs: Any) -> Any:
        mode = active_fake_mode()
        if mode is None or mode.shape_env is None or not _has_symbols((sequences,)):
            return original(sequences, *args, **kwargs)
        return nn_recurrent.pad_sequence(sequences, *args, **kwargs)

    return pad_sequence


@while_active("linspace")
def spaced_by_symbols(original: Function) -> Any:
    """C++ takes how many points there are for a plain number."""
    return SymbolicLinspace(original)


class SymbolicLinspace:
    """`torch.linspace`, and equal to it: `torch.device("cuda")` as a context looks functions up that make tensors."""

    def __init__(self, original: Function) -> None:
        functools.update_wrapper(self, original)
        self._original = original

    def __call__(self, start: Any, end: Any, steps: Any = None, *args: Any, **kwargs: Any) -> Any:
        is_symbolic = type(steps) is torch.SymInt and not args and active_fake_mode() is not None
        result = factories.linspace_of_symbols(start, end, steps, **kwargs) if is_symbolic else NotImplemented
        if result is not NotImplemented:
            return result
        return self._original(start, end, *(() if steps is None else (steps,)), *args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return other is self._original or (isinstance(other, SymbolicLinspace) and other._original is self._original)

    def __hash__(self) -> int:
        return hash(self._original)
