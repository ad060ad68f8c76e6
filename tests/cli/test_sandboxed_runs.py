"""`understudy run` as a command: the script is in a sandbox, the report and its files are written outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.simulation.test_sandbox import describe

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="namespaces and Landlock are of Linux")


def run(folder: Path, *words: str, prelude: str = "", **options: Any) -> subprocess.CompletedProcess[str]:
    code = f"{prelude}\nimport sys\nfrom understudy.cli import main\nsys.exit(main({['run', *words]!r}))"
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, **options)


def read(file: Path) -> Any:
    return json.loads(file.read_text())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inside = tmp_path / "project"
    inside.mkdir()
    (inside / "checkpoint.pt").write_bytes(b"weights")
    return inside


WRITERS = """
import os, subprocess, sys, threading, time, numpy, torch, safetensors.torch, tokenizers, pyarrow
x = torch.nn.Parameter(torch.ones(64, 64))
optimizer = torch.optim.SGD([x])
torch.save({"x": x}, "checkpoint.pt")
assert torch.load("checkpoint.pt")["x"].shape == (64, 64)
torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), "scripted.pt")
with torch.package.PackageExporter("package.pt") as exporter:
    exporter.save_text("a", "b", "text")
torch.from_file("shared.bin", shared=True, size=16)
safetensors.torch.save_file({"x": torch.ones(2)}, "x.safetensors")
tokenizers.Tokenizer(tokenizers.models.BPE()).save("tokenizer.json")
with pyarrow.OSFile("arrow.bin", "wb") as file:
    file.write(b"x")
numpy.memmap("map.bin", mode="w+", shape=(4,), dtype="i4")[0] = 1
assert sorted(os.listdir(".")) == ["arrow.bin", "checkpoint.pt", "map.bin", "package.pt", "scripted.pt", "shared.bin",
    "tokenizer.json", "train.py", "x.safetensors"], os.listdir(".")
assert int(subprocess.run("cat checkpoint.pt | wc -c", shell=True, capture_output=True).stdout) > 7
def save_late():
    time.sleep(1)
    torch.save({}, "late.pt")
threading.Thread(target=save_late, daemon=True).start()
for _ in range(3):
    x.sum().backward()
    optimizer.step()
"""


def test_writers_of_every_language(folder: Path, tmp_path: Path) -> None:
    (folder / "train.py").write_text(WRITERS)
    before = describe(folder)
    result = tmp_path / "out.json"
    said = run(folder, "--json", str(result), "train.py")
    assert said.returncode == 0, said.stderr
    time.sleep(1)
    assert describe(folder) == before
    found = read(result)
    assert found["isolation"] == {"level": "namespaces", "reason": ""}
    written = {os.path.basename(entry["target"]): entry for entry in found["writes"]}
    assert {"checkpoint.pt", "shared.bin", "tokenizer.json", "package.pt", "map.bin"} <= written.keys()
    assert written["checkpoint.pt"]["line"].startswith("train.py:5: ")
    assert "Kept from the disk and the network" in said.stdout


FORKS = """
import multiprocessing, os, sys, torch
torch.ones(3).sum()
if os.fork() == 0:
    print("child", flush=True)
    sys.exit(3)
print("code", os.waitstatus_to_exitcode(os.wait()[1]))
if os.fork() == 0:
    raise ValueError("of the child")
print("code", os.waitstatus_to_exitcode(os.wait()[1]))
for method in ("spawn", "forkserver", "fork"):
    process = multiprocessing.get_context(method).Process(target=os.mkdir, args=(method,))
    process.start()
    process.join()
    print(method, process.exitcode, os.path.isdir(method))
"""


def test_processes_of_the_script_have_no_report(folder: Path) -> None:
    (folder / "forks.py").write_text(f"if __name__ == '__main__':\n{FORKS}".replace("\n", "\n    "))
    said = run(folder, "forks.py")
    assert said.returncode == 0, said.stderr
    lines = said.stdout.splitlines()
    assert lines[:6] == ["child", "code 3", "code 1", "spawn 0 True", "forkserver 0 True", "fork 0 True"]
    assert said.stdout.count("fits on") == 1
    assert said.stderr.count("ValueError: of the child") == 1
    assert sorted(os.listdir(folder)) == ["checkpoint.pt", "forks.py"]


TRAINING = """
import torch
x = torch.nn.Parameter(torch.ones(64, 64))
optimizer = torch.optim.SGD([x])
for _ in range(3):
    x.sum().backward()
    optimizer.step()
    print("step")
