"""Patches of functions that read sizes as plain integers, or lengths from memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from understudy import _torch
from understudy._torch import active_fake_mode
from understudy.errors import OperatorError
from understudy.fake.tensor import FakeTensor
from understudy.fake.values.data_dependent import convert_lengths_to_tensors, readable
from understudy.ops import factories
from understudy.ops.indexing.advanced import can_scatter_one_hot, compare_one_hot, scatter_one_hot
from understudy.ops.nn import recurrent
from understudy.ops.nn.upsampling import UPSAMPLINGS_WITH_CORNERS, upsample_to_symbols
from understudy.patching import ANY_MODE, RECORDING, SYMBOLS, patch, patch_call
from understudy.shapes.node import SymNode
from understudy.spec.call import flat
from understudy.spec.error_context import with_line

Function = Callable[..., Any]


@patch_call("torch.ctc_loss", during=ANY_MODE)
def pass_lengths_as_tensors(original: Function, *args: object, **kwargs: object) -> Any:
    """C++ reads the memory of tensors of lengths."""
    if active_fake_mode() is not None:
        args, kwargs = convert_lengths_to_tensors(args, kwargs)
    return original(*args, **kwargs)


@patch("torch.SymInt.__hash__", during=SYMBOLS)
def hash_as_number(original: Function) -> Function:
    """A size that is hashed, as the key of a dict or of a `functools.lru_cache`, has to be a number: it is specialised
    to its hint, with a guard."""

    def __hash__(self: Any) -> int:
        return hash(int(self)) if type(self.node) is SymNode and self.node.has_hint() else original(self)

    return __hash__


@patch("torch.nn.functional.min", during=(SYMBOLS, RECORDING))
def take_symbolic_minimum(original: Function) -> Function:
    """`affine_grid` checks that the smallest size is positive. Python's `min` would add guards on which one it is."""
    return lambda *numbers: functools.reduce(torch.sym_min, numbers if len(numbers) > 1 else numbers[0])


def run_python_version(original: Function, *args: object, **kwargs: object) -> Any:
    """C++ reads the sizes of its inputs as plain integers; torch's version in Python takes symbols."""
    if not _takes_symbols(args):
        return original(*args, **kwargs)
    with _torch.python_versions():
        return original(*args, **kwargs)


@patch_call(
    "torch._VF.gru",
    "torch._VF.lstm",
    "torch._VF.rnn_tanh",
    "torch._VF.rnn_relu",
    during=ANY_MODE,
)
def run_recurrent_layer(original: Function, *args: Any, **kwargs: object) -> Any:
    """C++ reads sizes as plain integers, and the batch sizes of packed sequences from memory."""
    is_whole = kwargs or _torch.is_recorded_above_autograd()
    if _takes_symbols(args):
        if original.__name__ == "lstm" and not is_whole and recurrent.uses_onednn_layers(args):
            return recurrent.run_onednn_layers(*args)
        return run_python_version(original, *args, **kwargs)
    is_packed = len(args) == PACKED_ARGUMENTS and type(args[1]) is FakeTensor and type(args[3]) is not bool
    if is_packed and not _torch.is_recorded_above_autograd():
        sizes = args[1].fake_mode.value_of(args[1])
        if sizes is None:
            sizes = torch.tensor(args[1].tolist())  # an answer, or an error
        args = (args[0], readable(args[1].fake_mode, sizes), *args[2:])
    return original(*args, **kwargs)


PACKED_ARGUMENTS = 9
"""How many arguments a recurrent layer has for a packed sequence."""


