"""Whatever asks for the memory of a stand-in gets an error, inside and outside of the mode: never garbage, never the end of
the process. Each attempt runs in a process of its own, since a failure would take the tests with it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from understudy import FakeTensorMode, MixedTensorsError, NoDataError
from understudy.fake.tensor import FakeTensor

ATTEMPTS = [
    "real.set_(fake); real.sum()",
    "real.set_(fake.untyped_storage()); real.sum()",
    "real.set_(fake.untyped_storage(), 0, (4, 4), (4, 1)); real.add_(1)",
    "real.set_(fake[3:].untyped_storage()); real.clone()",
    "torch.empty(0).set_(fake.storage()).sum().item()",
    "real.data = fake; real.sum()",
    "setattr(nn.Parameter(real), 'data', fake)",
    "torch.Tensor.data.__set__(real, fake); real.sum()",
    "torch.from_dlpack(fake)",
    "fake.__dlpack__()",
    "fake.numpy()",
    "numpy.asarray(fake)",
    "fake.data_ptr()",
    "fake.apply_(lambda number: number + 1)",
    "fake.map_(fake, lambda number, other: number)",
    "fake.untyped_storage().data_ptr()",
    "fake.untyped_storage().tolist()",
    "fake.untyped_storage()[0]",
    "fake.untyped_storage().share_memory_()",
    "fake.untyped_storage()._share_fd_cpu_()",
    "fake.untyped_storage()._share_filename_cpu_()",
    "fake.untyped_storage().cpu().tolist()",
    "fake.untyped_storage().byteswap(torch.float32)",
    "fake.storage().double()[0]",
    "pickle.dumps(fake.untyped_storage())",
    "torch.save(fake.untyped_storage(), io.BytesIO())",
    "ForkingPickler.dumps(fake.untyped_storage())",
    "real.untyped_storage().copy_(fake.untyped_storage())",
]
ONLY_INSIDE = ["torch.utils.dlpack.to_dlpack(fake)", "torch.to_dlpack(fake)"]

PROGRAM = """
import io, os, pickle, signal, sys, numpy, torch
from multiprocessing.reduction import ForkingPickler
from torch import nn
from understudy import FakeTensorMode
import torch.multiprocessing, contextlib

def attempt(text, device, is_inside):
    mode = FakeTensorMode()
    with mode:
        fake = torch.randn(1000, 50, device=device)
    real = torch.randn(4, 4)
    with mode if is_inside else contextlib.nullcontext():
        try:
            exec(text, {**globals(), "fake": fake, "real": real})
        except Exception:
            return 0
    return 1

for is_inside in (True, False):
    for device in ("cpu", "cuda"):
        for text in eval(sys.argv[1]) + (eval(sys.argv[2]) if is_inside else []):
            child = os.fork()
            if child == 0:
                os._exit(attempt(text, device, is_inside))
            ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if ended != 0:
                print(f"{'inside' if is_inside else 'outside'} {device}: {text}: {'no error' if ended == 1 else 'the process died'}")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="each attempt is a forked process")
def test_no_way_to_the_memory() -> None:
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        textwrap.dedent(PROGRAM),
        repr(ATTEMPTS),
        repr(ONLY_INSIDE),
    ]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src"), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    found = [line for line in ran.stdout.splitlines() if not line.startswith(ALLOWED)]
    assert found == []


def test_whether_a_storage_is_shared_outside_of_the_mode() -> None:
    """C++ ends the process over it."""
    with FakeTensorMode():
        fake = torch.randn(3)
    code = "import torch; from understudy import FakeTensorMode\nwith FakeTensorMode(): x = torch.randn(3)\n"
    code += "print(x.untyped_storage().is_shared(), x.storage().is_shared())"
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False
    )
    assert ran.stdout == "False False\n", ran.stderr
    assert not fake.untyped_storage().is_shared()


ALLOWED = ("inside cpu: real.untyped_storage().copy_", "inside cuda: real.untyped_storage().copy_")
"""Inside the mode it is an operator on stand-ins, and its size is checked first."""


