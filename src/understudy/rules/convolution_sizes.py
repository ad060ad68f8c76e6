"""Sizes of convolutions, and what eager refuses about their arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from understudy.errors import ArgumentError, DtypeError, ShapeMismatch
from understudy.spec import TensorSpec
from understudy.spec.tensor_spec import Size


class Window(NamedTuple):
    """How the kernel moves: one number for each spatial dimension, but for the last two fields."""

    stride: Size
    padding: Size
    dilation: Size
    output_padding: Size
    transposed: bool
    groups: Any

    @classmethod
    def of(
        cls, weight: TensorSpec, stride: Any, padding: Any, dilation: Any, transposed: bool, output_padding: Any,
        groups: Any,
    ) -> Window:  # fmt: skip
        spatial = weight.ndim - 2
        if spatial not in (1, 2, 3):
            raise ShapeMismatch(f"convolution: a weight has 3 to 5 dimensions, got {weight}")
        window = cls(
            _for_each(stride, spatial, "stride"),
            _for_each(padding, spatial, "padding"),
            _for_each(dilation, spatial, "dilation"),
            _for_each(output_padding, spatial, "output_padding"),
            transposed,
            groups,
        )
        window.check()
        return window

    def check(self) -> None:
        for name in ("padding", "output_padding"):
            if any(number < 0 for number in getattr(self, name)):
                raise ArgumentError(f"convolution: {name} {getattr(self, name)} is negative")
        for name in ("stride", "dilation"):
            if any(number <= 0 for number in getattr(self, name)):
                raise ArgumentError(f"convolution: {name} {getattr(self, name)} is not positive")
        if self.groups <= 0:
            raise ArgumentError(f"convolution: {self.groups} groups")

    def output_sizes(self, sizes: Sequence[Any], kernel: Sequence[Any]) -> list[Any]:
        rows = zip(sizes, kernel, self.stride, self.padding, self.dilation, self.output_padding, strict=True)
        if self.transposed:
            return [(n - 1) * s - 2 * p + d * (k - 1) + extra + 1 for n, k, s, p, d, extra in rows]
        return [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d, _ in rows]


def _for_each(numbers: Any, spatial: int, name: str) -> Size:
    given = tuple(numbers)
    if len(given) == 1:
        return given * spatial
    if len(given) != spatial:
        raise ArgumentError(
            f"convolution: {name} {list(given)} has not one number for each of {spatial} dimensions"
        )
    return given


def output_shape(x: TensorSpec, weight: TensorSpec, window: Window) -> Size:
    spatial = window.output_sizes(x.shape[2:], weight.shape[2:])
    channels = weight.shape[1] * window.groups if window.transposed else weight.shape[0]
    if x.shape[1] == 0:  # eager's way for inputs without elements
        channels = 0
    return (x.shape[0], channels, *spatial)


def check_operands(x: TensorSpec, weight: TensorSpec, bias: TensorSpec | None, window: Window) -> None:
    if x.ndim != weight.ndim:
        raise ShapeMismatch(f"convolution: {x} and the weight {weight} differ in the number of dimensions")
    for operand in (weight, bias):
        if operand is not None and operand.dtype is not x.dtype:
            raise DtypeError(f"convolution: {x} and {operand} differ in dtype")
    _check_channels(x, weight, window)
    if bias is not None:
        channels = weight.shape[1] * window.groups if window.transposed else weight.shape[0]
        if bias.ndim != 1 or bias.shape[0] != channels:
            raise ShapeMismatch(f"convolution: {bias} is no bias for {channels} channels")
    if window.transposed:
        _check_output_padding(window)
    else:
        _check_kernel_fits(x, weight, window)


def _check_channels(x: TensorSpec, weight: TensorSpec, window: Window) -> None:
    groups = window.groups
    if weight.shape[0] < groups or weight.shape[0] % groups != 0:
        raise ShapeMismatch(
            f"convolution: the first dimension of {weight} can't be divided into {groups} groups"
        )
    wanted = weight.shape[0] if window.transposed else weight.shape[1] * groups
    if x.shape[1] != wanted:
        raise ShapeMismatch(
            f"convolution: {weight} in {groups} groups wants {wanted} channels, {x} has {x.shape[1]}"
        )


def _check_output_padding(window: Window) -> None:
    for extra, step, dilation in zip(window.output_padding, window.stride, window.dilation, strict=True):
        if extra >= step and extra >= dilation:
            raise ArgumentError(
                f"convolution: output_padding {window.output_padding} must be smaller than the stride "
                f"{window.stride} or the dilation {window.dilation}"
            )


def _check_kernel_fits(x: TensorSpec, weight: TensorSpec, window: Window) -> None:
    for size, kernel, padding, dilation in zip(
        x.shape[2:], weight.shape[2:], window.padding, window.dilation, strict=True
    ):
        if size + 2 * padding < dilation * (kernel - 1) + 1:
            raise ShapeMismatch(f"convolution: the kernel of {weight} is larger than the padded input {x}")
