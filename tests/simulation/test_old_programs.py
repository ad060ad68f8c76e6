"""Programs for old releases of torch: default tensor types, storages, daemon threads, devices of other makers."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

import understudy
from understudy.cli import main
from understudy.simulation.catalogue import find_card
from understudy.simulation.machine import InvalidDeviceError


def test_default_tensor_types_on_cards() -> None:
    with understudy.simulate("t4"):
        try:
            torch.set_default_tensor_type("torch.cuda.HalfTensor")
            assert torch.ones(3).device == torch.device("cuda", 0) and torch.ones(3).dtype is torch.float16
            assert torch.nn.Linear(2, 2).weight.is_cuda
        finally:
            torch.set_default_tensor_type("torch.FloatTensor")
        assert torch.ones(3).device.type == "cpu" and torch.ones(3).dtype is torch.float32


def test_a_tensor_of_a_storage() -> None:
    with understudy.simulate("t4"):
        batch = torch.ones(6)
        assert batch.new(batch.untyped_storage()).shape == (6,)
        assert batch.new(batch.untyped_storage()).resize_(2, 3).shape == (2, 3)


def test_devices_that_the_machine_does_not_have() -> None:
    with understudy.simulate("t4"):
        with pytest.raises(InvalidDeviceError) as raised:
            torch.ones(3, device="mps")
        assert (
            "expected a device of the simulated machine (cpu, cuda), got mps:0: it has none of type mps"
            in str(raised.value)
        )


DAEMON = """import queue, threading, torch
batches, ready = queue.Queue(), queue.Queue()
def move():
    while True:
        ready.put(batches.get().cuda())
        if ready.qsize() == 2:
            break
thread = threading.Thread(target=move, daemon=True)
thread.start()
model = torch.nn.Linear(4, 4).cuda()
for _ in range(2):
    batches.put(torch.ones(8, 4))
thread.join()
model(ready.get()).sum().backward()
print("moved")
"""


def test_daemon_threads_of_a_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(DAEMON)
    assert main(["run", "--device", "t4", "train.py"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("moved\n")
    assert "rests on: 1 backward pass without an optimizer of torch.optim" in said
    assert threading.active_count() < 20


NVIDIA_SMI = """import os, shutil, subprocess, torch
model = torch.nn.Linear(4, 4).cuda()
print(subprocess.check_output(["nvidia-smi", "--query-gpu=index,name,memory.total", "--format=csv,noheader,nounits"], text=True))
print(os.popen("nvidia-smi --query-gpu=memory.total,serial --format=csv | tail -1").read())
print(subprocess.run("nvidia-smi -L | wc -l", shell=True, capture_output=True, text=True).stdout)
print("Tesla" in subprocess.getoutput("nvidia-smi"), shutil.which("nvidia-smi") is not None)
print(os.popen("echo not nvidia-smi").read())
model(torch.ones(8, 4).cuda()).sum().backward()
"""


def test_nvidia_smi_is_answered_for_the_simulated_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(NVIDIA_SMI)
    assert main(["run", "--device", "2xt4", "train.py"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    card = find_card("t4")
    memory = card.memory // 2**20
    assert lines[:6] == [
        f"0, {card.name}, {memory}",
        f"1, {card.name}, {memory}",
        f"{memory} MiB, [N/A]",
        "2",
        f"{'Tesla' in card.name} True",
        "not nvidia-smi",
    ]
