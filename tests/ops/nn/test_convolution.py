from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import understudy.ops  # noqa: F401  (registers)
from tests.ops.layouts import MORE_DTYPES, every, expanded, filled, permuted, strided
from tests.oracle.real import spec_of
from understudy import FakeTensorMode, ShapeEnv
from understudy.errors import ShapeMismatch
from understudy.ops.nn.convolution import VECTOR_INSTRUCTIONS, Window, convolution_scratch, uses_onednn
from understudy.ops.variants import rule_of

aten = torch.ops.aten


def formats(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Contiguous, channels-last, reversed, with gaps, expanded."""
    ndim = len(shape)
    channels_last = (0, *range(2, ndim), 1)
    return [
        filled(shape, dtype),
        permuted(shape, channels_last, dtype),
        permuted(shape, tuple(reversed(range(ndim))), dtype),
        strided(shape, dtype),
        expanded(shape, 0, dtype),
    ]


def drawn_window(draw: random.Random, spatial: int) -> tuple[Any, ...]:
    transposed = draw.random() < 0.4
    stride = [draw.choice([1, 2]) for _ in range(spatial)]
    dilation = [draw.choice([1, 1, 2]) for _ in range(spatial)]
    extra = [draw.choice([0, 0, 1]) if transposed and step > 1 else 0 for step in stride]
    groups = draw.choice([1, 1, 2, 4])
    return stride, [draw.choice([0, 1, 2])] * spatial, dilation, transposed, extra, groups


def drawn_operands(draw: random.Random, spatial: int, window: tuple[Any, ...], dtype: torch.dtype) -> Any:
    transposed, groups = window[3], window[5]
    channels, made = groups * draw.choice([1, 2]), groups * draw.choice([1, 3])
    kernel = (
        tuple(draw.choice([1, 1, 3, 4]) for _ in range(spatial)) if draw.random() < 0.7 else (1,) * spatial
    )
    batch = draw.choice([1, 1, 2, 16])
    x = draw.choice(formats((batch, channels, *(9, 7, 7)[:spatial]), dtype))
    lead = (channels, made // groups) if transposed else (made, channels // groups)
    return x, draw.choice(formats((*lead, *kernel), dtype)), made


FLOATS = [torch.float32, torch.float32, torch.bfloat16, torch.float64, torch.float16]


@pytest.mark.parametrize("spatial", [1, 2, 3])
@pytest.mark.parametrize("threads", [1, 2])
def test_forward_layouts(spatial: int, threads: int, request: pytest.FixtureRequest) -> None:
    before = torch.get_num_threads()
    request.addfinalizer(lambda: torch.set_num_threads(before))
    torch.set_num_threads(threads)
    draw = random.Random(spatial)

    def calls() -> Iterator[Any]:
        for _ in range(250 if threads == 1 else 60):
            dtype = draw.choice(FLOATS)
            window = drawn_window(draw, spatial)
            x, weight, made = drawn_operands(draw, spatial, window, dtype)
            bias = draw.choice([None, filled((made,), dtype)])
            yield aten.convolution.default, x, weight, bias, *window

    every(calls())


@pytest.mark.parametrize("spatial", [1, 2, 3])
def test_backward_layouts(spatial: int) -> None:
    draw = random.Random(spatial)

    def calls() -> Iterator[Any]:
        for _ in range(250):
            dtype = draw.choice(FLOATS)
            window = drawn_window(draw, spatial)
            x, weight, made = drawn_operands(draw, spatial, window, dtype)
            shape = tuple(aten.convolution.default(x, weight, None, *window).shape)
            mask = [draw.random() < 0.7 for _ in range(3)]
            grad = draw.choice(formats(shape, dtype))
            yield aten.convolution_backward.default, grad, x, weight, [made], *window, mask

    every(calls())


PLAIN = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
TRANSPOSED = ([2, 2], [1, 1], [1, 1], True, [0, 0], 1)


def test_dtypes() -> None:
    def calls() -> Iterator[Any]:
        for dtype in (*MORE_DTYPES, torch.int8):
            x, weight = filled((2, 4, 7, 7), dtype), filled((4, 4, 3, 3), dtype)
            yield aten.convolution.default, x, weight, None, *PLAIN
            yield aten.convolution.default, x, weight, None, *TRANSPOSED
            yield aten.convolution.default, x, filled((4, 4, 3, 3)), None, *PLAIN
            yield aten.convolution_backward.default, x, x, weight, [4], *PLAIN, [True] * 3
        yield (
            aten.convolution.default,
            filled((2, 4, 7, 7)),
            filled((4, 4, 3, 3)),
            filled((4,), torch.int64),
            *PLAIN,
        )

    every(calls())


def test_refusals_and_empty_inputs() -> None:
    x, weight = filled((2, 4, 7, 7)), filled((6, 4, 3, 3))
    changes = [
        {"x": filled((0, 4, 7, 7))},
        {"x": filled((0, 4, 7, 7)).contiguous(memory_format=torch.channels_last)},
        {"x": filled((2, 4, 0, 7))},
        {"x": filled((2, 0, 7, 7)), "weight": filled((6, 0, 3, 3))},
        {"weight": filled((0, 4, 3, 3))},
        {"x": filled((4, 7, 7))},
        {"bias": filled((6, 1))},
        {"bias": filled((5,))},
        {"x": filled((2, 5, 7, 7))},
        {"weight": filled((6, 4, 10, 10))},
        {"weight": filled((6, 2, 3, 3)), "groups": 2},
        {"weight": filled((5, 2, 3, 3)), "groups": 2},
        {"groups": 0},
        {"padding": [-1, 1]},
        {"stride": [0, 1]},
        {"dilation": [0, 1]},
        {"stride": [1], "padding": [1], "dilation": [1]},
        {"stride": [1, 1, 1]},
        {"output_padding": [1, 1]},
        {"weight": filled((4, 6, 3, 3)), "transposed": True, "output_padding": [1, 1]},
        {"weight": filled((4, 6, 3, 3)), "transposed": True, "output_padding": [-1, 0]},
        {"weight": filled((4, 6, 3, 3)), "transposed": True, "padding": [9, 9]},
        {"weight": filled((4, 6, 3, 3)), "transposed": True, "dilation": [2, 2], "output_padding": [1, 1]},
        {"x": filled((2, 4)), "weight": filled((6, 4))},
    ]
    given = dict(
        zip(("stride", "padding", "dilation", "transposed", "output_padding", "groups"), PLAIN, strict=True)
    )
    names = ("x", "weight", "bias", *given)
    plain = {"x": x, "weight": weight, "bias": None, **given}
    every((aten.convolution.default, *({**plain, **change}[name] for name in names)) for change in changes)


def test_gradients_of_empty_inputs() -> None:
    every(
        (aten.convolution_backward.default, filled((0, 6, 7, 7)), x, weight, [6], *PLAIN, mask)
        for x in formats((0, 4, 7, 7))[:3]
        for weight in formats((6, 4, 3, 3))
        for mask in ([True, True, True], [True, False, False], [False, True, False], [False, False, True])
    )


def test_whole_convolutions() -> None:
    def calls() -> Iterator[Any]:
        for spatial, forward, transposed in (
            (1, aten.conv1d, aten.conv_transpose1d.default),
            (2, aten.conv2d, aten.conv_transpose2d.input),
            (3, aten.conv3d, aten.conv_transpose3d.input),
        ):
            for batch, kernel in itertools.product(((), (2,)), (1, 2, 3)):
                shape = (*batch, 4, *(7,) * spatial)
                for x in formats(shape)[:4]:
                    for weight in formats((4, 4, *(kernel,) * spatial)):
                        yield forward.default, x, weight, filled((4,))
                        yield forward.default, x, weight, None, [2], [1], [2]
                        yield transposed, x, weight, None, [2], [0], [1]
                        for name in ("same", "valid"):
                            yield forward.padding, x, weight, None, [1], name
                            yield forward.padding, x, weight, None, [1], name, [2]
        yield aten.conv2d.padding, filled((2, 4, 7, 7)), filled((4, 4, 3, 3)), None, [2, 2], "same"
        yield aten.conv2d.padding, filled((2, 4, 7, 7)), filled((4, 4, 3, 3)), None, [1, 1], "other"
        yield aten.conv2d.default, filled((7, 7)), filled((4, 4, 3, 3))

    every(calls())


def test_channels_last_in_three_dimensions_on_cuda() -> None:
    found = rule_of(aten.convolution.default)
    assert found is not None
    cuda = torch.device("cuda:0")
    x = filled((1, 2, 4, 4, 4)).contiguous(memory_format=torch.channels_last_3d)
    specs = [spec_of(tensor).on(cuda) for tensor in (x, filled((3, 2, 1, 1, 1)))]
    result = found(*specs, None, [1] * 3, [0] * 3, [1] * 3, False, [0] * 3, 1)
    assert str(result) == "f32[1, 3, 4, 4, 4]~(192, 1, 48, 12, 3)@cuda:0"


@pytest.mark.parametrize(
    ("dtype", "device", "is_refused"),
    [(torch.float64, "cpu", True), (torch.float32, "cpu", False), (torch.float64, "cuda", False)],
)
def test_transposed_results_without_elements(dtype: torch.dtype, device: str, is_refused: bool) -> None:
    """On a CPU, only oneDNN computes them."""

    def run(device: str) -> torch.Tensor:
        x = torch.ones(16, 2, 2, 2, dtype=dtype, device=device)
        weight = torch.ones(2, 3, 1, 1, dtype=dtype, device=device)
        return torch.nn.functional.conv_transpose2d(x, weight, padding=1)

    if is_refused:
        with pytest.raises(RuntimeError):
            run(device)
        with (
            FakeTensorMode(),
            pytest.raises(ShapeMismatch, match=r"expected output sizes of at least 1, got \[16, 3, 0, 0\]"),
        ):
            run(device)
        return
    with FakeTensorMode():
        assert run(device).shape == (16, 3, 0, 0)
    assert device != "cpu" or run(device).shape == (16, 3, 0, 0)


@pytest.mark.parametrize(("height", "width"), [(2, 3), (4, 2), (3, 5)])
def test_named_padding_of_symbolic_kernels(height: int, width: int) -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x: Any = mode.from_tensor(torch.ones(2, 3, 7, 9), static_shapes=True)
    kernel = torch.ones(2, 3, height, width)
    weight: Any = mode.from_tensor(kernel, symbolic_context=("static", "static", "h", "w"))
    with mode:
        result: Any = torch.nn.functional.conv2d(x, weight, padding="same")
    assert result.shape == (2, 2, 7, 9)


def test_onednn_takes_no_output_padding_as_large_as_the_stride() -> None:
    x, weight = spec_of(torch.zeros(2, 4, 8, 8)), spec_of(torch.zeros(4, 4, 3, 3))
    for stride, uses in ((1, False), (2, True)):
        window = Window.of(weight, [stride] * 2, [0, 0], [2, 2], True, [1, 1], 1)
        assert uses_onednn(x, weight, window) is uses


def test_onednn_copies_contiguous_images_into_blocks() -> None:
    weight, settings = filled((8, 8, 3, 3)), ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    image = filled((2, 8, 16, 16))
    contiguous, last = (
        convolution_scratch([], spec_of(x), spec_of(weight.contiguous(memory_format=order)), None, *settings)
        for x, order in (
            (image, torch.contiguous_format),
            (permuted((2, 8, 16, 16), (0, 2, 3, 1)), torch.channels_last),
        )
    )
    assert last == 0
    assert (contiguous > 0) is (torch.backends.cpu.get_cpu_capability() in VECTOR_INSTRUCTIONS)
