"""Short-time Fourier transforms, step by step: see `composite_table`."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from understudy.errors import ArgumentError, ShapeMismatch
from understudy.fake.composite_table import composite

aten = torch.ops.aten
Tensor = torch.Tensor
Maybe = Tensor | None

UNSCALED, BY_ROOT = 0, 1
"""How `_fft_r2c` and `_fft_c2c` scale."""


@composite("stft.center")
def stft_centred(
    x: Tensor, n_fft: int, hop_length: int | None = None, win_length: int | None = None, window: Maybe = None,
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
    return _transformed(
        batch, x, n_fft, hop_length, win_length, window, normalized, onesided, return_complex, align_to_window
    )


@composite("stft")
def stft(
    x: Tensor, n_fft: int, hop_length: int | None = None, win_length: int | None = None, window: Maybe = None,
    normalized: bool = False, onesided: bool | None = None, return_complex: bool | None = None,
    align_to_window: bool | None = None,
) -> Any:  # fmt: skip
    if x.dim() not in (1, 2):
        return NotImplemented
    batch = x.unsqueeze(0) if x.dim() == 1 else x
    return _transformed(
        batch, x, n_fft, hop_length, win_length, window, normalized, onesided, return_complex, align_to_window
    )


def _transformed(
    batch: Tensor, x: Tensor, n_fft: int, hop_length: int | None, win_length: int | None, window: Maybe,
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
    window = _widened(window, x, n_fft, win_length)
    step = batch.stride(1)
    batch = batch.as_strided([batch.shape[0], frames, n_fft], [batch.stride(0), hop_length * step, step])
    if window is not None:
        batch = batch * window
    scaling = BY_ROOT if normalized else UNSCALED
    if batch.is_complex():
        if onesided:
            raise ArgumentError("stft: the transform of complex numbers has two sides")
        out = aten._fft_c2c(batch, [2], scaling, True)
    else:
        out = aten._fft_r2c(batch, [2], scaling, onesided is None or onesided)
    out.transpose_(1, 2)
    if x.dim() == 1:
        out.squeeze_(0)
    return out if return_complex or return_complex is None else torch.view_as_real(out)


def _check(batch: Tensor, n_fft: int, hop_length: int, win_length: int, window: Maybe) -> None:
    if n_fft <= 0 or n_fft > batch.shape[1]:
        raise ShapeMismatch(f"stft: n_fft {n_fft} is not between 1 and the length {batch.shape[1]}")
    if hop_length <= 0:
        raise ArgumentError(f"stft: hop_length must be positive, got {hop_length}")
    if not 0 < win_length <= n_fft:
        raise ArgumentError(f"stft: win_length {win_length} is not between 1 and n_fft {n_fft}")
    if window is not None and (window.dim() != 1 or window.shape[0] != win_length):
        raise ShapeMismatch(f"stft: the window must be a vector of {win_length}, got {list(window.shape)}")


def _warn(window: Maybe, return_complex: bool | None) -> None:
    """As C++ does."""
    if window is None:
        warnings.warn("stft: without a window, the spectrum of one frequency leaks to others", stacklevel=4)
    if return_complex is False:
        warnings.warn(
            "stft: return_complex=False is deprecated; use torch.view_as_real on the result", stacklevel=4
        )


def _widened(window: Maybe, x: Tensor, n_fft: int, win_length: int) -> Maybe:
    """The window in the middle of zeros, as long as a frame."""
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
