"""The peak on the CPU is that of the real run, within the error that docs/accuracy.md states."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.report.programs import PROGRAMS
from tests.report.true_peak import true_peak
from understudy.report.runs import rehearse

STATED_ERROR = 0.01
"""Of the peak on the CPU, where docs/accuracy.md says nothing else: small temporaries of kernels are not counted."""


def check_peak(program: Callable[[], object], error: float = STATED_ERROR, uses_onednn: bool = False) -> None:
    found, true = rehearse(program).peak.allocated_bytes, true_peak(program, uses_onednn)
    assert abs(found - true) <= error * true, (found, true)


@pytest.mark.parametrize("name", PROGRAMS)
def test_peak_is_that_of_the_real_run(name: str) -> None:
    check_peak(PROGRAMS[name])


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


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="the layouts are those of AVX-512"
)
@pytest.mark.parametrize("program", [train_classifier, train_autoencoder])
def test_convolutions_of_onednn(program: Callable[[], None]) -> None:
    """Copies of images and weights with channels in blocks. Buffers of threads are not counted."""
    check_peak(program, 0.04, uses_onednn=True)


@pytest.mark.parametrize("settings", [{}, {"num_layers": 2, "bidirectional": True}])
def test_layers_of_onednn(settings: Any) -> None:
    """The workspace, which is kept for the backward pass, copies of weights, and gates."""

    def program() -> None:
        model = torch.nn.LSTM(128, 256, **settings)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(torch.randn(20, 8, 128))[0].square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    check_peak(program, 0.03, uses_onednn=True)


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

    check_peak(program)


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
    assert (found.out_of_memory.step, found.out_of_memory.phase, found.out_of_memory.module) == (
        0,
        "forward",
        "1",
    )


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