@patch_call("torch._decomp.decompositions._rnn_helper", during=(SYMBOLS, RECORDING))
def add_dropout_between_layers(
    original: Function, input: torch.Tensor, hidden: Sequence[object], params: Sequence[object], has_biases: bool,
    num_layers: int, dropout: float, train: bool, bidirectional: bool, batch_first: bool, layer_fn: Function,
) -> tuple[torch.Tensor, list[Any]]:  # fmt: skip
    """In training a recurrent module has dropout between its layers, which torch's Python version leaves out. Here the
    layers are called one by one, with dropout between them."""
    directions = 2 if bidirectional else 1
    found: list[Any] = []

    def run(input: torch.Tensor, layer: int) -> torch.Tensor:
        own = slice(layer * directions, (layer + 1) * directions)
        output: torch.Tensor
        output, last = original(
            input, hidden[own], params[own], has_biases, 1, 0.0, train, bidirectional, False, layer_fn
        )
        found.extend(last)
        return output

    input = input.transpose(0, 1) if batch_first else input
    input = recurrent.run_layers(input, num_layers, dropout, train, run)
    return input.transpose(0, 1) if batch_first else input, found


def _takes_symbols(args: tuple[object, ...]) -> bool:
    """Whether a mode with a ShapeEnv is active in this thread, and the sizes are not all numbers."""
    mode = active_fake_mode()
    return mode is not None and mode.shape_env is not None and _has_symbols(args)


def _has_symbols(args: Any) -> bool:
    if _torch.has_transforms():  # the stand-ins are inside wrappers of torch.func
        sizes = [size for tensor in flat(torch.Tensor, args, {}) for size in tensor.shape]
        return any(isinstance(size, torch.SymInt) for size in (*sizes, *flat(torch.SymInt, args, {})))
    return any(
        value._spec.is_symbolic if type(value) is FakeTensor else type(value) is torch.SymInt
        for value in flat((FakeTensor, torch.SymInt), args, {})
    )


def read_sizes(args: Any) -> tuple[object, ...]:
    """Read tensors in lists of sizes as numbers: C++ reads these itself, and the number may be a symbol."""
    return tuple([
        type(arg)(size.item() if type(size) is FakeTensor else size for size in arg) if type(arg) in (list, tuple) else arg
        for arg in args
    ])  # fmt: skip


UPSAMPLING_OF_IMAGES = ("upsample_nearest2d", *(name for name in UPSAMPLINGS_WITH_CORNERS if "2d" in name))


@patch_call(*(f"torch._C._nn.{name}" for name in UPSAMPLING_OF_IMAGES), during=SYMBOLS)
def resample_to_symbols(original: Function, *args: object, **kwargs: object) -> torch.Tensor:
    """C++ computes the output's size in plain integers. For inputs of symbolic size the decomposition of the operator
    uses symbols; inside of torch.func, and where only the output's size is a symbol, no kernel of ours is reached."""
    args = read_sizes(args)
    result = upsample_to_symbols(original.__name__, args, kwargs) if _takes_symbols(args) else NotImplemented
    return run_python_version(original, *args, **kwargs) if result is NotImplemented else result


@patch_call("torch.nn.functional.scaled_dot_product_attention", during=SYMBOLS)
def decide_flags(original: Function, *args: Any, **kwargs: Any) -> Any:
    """C++ takes no symbols for `is_causal=q.shape[2] > 1 and mask is None`, where Python has decided the first part
    already."""
    flags = {name: bool(value) for name, value in kwargs.items() if type(value) is torch.SymBool}
    args = tuple([bool(value) if type(value) is torch.SymBool else value for value in args])
    return original(*args, **kwargs | flags)


@patch_call("torch.tensor_split", during=ANY_MODE)
def split_at_numbers(
    original: Function, input: object, indices_or_sections: object = None, *args: object, **kwargs: object
) -> object:
    """C++ reads a tensor of split points from memory, without a dispatch."""
    points = kwargs.pop("tensor_indices_or_sections", indices_or_sections)
    if type(points) is FakeTensor and points.dtype is torch.int64 and points.ndim < 2:  # C++ refuses others
        points = points.tolist() if points.ndim else int(points.item())
    points = () if points is None else (points,)
    return original(input, *points, *args, **kwargs)


