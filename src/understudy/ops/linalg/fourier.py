"""Fourier transforms, and short-time ones (stft, istft) with symbolic sizes.

Kernel libraries transform the last dimensions of a contiguous batch, so eager brings the others (the batch) to the
front, ordered by their strides, and leaves the result in that order of memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from understudy.errors import ArgumentError, DtypeError, OperatorError, ShapeMismatch
from understudy.ops.kernel_tables.table import holds
from understudy.ops.registry import rule
from understudy.ops.shared.decompositions import decomposition
from understudy.ops.shared.dtypes import FLOATS, HALVES
from understudy.ops.variants import write_out
from understudy.shapes.node import Shape
from understudy.shapes.sizes import is_any_of
from understudy.spec import TensorSpec, complex_type, contiguous_strides, preserved_copy, real_type

Dims = Sequence[int]
CUFFT_LARGEST = 3  # dimensions in one call of cuFFT


def _memory_order(stride: Shape, dims: Dims) -> list[int]:
    """Dimensions from the slowest to the fastest: a batch by its strides, then the transformed ones as given."""
    batch = _split_off(len(stride), dims)
    batch.sort(key=lambda dim: stride[dim], reverse=True)
    return [*batch, *dims]


def _split_off(ndim: int, dims: Dims) -> list[int]:
    """The dimensions not in `dims`, in the order in which C++'s partition leaves them (it matters only where strides
    are equal)."""
    order = list(range(ndim))
    first, last = 0, ndim
    while True:
        while first < last and order[first] not in dims:
            first += 1
        last -= 1
        while first < last and order[last] in dims:
            last -= 1
        if first >= last:
            return order[:first]
        order[first], order[last] = order[last], order[first]
        first += 1


def _strides_after(stride: Shape, sizes: Shape, dims: Dims) -> Shape:
    order = _memory_order(stride, dims)
    packed = contiguous_strides([sizes[dim] for dim in order])
    result: list[Any] = [0] * len(sizes)
    for dim, step in zip(order, packed, strict=True):
        result[dim] = step
    return tuple(result)


def _by_stride(stride: Shape, dims: Dims) -> list[int]:
    return sorted(dims, key=lambda dim: stride[dim], reverse=True)


def _stage_strides(stride: Shape, sizes: Shape, dims: Dims) -> Shape:
    """cuFFT transforms at most three dimensions in one call: the fastest first, each call in the layout of the last one."""
    left = list(dims)
    while left:
        left = _by_stride(stride, left)
        stride = _strides_after(stride, sizes, left[-CUFFT_LARGEST:])
        left = left[:-CUFFT_LARGEST]
    return stride


def _fits_cufft(dims: Dims) -> bool:
    return len(dims) <= CUFFT_LARGEST and not (len(dims) >= 2 and dims[0] == 0 and dims[1] == 1)


def _prepare(what: str, x: TensorSpec, dims: Dims) -> TensorSpec:
    if any(not 0 <= dim < x.ndim for dim in dims):
        raise ArgumentError(f"{what}: dimensions {list(dims)} are out of range for {x}")
    if x.device.type == "cpu":
        if x.dtype in HALVES or x.dtype is torch.complex32:
            raise DtypeError(f"{what}: not implemented on CPU for {x.dtype}, got {x}")
        if x.is_empty and not holds("fourier_takes_empty"):
            raise ShapeMismatch(f"{what}: {x} has no elements")
    return preserved_copy(x) if x.conj or x.neg else x


def _is_empty_on_cpu(x: TensorSpec) -> bool:
    return x.device.type == "cpu" and x.is_empty


def _transform_nothing(what: str, x: TensorSpec, shape: Shape, dtype: torch.dtype) -> TensorSpec:
    """Raise if the result of a transform of an empty tensor would not be empty; otherwise its layout is the usual one."""
    if all(size != 0 for size in shape):
        raise ShapeMismatch(f"{what}: {x} has no elements")
    return x.like(shape, dtype=dtype)


def _without_rule(x: TensorSpec) -> bool:
    """Builds without MKL have another kernel for CPU."""
    return x.device.type not in ("cpu", "cuda") or (
        x.device.type == "cpu" and not torch.backends.mkl.is_available()
    )


@rule("_fft_c2c")
def complex_to_complex(x: TensorSpec, dim: Dims, normalization: int, forward: bool) -> Any:
    if not x.is_complex:
        raise DtypeError(f"_fft_c2c: expected a complex tensor, got {x}")
    if not dim:
        return preserved_copy(x)
    if _without_rule(x):
        return NotImplemented
    x = _prepare("_fft_c2c", x, dim)
    if _is_empty_on_cpu(x):
        return _transform_nothing("_fft_c2c", x, x.shape, x.dtype)
    return x.like(stride=_complex_strides(x, dim))


def _complex_strides(x: TensorSpec, dims: Dims) -> Shape:
    if x.device.type == "cuda":
        return _stage_strides(x.stride, x.shape, dims)
    return _strides_after(x.stride, x.shape, _by_stride(x.stride, dims))


@rule("_fft_r2c")
def real_to_complex(x: TensorSpec, dim: Dims, normalization: int, onesided: bool) -> Any:
    if x.dtype not in FLOATS:
        raise DtypeError(f"_fft_r2c: expected a floating-point tensor, got {x}")
    if not dim:
        raise ArgumentError("_fft_r2c: expected at least one dimension")
    if _without_rule(x):
        return NotImplemented
    x = _prepare("_fft_r2c", x, dim)
    *others, last = dim
    half = (*x.shape[:last], x.shape[last] // 2 + 1, *x.shape[last + 1 :])
    shape = half if onesided else x.shape
    dtype = complex_type(x.dtype)
    if _is_empty_on_cpu(x):
        return _transform_nothing("_fft_r2c", x, shape, dtype)
    if x.device.type == "cpu":
        order = [*_by_stride(x.stride, others), last]
        return x.like(shape, stride=_strides_after(x.stride, shape, order), dtype=dtype)
    if _fits_cufft(dim):
        return x.like(shape, stride=_strides_after(x.stride, shape, dim), dtype=dtype)
    if not others:
        return x.like(shape, stride=_strides_after(x.stride, shape, [last]), dtype=dtype)
    if not onesided:  # completed in a new tensor
        return x.like(shape, dtype=dtype)
    return x.like(
        shape, stride=_stage_strides(_strides_after(x.stride, half, [last]), half, others), dtype=dtype
    )


@rule("_fft_r2c.out")
def real_to_complex_out(
    x: TensorSpec, dim: Dims, normalization: int, onesided: bool, *, out: TensorSpec
) -> Any:
    """The half that is not computed is filled in where the result is."""
    result = real_to_complex(x, dim, normalization, onesided)
    if not onesided and out.dtype is torch.complex32 and x.device.type == "cpu":
        raise DtypeError(f"_fft_r2c: not implemented on CPU for the result {out}")
    return result if result is NotImplemented else write_out("_fft_r2c.out", result, out, 1)


@rule("_fft_c2r")
def complex_to_real(x: TensorSpec, dim: Dims, normalization: int, last_dim_size: Any) -> Any:
    if not x.is_complex:
        raise DtypeError(f"_fft_c2r: expected a complex tensor, got {x}")
    if not dim:
        raise ArgumentError("_fft_c2r: expected at least one dimension")
    if _without_rule(x):
        return NotImplemented
    x = _prepare("_fft_c2r", x, dim)
    *others, last = dim
    given = x.shape[last]
    shape = (*x.shape[:last], last_dim_size, *x.shape[last + 1 :])
    dtype = real_type(x.dtype)
    if _is_empty_on_cpu(x):
        return _transform_nothing("_fft_c2r", x, shape, dtype)
    if x.device.type == "cpu" and not is_any_of(given, last_dim_size // 2 + 1, last_dim_size):
        raise ShapeMismatch(f"_fft_c2r: last_dim_size {last_dim_size} does not match {given} values of {x}")
    if x.device.type == "cuda" and _fits_cufft(dim):
        return x.like(shape, stride=_strides_after(x.like().stride, shape, dim), dtype=dtype)
    stride = _complex_strides(x, others) if others else x.stride
    if x.device.type == "cuda" and not others:
        stride = x.like().stride
    return x.like(shape, stride=_strides_after(stride, shape, [last]), dtype=dtype)


# --- Short-time Fourier transforms: decompositions for symbolic sizes ---------------------------------------

aten = torch.ops.aten
Tensor = torch.Tensor
UNSCALED, BY_ROOT, BY_LENGTH = 0, 1, 2
"""How `_fft_r2c`, `_fft_c2r` and `_fft_c2c` scale."""


@decomposition("stft.center")
def decompose_stft_centred(
    x: Tensor, n_fft: int, hop_length: int | None = None, win_length: int | None = None, window: Tensor | None = None,
    center: bool = True, pad_mode: str = "reflect", normalized: bool = False, onesided: bool | None = None,
    return_complex: bool | None = None, align_to_window: bool | None = None,
) -> Any:  # fmt: skip
    if x.dim() not in (1, 2) or (center and align_to_window is not None):
        return NotImplemented
    batch = x.unsqueeze(0) if x.dim() == 1 else x
    if center:
        margin = n_fft // 2
        padded = torch.nn.functional.pad(batch.view(1, *batch.shape), [margin, margin], pad_mode)
        batch = padded.view(padded.shape[1:])
    return _transform(
        batch, x, n_fft, hop_length, win_length, window, normalized, onesided, return_complex, align_to_window
    )


@decomposition("stft")
def decompose_stft(
    x: Tensor, n_fft: int, hop_length: int | None = None, win_length: int | None = None, window: Tensor | None = None,
    normalized: bool = False, onesided: bool | None = None, return_complex: bool | None = None,
    align_to_window: bool | None = None,
) -> Any:  # fmt: skip
    if x.dim() not in (1, 2):
        return NotImplemented
    batch = x.unsqueeze(0) if x.dim() == 1 else x
    return _transform(
        batch, x, n_fft, hop_length, win_length, window, normalized, onesided, return_complex, align_to_window
    )


def _transform(
    batch: Tensor, x: Tensor, n_fft: int, hop_length: int | None, win_length: int | None, window: Tensor | None,
    normalized: bool, onesided: bool | None, return_complex: bool | None, align_to_window: bool | None,
) -> Any:  # fmt: skip
    is_complex = x.is_complex() or (window is not None and window.is_complex())
    if align_to_window or not (x.is_floating_point() or x.is_complex()):
        return NotImplemented
    if return_complex is None and not is_complex:
        return NotImplemented
    hop_length = n_fft // 4 if hop_length is None else hop_length
    win_length = n_fft if win_length is None else win_length
    _check(batch, n_fft, hop_length, win_length, window)
    _warn(window, return_complex)
    frames = 1 + (batch.shape[1] - n_fft) // hop_length
    window = _widen_window(window, x, n_fft, win_length)
    step = batch.stride(1)
    batch = batch.as_strided([batch.shape[0], frames, n_fft], [batch.stride(0), hop_length * step, step])
    if window is not None:
        batch = batch * window
    scaling = BY_ROOT if normalized else UNSCALED
    if batch.is_complex():
        if onesided:
            raise ArgumentError("stft: onesided=True is not supported for complex input")
        out = aten._fft_c2c(batch, [2], scaling, True)
    else:
        out = aten._fft_r2c(batch, [2], scaling, onesided is None or onesided)
    out.transpose_(1, 2)
    if x.dim() == 1:
        out.squeeze_(0)
    return out if return_complex or return_complex is None else torch.view_as_real(out)


def _check(batch: Tensor, n_fft: int, hop_length: int, win_length: int, window: Tensor | None) -> None:
    if n_fft <= 0 or n_fft > batch.shape[1]:
        raise ShapeMismatch(f"stft: expected n_fft between 1 and the length {batch.shape[1]}, got {n_fft}")
    if hop_length <= 0:
        raise ArgumentError(f"stft: hop_length must be positive, got {hop_length}")
    if not 0 < win_length <= n_fft:
        raise ArgumentError(f"stft: expected win_length between 1 and n_fft {n_fft}, got {win_length}")
    if window is not None and (window.dim() != 1 or window.shape[0] != win_length):
        raise ShapeMismatch(f"stft: the window must be a vector of {win_length}, got {list(window.shape)}")


def _warn(window: Tensor | None, return_complex: bool | None) -> None:
    """As C++ does."""
    if window is None:
        warnings.warn(
            "stft: no window was given, so frequencies leak into each other; pass window=torch.hann_window(win_length)",
            stacklevel=4,
        )
    if return_complex is False:
        warnings.warn(
            "stft: return_complex=False is deprecated; use torch.view_as_real on the result", stacklevel=4
        )


def _widen_window(window: Tensor | None, x: Tensor, n_fft: int, win_length: int) -> Tensor | None:
    """The window, padded with zeros on both sides to the length of a frame."""
    if win_length == n_fft:
        return window
    model = x if window is None else window
    wide = torch.zeros([n_fft], dtype=model.dtype, device=model.device)
    middle = wide.narrow(0, (n_fft - win_length) // 2, win_length)
    if window is None:
        middle.fill_(1)
    else:
        middle.copy_(window)
    return wide


@decomposition("istft")
def decompose_istft(
    x: Tensor, n_fft: int, hop_length: int | None = None, win_length: int | None = None, window: Tensor | None = None,
    center: bool = True, normalized: bool = False, onesided: bool | None = None, length: int | None = None,
    return_complex: bool = False,
) -> Any:  # fmt: skip
    """Frames are added up where they overlap, and divided by the sum of the windows there. C++ also asks whether that sum
    is 0 anywhere, which is a question of values."""
    hop_length = n_fft // 4 if hop_length is None else hop_length
    win_length = n_fft if win_length is None else win_length
    if x.dim() not in (2, 3) or not x.is_complex() or (return_complex and onesided):
        return NotImplemented
    _check_frames(x, n_fft, hop_length, win_length, window)
    bins, frames = x.shape[-2:]
    onesided = bool(bins != n_fft) if onesided is None else onesided
    if bins != (n_fft // 2 + 1 if onesided else n_fft):
        raise ShapeMismatch(
            f"istft: expected {n_fft // 2 + 1 if onesided else n_fft} frequencies for n_fft {n_fft}, got {bins}"
        )
    if window is None:
        window = torch.ones([win_length], dtype=real_type(x.dtype), device=x.device)
    elif window.is_complex() and not return_complex:
        raise OperatorError("istft: a complex window needs return_complex=True")
    left = (n_fft - win_length) // 2
    window = (
        torch.constant_pad_nd(window, [left, n_fft - win_length - left]) if win_length != n_fft else window
    )
    parts = torch.view_as_real(x.resolve_conj())
    spectrum = torch.view_as_complex((parts.unsqueeze(0) if x.dim() == 2 else parts).transpose(1, 2))
    pieces = _frames_of(spectrum, n_fft, BY_ROOT if normalized else BY_LENGTH, onesided, return_complex)
    pieces = pieces * window.view(1, 1, n_fft)
    whole = n_fft + hop_length * (frames - 1)
    signal = aten.unfold_backward(pieces, [pieces.shape[0], whole], 1, n_fft, hop_length)
    weights = aten.unfold_backward(window.pow(2).expand(1, frames, n_fft), [1, whole], 1, n_fft, hop_length)
    start = n_fft // 2 if center else 0
    end = whole - start if length is None else start + length
    signal, weights = signal[:, start:end], weights[:, start:end]
    if signal.shape[1] == 0:
        raise OperatorError(
            f"istft: {frames} frames of {n_fft} do not cover the signal from {start} to {end}"
        )
    signal = signal / weights
    signal = signal.squeeze(0) if x.dim() == 2 else signal
    return torch.constant_pad_nd(signal, [0, end - whole]) if end > whole else signal


def _frames_of(spectrum: Tensor, n_fft: int, scaling: int, onesided: bool, return_complex: bool) -> Any:
    if return_complex:
        return aten._fft_c2c(spectrum, [2], scaling, False)
    half = spectrum if onesided else spectrum.narrow(-1, 0, n_fft // 2 + 1)
    return aten._fft_c2r(half, [2], scaling, n_fft)


def _check_frames(x: Tensor, n_fft: int, hop_length: int, win_length: int, window: Tensor | None) -> None:
    if x.numel() == 0:
        raise ShapeMismatch(f"istft: expected a tensor with elements, got shape {list(x.shape)}")
    if not 0 < win_length <= n_fft:
        raise ArgumentError(f"istft: expected win_length between 1 and n_fft {n_fft}, got {win_length}")
    if not 0 < hop_length <= win_length:
        raise ArgumentError(
            f"istft: expected hop_length between 1 and win_length {win_length}, got {hop_length}"
        )
    if window is not None and (window.dim() != 1 or window.shape[0] != win_length):
        raise ShapeMismatch(f"istft: the window must be a vector of {win_length}, got {list(window.shape)}")