"""


def test_files_that_cannot_be_written_lose_no_verdict(folder: Path) -> None:
    (folder / "train.py").write_text(TRAINING)
    said = run(
        folder, "--quiet", "--json", "/dev/full", "--html", "/dev/full", "--folded", "folded", "train.py"
    )
    assert said.returncode == 0
    assert said.stdout.startswith("fits on this machine's CPU: ")
    names = ("json", "html")
    assert said.stderr.splitlines() == [
        f"understudy run: --{name} '/dev/full' was not written: No space left on device" for name in names
    ]
    assert (folder / "folded").exists()


def test_json_on_standard_output(folder: Path) -> None:
    (folder / "train.py").write_text(TRAINING)
    said = run(folder, "--json", "-", "train.py")
    assert json.loads(said.stdout)["verdict"] == "fits"
    assert said.stderr.startswith("step\n") and "fits on this machine's CPU" in said.stderr


REFUSED = """
from understudy.simulation.sandbox import namespaces
def refuse(is_online):
    raise OSError(1, "unshare: Operation not permitted")
namespaces.enter_namespaces = refuse
"""
NO_LANDLOCK = """
from understudy.simulation.sandbox import landlock
landlock.find_version = lambda: 0
"""


def test_without_namespaces(folder: Path) -> None:
    (folder / "train.py").write_text(
        f"{TRAINING}\n".replace(
            "import torch\n",
            "import os, torch, ctypes\ntorch.save({}, 'checkpoint.pt')\n"
            "print('unlinked' if ctypes.CDLL(None).unlink(b'checkpoint.pt') == 0 else 'refused')\n",
        )
    )
    said = run(folder, "--json", "out.json", "train.py", prelude=REFUSED)
    assert said.returncode == 0, said.stderr
    assert said.stdout.splitlines()[0] == "refused"
    assert (folder / "checkpoint.pt").read_bytes() == b"weights"
    found = read(folder / "out.json")
    reason = "no namespaces: unshare: Operation not permitted"
    assert found["isolation"] == {"level": "landlock", "reason": reason}
    assert any(note.startswith("files: Landlock refuses writes") for note in found["assumptions"])
    assert [entry["target"] for entry in found["writes"]] == [str(folder / "checkpoint.pt")]

    (folder / "train.py").write_text(f"import torch\ntorch.save({{}}, 'checkpoint.pt')\n{TRAINING}")
    said = run(folder, "--json", "out.json", "train.py", prelude=REFUSED + NO_LANDLOCK)
    assert said.returncode == 0, said.stderr
    assert (folder / "checkpoint.pt").read_bytes() == b"weights"
    isolation = read(folder / "out.json")["isolation"]
    assert isolation["level"] == "python" and "needs Landlock version 3" in isolation["reason"]
    assert "files: protected by Python patches only" in said.stdout


def test_an_interrupt_gives_one_report(folder: Path) -> None:
    (folder / "train.py").write_text("import time, torch\nprint('ready', flush=True)\ntime.sleep(60)\n")
    words = [sys.executable, "-m", "understudy", "run", "train.py"]
    process = subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.startswith("no verdict on this machine's CPU: the script was interrupted")


def test_a_killed_script(folder: Path) -> None:
    (folder / "train.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    said = run(folder, "train.py")
    assert (said.returncode, said.stdout) == (137, "")
    assert said.stderr == "understudy run: the script was killed by signal 9: no report\n"


def test_write_switches_it_off(folder: Path) -> None:
    (folder / "train.py").write_text(f"open('made', 'w').write('x')\n{TRAINING}")
    assert run(folder, "--write", "--json", "out.json", "train.py").returncode == 0
    assert (folder / "made").read_text() == "x"
    assert read(folder / "out.json")["isolation"]["level"] == "off"