@patch_call("torch.nn.functional.one_hot", during=ANY_MODE)
def take_symbolic_classes(original: Function, tensor: Any, num_classes: Any = -1) -> object:
    """C++ takes another path for subclasses, and reads the number of classes as a plain integer. With a given number of
    classes the operators are those of eager; with a symbolic or data-dependent one, those of that other path."""
    mode = active_fake_mode()
    if type(num_classes) is int and num_classes == -1 and type(tensor) is FakeTensor and mode is not None:
        num_classes = _count_determined_classes(tensor)
    if type(tensor) is FakeTensor and mode is not None and can_scatter_one_hot(tensor, num_classes):
        return scatter_one_hot(tensor, num_classes)
    if type(num_classes) is int and num_classes <= 0 and num_classes != -1:
        raise OperatorError(f"one_hot: num_classes must be positive, got {num_classes}")
    is_open = type(tensor) is FakeTensor and mode is not None and mode.allow_scalar_outputs
    is_asked = type(num_classes) is torch.SymInt or num_classes == -1
    if not is_open or not is_asked or tensor.dtype is not torch.int64:
        return original(tensor, num_classes)
    return compare_one_hot(tensor, tensor.max().item() + 1 if type(num_classes) is int else num_classes)


def _count_determined_classes(tensor: FakeTensor) -> int:
    """The largest class plus one, if the values are determined; -1 otherwise."""
    least, most = tensor.extreme_values() or (None, None)
    if type(least) is int and least < 0:
        raise with_line(OperatorError("one_hot: class values must be non-negative"), "one_hot", tensor.spec)
    return most + 1 if type(most) is int else -1


@patch("torch.SymInt.__torch_function__", during=SYMBOLS, is_new=True)
def disable_torch_function_of_symbols(original: None) -> Callable[..., object]:
    """C++ looks this attribute up on every symbol among the arguments of a call. Symbols lack it, and the
    AttributeError that Python makes each time costs a fifth of the call. A disabled `__torch_function__` means the
    same, and is found at once."""
    return _torch.no_torch_function


@patch("torch.SymInt.__divmod__", during=SYMBOLS, is_new=True)
def divide_with_rest(original: None) -> Callable[..., object]:
    """`divmod(x.shape[0], 8)`: torch's numbers have `//` and `%`, and not this one."""
    return lambda number, divisor: (number // divisor, number % divisor)


@patch("torch.SymInt.__rdivmod__", during=SYMBOLS, is_new=True)
def divide_by_symbol_with_rest(original: None) -> Callable[..., object]:
    """The same with a symbol as the divisor."""
    return lambda divisor, number: (number // divisor, number % divisor)


@patch_call("torch._VF._pad_packed_sequence", during=ANY_MODE)
def pad_packed_sequence(
    original: Function, data: Any, batch_sizes: Any, batch_first: bool, value: object, total_length: int
) -> object:
    """C++ reads the batch sizes from memory, and writes the lengths into it."""
    if not (_torch.is_stand_in(data) or _torch.is_recording()):
        return original(data, batch_sizes, batch_first, value, total_length)
    return recurrent.pad_packed(data, batch_sizes.tolist(), batch_first, value, total_length)


@patch_call("torch._C._nn.pad_sequence", during=SYMBOLS)
def pad_sequences_of_symbolic_length(original: Function, sequences: Any, *args: Any, **kwargs: Any) -> object:
    """C++ reads the lengths as plain integers."""
    if not _takes_symbols((sequences,)):
        return original(sequences, *args, **kwargs)
    return recurrent.pad_sequence(sequences, *args, **kwargs)


@patch("torch.linspace", during=SYMBOLS)
class SymbolicLinspace:
    """C++ reads the number of points as a plain integer. Compares equal to `torch.linspace`, because
    `torch.device("cuda")`, as a context manager, looks up the functions that make tensors."""

    def __init__(self, original: Function) -> None:
        functools.update_wrapper(self, original)
        self._original = original

    def __call__(self, start: object, end: object, steps: object = None, *args: object, **kwargs: Any) -> Any:
        is_symbolic = type(steps) is torch.SymInt and not args and active_fake_mode() is not None
        result = factories.symbolic_linspace(start, end, steps, **kwargs) if is_symbolic else NotImplemented
        if result is not NotImplemented:
            return result
        return self._original(start, end, *(() if steps is None else (steps,)), *args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return other is self._original or (
            isinstance(other, SymbolicLinspace) and other._original is self._original
        )

    def __hash__(self) -> int:
        return hash(self._original)
