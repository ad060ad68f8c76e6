"""The peak on the CPU is that of the real run, to the byte."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.report.programs import PROGRAMS
from tests.report.true_peak import true_peak
from understudy.report.runs import rehearse


@pytest.mark.parametrize("name", PROGRAMS)
def test_peak_is_that_of_the_real_run(name: str) -> None:
    assert rehearse(PROGRAMS[name]).peak.allocated_bytes == true_peak(PROGRAMS[name])


def train_heads(width: int, find_loss: Callable[[torch.Tensor], torch.Tensor], **settings: Any) -> Callable[[], None]:
    """Two steps of attention's three projections, or of any layer of that size, with this loss."""

    def program() -> None:
        model = torch.nn.Linear(16, width)
        optimizer = torch.optim.Adam(model.parameters(), **settings)
        for _ in range(2):
            find_loss(model(torch.randn(2, 40, 16))).backward()
            optimizer.step()
            optimizer.zero_grad()

    return program


def attend(x: torch.Tensor, **settings: Any) -> torch.Tensor:
    query, key, value = x.view(2, 40, 3, 4, 8).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(query, key, value, **settings).square().mean()


def against(loss: Callable[..., torch.Tensor], **settings: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: loss(x, torch.rand(2, 40, 96), **settings)


STEPS_OF_KERNELS = {
    "attention": (attend, {}),
    "causal attention": (partial(attend, is_causal=True), {}),
    "mean": (lambda x: x.mean(1).mean(), {}),
    "mse_loss": (against(F.mse_loss), {}),
    "mse_loss, summed": (against(F.mse_loss, reduction="sum"), {}),
    "smooth_l1_loss": (against(F.smooth_l1_loss), {}),
    "huber_loss": (against(F.huber_loss), {}),
    "huber_loss, summed": (against(F.huber_loss, reduction="sum"), {}),
    "soft_margin_loss": (against(F.soft_margin_loss), {}),
    "binary_cross_entropy": (lambda x: F.binary_cross_entropy(x.sigmoid(), torch.rand(2, 40, 96)), {}),
    "hinge_embedding_loss": (against(F.hinge_embedding_loss), {}),
    "cross_entropy of probabilities": (lambda x: F.cross_entropy(x, torch.rand(2, 40, 96)), {}),
    "batch_norm of vectors": (lambda x: nn.BatchNorm1d(96)(x.flatten(0, 1)).square().sum(), {}),
    "batch_norm of sequences": (lambda x: nn.BatchNorm1d(40)(x).square().sum(), {}),
    "batch_norm with channels last": (lambda x: nn.BatchNorm2d(96)(x.mT[..., None]).square().sum(), {}),
    "batch_norm of images": (lambda x: nn.BatchNorm2d(40)(x.unflatten(2, (8, 12))).square().sum(), {}),
    "batch_norm in evaluation": (lambda x: nn.BatchNorm1d(40).eval()(x).square().sum(), {}),
    "batch_norm of a transposed batch": (lambda x: nn.BatchNorm1d(80)(x.flatten(0, 1).t()).square().sum(), {}),
    "numbers of lists": (lambda x: x.square().sum(), {"foreach": True}),
    "a product with an expanded operand": (lambda x: x.sum(), {}),
}


@pytest.mark.parametrize("name", STEPS_OF_KERNELS)
@pytest.mark.parametrize("threads", [1, 2])
def test_tensors_that_kernels_make_on_the_way(name: str, threads: int) -> None:
    find_loss, settings = STEPS_OF_KERNELS[name]
    program = train_heads(96, find_loss, **settings)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert rehearse(program).peak.allocated_bytes == true_peak(program)
    finally:
        torch.set_num_threads(before)


def test_results_that_are_given() -> None:
    """`out=` has the formulas of the plain operators."""

    def program() -> None:
        x, y, out, bias = torch.rand(4, 8), torch.rand(4, 8), torch.empty(4, 8), torch.rand(4)
        for name in ("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy"):
            getattr(torch.ops.aten, name)(x, y, reduction=0, out=out)
        torch.ops.aten.mean.out(x, [0], out=torch.empty(8))
        torch.ops.aten.mm.out(x, y.t(), out=torch.empty(4, 4))
        image, weight = torch.rand(2, 4, 9, 9), torch.rand(4, 4, 3, 3)
        torch.ops.aten.convolution.out(image, weight, bias, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, out=torch.empty(2, 4, 7, 7))

    assert rehearse(program).verdict == "fits"


def train_convolutions(*parts: torch.nn.Module) -> None:
    model = torch.nn.Sequential(*parts)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        model(torch.randn(8, 3, 64, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def train_classifier() -> None:
    train_convolutions(
        nn.Conv2d(3, 32, 7, 2, 3), nn.BatchNorm2d(32), nn.ReLU(True), nn.MaxPool2d(3, 2, 1), nn.Conv2d(32, 64, 3, 1, 1),
        nn.ReLU(), nn.Conv2d(64, 128, 3, 2, 1, bias=False), nn.Conv2d(128, 256, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip


def train_autoencoder() -> None:
    train_convolutions(
        nn.Conv2d(3, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.SiLU(), nn.Conv2d(64, 128, 3, 2, 1), nn.SiLU(),
        nn.ConvTranspose2d(128, 64, 4, 2, 1), nn.Conv2d(64, 3, 3, padding=1),
    )  # fmt: skip


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="the layouts are those of AVX-512")
@pytest.mark.parametrize("program", [train_classifier, train_autoencoder])
def test_convolutions_of_onednn(program: Callable[[], None]) -> None:
    """Copies of images and weights with channels in blocks; what threads add up in is not counted."""
    found, true = rehearse(program).peak.allocated_bytes, true_peak(program, uses_onednn=True)
    assert 0 <= true - found <= 0.03 * true


@pytest.mark.parametrize("settings", [{}, {"num_layers": 2, "bidirectional": True}, {"hidden_size": 64}, {"input_size": 30}])
def test_layers_of_onednn(settings: Any) -> None:
    """Its workspace, which is kept for the backward pass, copies of weights, and scratch memory."""

    def program() -> None:
        sizes = {"input_size": 16, "hidden_size": 40, **settings}
        model = torch.nn.LSTM(**sizes)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(torch.randn(10, 4, sizes["input_size"]))[0].square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert rehearse(program).peak.allocated_bytes == true_peak(program, uses_onednn=True)


DECODER = Path(__file__).parents[1] / "simulation" / "scripts" / "train_decoder.py"
SMALL = "--device cpu --width 64 --layers 2 --heads 4 --inner 256 --vocabulary 100 --batch 2 --length 16"
MiB = 1 << 20


@pytest.fixture(scope="module")
def decoder() -> Any:
    spec = importlib.util.spec_from_file_location("train_decoder", DECODER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("more", ["", "--autocast", "--forward", "--forward --autocast"])
def test_decoder_in_plain_operators(decoder: Any, more: str) -> None:
    def program() -> None:
        decoder.main(f"{SMALL} {more}".split())

    assert rehearse(program).peak.allocated_bytes == true_peak(program)


def test_step_of_a_wide_decoder_on_a_card(decoder: Any) -> None:
    """The peak is in the optimizer, at the first of the largest parameters: parameters, gradients and two moments; beside
    the old moments of that parameter three temporaries of its size; the workspaces of forward and backward."""
    width, inner, vocabulary, layers, length = 2560, 10240, 10000, 4, 64
    found = rehearse(decoder.main, ["--layers", str(layers), "--length", str(length)], device="h100").peak
    largest = width * inner
    parameters = 2 * vocabulary * width + layers * (4 * width * width + 3 * largest + 2 * width) + width
    angles = 2 * length * width // 32 // 2
    numbers = found.requested_bytes - 4 * (4 * parameters + 5 * largest + angles) - 2 * 32 * MiB
    assert 0 <= numbers < 16 * 1024  # the batch, the loss
    assert (found.phase, found.step) == ("optimizer", 1)
    # No request is rounded up by more than 1 MiB, or 512 bytes where it is small.
    assert 0 <= found.allocated_bytes - found.requested_bytes < 0.01 * found.requested_bytes
    assert found.fragmentation_bytes <= found.reserved_bytes - found.requested_bytes


def test_out_of_memory_tells_where() -> None:
    def program() -> None:
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1 << 20)).cuda()
        model(torch.empty(1 << 20, 8, device="cuda"))

    found = rehearse(program, device="t4")
    assert found.verdict == "does not fit"
    assert found.out_of_memory is not None
    assert (found.out_of_memory.step, found.out_of_memory.phase, found.out_of_memory.module) == (0, "forward", "1")


def test_memory_of_other_libraries_is_not_torchs() -> None:
    """An array of NumPy has memory of its own, however many tensors are made of it; what is computed of them is torch's."""
    array = np.ones((256, 256), dtype=np.float32)

    def program() -> None:
        first, second, third = torch.from_numpy(array), torch.from_numpy(array), torch.as_tensor(array)
        rows = first[:8] * 2
        literal = torch.tensor([1.0, 2.0, 3.0])
        assert (rows + second[:8]).sum().ndim == literal.sum().ndim + third.dim() - 2
        first[0].add_(1)

    assert 0 < rehearse(program).peak.allocated_bytes == true_peak(program) < array.nbytes
