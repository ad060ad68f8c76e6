"""Modes in several threads at once."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._python_dispatch as python_dispatch
from torch import nn

from understudy import FakeTensor, FakeTensorMode
from understudy.fake import mode as mode_module
from understudy.infer.cache import Cache


def together(*functions: Callable[[], Any]) -> list[Any]:
    """Run all at once; an error in any of them is an error here."""
    results: list[Any] = [None] * len(functions)
    errors: list[BaseException] = []
    start = threading.Barrier(len(functions))

    def run(position: int) -> None:
        try:
            start.wait()
            results[position] = functions[position]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(position,)) for position in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def training(mode: FakeTensorMode, device: str, width: int) -> Callable[[], Any]:
    def run() -> Any:
        with mode, torch.device(device):
            model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.LayerNorm(width))
            optimizer = torch.optim.AdamW(model.parameters())
            for batch in range(1, 12):
                model(torch.empty(batch, width)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            return model

    return run


def flags() -> tuple[bool, bool]:
    return (
        python_dispatch._is_in_torch_dispatch_mode,
        python_dispatch._is_in_any_mode_without_ignore_compile_internals,
    )


def test_two_modes_in_two_threads() -> None:
    before = flags()
    one, two = FakeTensorMode(), FakeTensorMode()
    models = together(training(one, "cpu", 5), training(two, "cuda", 6))
    assert all(p.fake_mode is one and p.shape[0] == 5 for p in models[0].parameters())
    assert all(p.fake_mode is two and p.is_cuda for p in models[1].parameters())
    assert flags() == before


def test_one_mode_in_several_threads() -> None:
    mode = FakeTensorMode()
    models = together(*(training(mode, device, 4) for device in ("cpu", "cuda", "cpu")))
    assert all(p.fake_mode is mode for model in models for p in model.parameters())


def test_a_mode_is_active_in_its_own_thread_only() -> None:
    inside, done = threading.Event(), threading.Event()

    def fakes() -> Any:
        with FakeTensorMode():
            inside.set()
            done.wait()
            return torch.ones(2)

    def real() -> Any:
        inside.wait()
        try:
            x = torch.ones(2, requires_grad=True)
            (x * 2).sum().backward()
            assert not torch.cuda.is_available()
            return x.grad
        finally:
            done.set()

    fake, grad = together(fakes, real)
    assert type(fake) is FakeTensor and type(grad) is torch.Tensor and grad.tolist() == [2, 2]
    assert flags() == (False, False)


def test_modes_that_end_in_any_order() -> None:
    """A enters, B enters, A leaves, B leaves: torch's own way of restoring its flags breaks here."""
    entered, left = threading.Event(), threading.Event()

    def first() -> None:
        with FakeTensorMode():
            entered.wait()
        left.set()

    def second() -> None:
        with FakeTensorMode():
            entered.set()
            left.wait()
            assert type(torch.empty(2)) is FakeTensor

    before = flags()
    together(first, second)
    assert flags() == before
    assert type(torch.empty(2)) is torch.Tensor


def test_the_cache_stays_bounded_and_right(monkeypatch: Any) -> None:
    small = Cache(limit=16)
    monkeypatch.setattr(mode_module, "cache", small)
    mode = FakeTensorMode()

    def shapes(seed: int) -> Callable[[], Any]:
        def run() -> None:
            with mode:
                for i in range(400):
                    n = (i * seed) % 37 + 1
                    x = torch.empty(n, 3)
                    assert (x @ torch.empty(3, n)).shape == (n, n)
                    assert x.t().stride() == (1, 3)
                    assert torch.cat([x, x]).shape == (2 * n, 3)

        return run

    together(*(shapes(seed) for seed in (7, 11, 13)))
    info = small.info()
    assert info.size <= 16
    assert info.misses > 16


def test_determined_values_read_from_two_threads() -> None:
    with FakeTensorMode():
        x = torch.arange(1000)
        for _ in range(40):
            x = x + 1
    values = together(*([x.tolist] * 4))
    assert all(value == list(range(40, 1040)) for value in values)


def test_conversion_from_two_threads() -> None:
    mode = FakeTensorMode()
    reals = [torch.ones(n) for n in range(1, 100)]
    together(*([lambda: [mode.from_tensor(real).shape for real in reals]] * 3))
    assert mode.fake_tensor_converter.tensor_memo == {}


def test_backward_on_the_threads_of_autograd() -> None:
    """Fakes of devices that are not here run backward on the thread that calls."""
    with FakeTensorMode():
        x = torch.empty(3, 3, device="cuda", requires_grad=True)
        threads: list[int] = []
        y = x @ x
        y.register_hook(lambda grad: threads.append(threading.get_ident()))
        y.sum().backward()
    assert threads == [threading.get_ident()]


FIRST_USE = """
import sys, threading
import torch, understudy
sys.setswitchinterval(1e-6)
together, seen = threading.Barrier(8), []
def work():
    with understudy.FakeTensorMode(), torch.autocast("cuda", dtype=torch.bfloat16):
        together.wait()
        x = torch.empty(4, 4, device="cuda")
        seen.append(str((x @ x).dtype))
threads = [threading.Thread(target=work) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(sorted(set(seen)), len(seen))
"""


def test_the_first_use_of_a_device_by_several_threads() -> None:
    """Its autocast kernels are there before any thread can make a tensor on it."""
    shown = subprocess.run([sys.executable, "-c", FIRST_USE], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "['torch.bfloat16'] 8"