@pytest.mark.parametrize("inference", [False, True])
def test_the_data_of_a_stand_in_outside_of_the_mode(inference: bool) -> None:
    with FakeTensorMode():
        fake, other = torch.zeros(2, 3), torch.zeros(4)
    real = torch.ones(2, 3)
    with torch.inference_mode(inference), pytest.raises(MixedTensorsError) as raised:
        real.data = fake
    assert "can't assign the data of a stand-in, f32[2, 3]@cpu, to a real tensor" in str(raised.value)
    assert "test_memory_that_is_not_there.py" in str(raised.value)
    assert real.sum() == 6
    real.data = torch.zeros(5)
    fake.data = other
    assert (real.shape, fake.shape) == ((5,), (4,))


AFTERWARDS: dict[str, Callable[[Any], Any]] = {
    "resize_": lambda x: x.resize_(100, 3),
    "resize_as_": lambda x: x.resize_as_(torch.zeros(7, 7)),
    "t_": lambda x: x.t_(),
    "set_": lambda x: torch.empty(0).set_(x.untyped_storage(), 1, (2,), (1,)),
    "view": lambda x: x.view(torch.int32),
    "slice": lambda x: x[1:],
    "data": lambda x: x.data,
    "detach": lambda x: x.detach(),
    "swap": lambda x: torch.utils.swap_tensors(x, torch.zeros(3)),
    "values": lambda x: x.tolist(),
}


@pytest.mark.parametrize("program", AFTERWARDS.values(), ids=AFTERWARDS)
def test_a_stand_in_whose_storage_was_handed_out(program: Callable[[Any], Any]) -> None:
    seen = []
    for is_handed_out in (False, True):
        with FakeTensorMode():
            x = torch.zeros(4, 3)
            if is_handed_out:
                x.untyped_storage()
            result = program(x)
            seen.append((str(result), str(x), x._version, type(x) is FakeTensor))
    assert seen[0] == seen[1]


def test_deterministic_algorithms_fill_no_memory() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with FakeTensorMode():
            x = torch.randn(4, 3)
            assert torch.add(x, 1, out=torch.empty(0)).shape == (4, 3)
            assert torch.sort(x, out=(torch.empty(0), torch.empty(0, dtype=torch.int64))).values.shape == (
                4,
                3,
            )
            assert torch.empty(0).resize_(5).shape == x.clone().resize_(5).shape == (5,)
        assert torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(False)


def test_storages_are_resized() -> None:
    with FakeTensorMode():
        x, known = torch.randn(8), torch.zeros(4)
        storage = x.untyped_storage()
        assert (storage.resize_(0).nbytes(), x.untyped_storage().nbytes()) == (0, 0)
        storage.resize_(64)
        whole = x.as_strided((16,), (1,))
        assert whole.untyped_storage()._cdata == storage._cdata and (whole + 1).shape == (16,)
        known.untyped_storage().resize_(0)
        known.untyped_storage().resize_(16)
        with pytest.raises(RuntimeError, match="has no data"):
            known.tolist()


def test_a_stand_in_set_on_real_memory_leaves_it_alone() -> None:
    real = torch.ones(4)
    with FakeTensorMode():
        fake = torch.empty(0).set_(real.untyped_storage())
        other = torch.empty(0).set_(real.untyped_storage())
        fake.untyped_storage()
        assert (
            fake.untyped_storage()._cdata == other.untyped_storage()._cdata != real.untyped_storage()._cdata
        )
    assert real.add_(1).sum() == 8


class Addresses(TorchFunctionMode):
    """Answers for pointers, as tests of kernels on machines without a card do."""

    def __init__(self, base: int) -> None:
        self.base = base

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.Tensor.data_ptr and self.base:
            return self.base + args[0].storage_offset() * args[0].element_size()
        return func(*args, **(kwargs or {}))


def test_a_function_mode_may_answer_for_pointers() -> None:
    with FakeTensorMode():
        rows = torch.ones(4, 4, device="cuda")[2:]
        with Addresses(4096):
            assert rows.data_ptr() == 4096 + 2 * 4 * 4
        with (
            Addresses(0),
            pytest.raises(NoDataError, match=r"Tensor.data_ptr\(\): f32\[2, 4\]\+8@cuda:0 is a stand-in"),
        ):
            rows.data_ptr()
