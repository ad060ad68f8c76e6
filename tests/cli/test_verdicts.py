"""Verdicts rest on something: steps or computations on the card, batches as large as asked for; and say on what."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from understudy.cli import main
from understudy.simulation.pinned_torch import PinnedRelease, find_older_release


@pytest.fixture
def rehearse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a text as a script: the exit code, what was printed, and the JSON."""
    monkeypatch.chdir(tmp_path)

    def run(text: str, *options: str) -> tuple[int, list[str], Any]:
        Path("train.py").write_text(f"import torch\n{text}")
        code = main(["run", "--device", "h100", "--json", "out.json", *options, "train.py"])
        return code, capsys.readouterr().out.splitlines(), json.loads(Path("out.json").read_text())

    return run


def find_basis(lines: list[str]) -> str:
    (line,) = (line for line in lines if line.startswith("rests on: "))
    return line


MODEL = "model = torch.nn.Linear(64, 64).cuda()\n"
OPTIMIZER = "optimizer = torch.optim.Adam(model.parameters())\n"
INITIALISED = "torch.nn.init.trunc_normal_(model.weight)\n"

NOTHING = {
    "nothing": ("x = 1", "nothing ran on it"),
    "on the CPU": ("torch.ones(3).sum()", "nothing ran on it"),
    "trains on the CPU": (
        "model = torch.nn.Linear(4, 4)\noptimizer = torch.optim.SGD(model.parameters())\n"
        "for _ in range(9):\n    model(torch.ones(4)).sum().backward()\n    optimizer.step()",
        "nothing ran on it; the first steps were on the CPU, and the run ended after 2 (--steps)",
    ),
    "a model that is not called": (MODEL, "no computation on it, only initialised memory"),
    "ends before it trains": (
        MODEL + INITIALISED + OPTIMIZER + "raise SystemExit(0)",
        "no computation on it, only initialised memory; Adam took no step",
    ),
}


@pytest.mark.parametrize("name", NOTHING)
def test_no_verdict_on_nothing(rehearse: Any, name: str) -> None:
    text, reason = NOTHING[name]
    code, lines, found = rehearse(text, "--budget", "40GiB")
    assert code == 4
    assert lines == [
        f"no verdict on H100{' with a budget of 40.00 GiB' if 'initialised' in reason else ''}: {reason}"
    ]
    assert found["verdict"] == "no verdict"


def test_a_launcher_has_no_verdict(tmp_path: Path) -> None:
    (tmp_path / "launch.py").write_text(
        "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'print(1)'])\n"
    )
    words = [sys.executable, "-m", "understudy", "run", "--device", "h100", "launch.py"]
    ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 4
    assert ended.stdout.splitlines()[-1].startswith(
        "no verdict on H100: nothing ran on it; the script started other programs, which are not measured: "
    )


def test_a_launcher_of_one_process_sets_its_variables(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, torch\n" + MODEL + "print(os.environ['LOCAL_RANK'], os.environ['WORLD_SIZE'])\n"
        "torch.distributed.init_process_group('nccl')\n"
        "model = torch.nn.parallel.DistributedDataParallel(model)\n"
        "model(torch.ones(7, 64, device='cuda')).sum().backward()\n"
    )
    words = [
        sys.executable,
        "-m",
        "understudy",
        "torchrun",
        "--nproc-per-node",
        "1",
        "--device",
        "h100",
        "train.py",
    ]
    ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("0 1\nfits on H100: ")


def test_a_script_that_only_runs_a_model_forward(rehearse: Any) -> None:
    code, lines, found = rehearse(MODEL + "model(torch.ones(7, 64, device='cuda'))")
    assert code == 0 and lines[0].startswith("fits on H100: ")
    assert find_basis(lines).startswith(
        "rests on: no optimizer step, forward only; inputs of the model: f32[7, 64]; rows from"
    )
    assert found["sanity"]["inputs"] == ["f32[7, 64]"] and found["sanity"]["steps"] == 0


LOOP = """
for batch in torch.utils.data.DataLoader([torch.ones(64)] * 5, batch_size={size}):
    for _ in range(3):
        model(batch.cuda()).sum().backward()
        optimizer.step()
"""


def test_training_and_its_basis(rehearse: Any) -> None:
    code, lines, found = rehearse(MODEL + OPTIMIZER + LOOP.format(size=5))
    assert code == 0
    assert find_basis(lines).startswith(
        "rests on: 2 optimizer steps; inputs of the model: f32[5, 64]; rows from the program; optimizer"
    )
    sanity = found["sanity"]
    assert sanity["optimizers"] == ["Adam"] and sanity["warnings"] == []
    assert sanity["optimizer_state_bytes"] == 2 * 4 * 64 * 65
    assert sanity["least_bytes"] == 4 * 4 * 64 * 65 <= found["peak"]["allocated_bytes"]


def test_figures_that_contradict_each_other_are_no_verdict(
    rehearse: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "understudy.simulation.steps.least_bytes", lambda optimizers: {torch.device("cuda", 0): 1 << 30}
    )
    code, lines, found = rehearse(MODEL + OPTIMIZER + LOOP.format(size=5))
    assert code == 4 and found["verdict"] == "no verdict"
    assert lines[0].startswith(
        "no verdict on H100: parameters, gradients and optimizer state alone are 1,073,741,824 bytes, the measured peak is "
    )


def test_optimizers_of_a_function_that_has_ended_are_named(rehearse: Any) -> None:
    body = (MODEL + OPTIMIZER + LOOP.format(size=5)).replace("\n", "\n    ")
    code, lines, found = rehearse(f"def main():\n    {body}\nmain()\n")
    assert code == 0 and found["sanity"]["optimizers"] == ["Adam"]
    assert find_basis(lines).startswith("rests on: 2 optimizer steps; ")


def test_batches_that_are_smaller_than_asked_for(rehearse: Any) -> None:
    _, lines, found = rehearse(MODEL + OPTIMIZER + LOOP.format(size=8))
    warning = "a data loader returned at most 5 rows per batch, less than its batch_size 8: too few rows"
    assert found["sanity"]["warnings"] == [warning]
    assert f"warning: {warning}" in lines


def test_compiled_programs_have_a_wider_margin(rehearse: Any) -> None:
    text = MODEL + OPTIMIZER + LOOP.format(size=5)
    _, _, plain = rehearse(text)
    _, _, compiled = rehearse(text.replace(OPTIMIZER, OPTIMIZER + "model = torch.compile(model)\n"))
    _, _, own = rehearse(
        text.replace(OPTIMIZER, OPTIMIZER + "model = torch.compile(model)\n"), "--margin", "0.01"
    )
    assert (plain["margin"], compiled["margin"], own["margin"]) == (0.02, 0.15, 0.01)
    for found in (compiled, own):
        assert any(note.startswith("torch.compile: rehearsed as eager") for note in found["assumptions"])


def test_an_older_torch_widens_the_margin(rehearse: Any) -> None:
    Path("requirements.txt").write_text("numpy\ntorch==2.6.0\n")
    _, _, found = rehearse(MODEL + OPTIMIZER + LOOP.format(size=5))
    assert found["margin"] == 0.16
    (note,) = (note for note in found["assumptions"] if "requirements.txt" in note)
    assert note.startswith("requirements.txt pins torch==2.6.0, the rehearsal used torch 2.")
    assert main(["run", "--quiet", "--device", "h100", "--json", "module.json", "-m", "train"]) == 0
    assert json.loads(Path("module.json").read_text())["margin"] == 0.16


PINS = {
    "torch==2.6.0": "==2.6.0",
    "torch<2.7": "<2.7",
    "torch>=2.1,<2.4": "<2.4",
    "torch ~= 2.5.1": "~=2.5.1",
    "torch~=2.5": None,
    "torch>=2.1": None,
    "torch==2.13.0": None,
    "torch<3": None,
    "torchvision==0.20.0": None,
    "pytorch-lightning==2.1.0": None,
    "# torch==2.6.0": None,
    "torch": None,
    "torch==2.6.0+cu124 ; python_version < '3.12'": "==2.6.0",
}


@pytest.mark.parametrize("line", PINS)
def test_limits_of_requirements(tmp_path: Path, line: str) -> None:
    (tmp_path / "requirements.txt").write_text(f"numpy==1.26.0\n{line}\n")
    found = find_older_release(str(tmp_path / "train.py"), "2.13.0+cpu")
    assert (found and found.text) == PINS[line]


def test_limits_of_other_files(tmp_path: Path) -> None:
    script = tmp_path / "scripts" / "train.py"
    script.parent.mkdir()
    lock = '[[package]]\nname = "torch"\nversion = "2.5.1"\n'
    texts = {
        "pyproject.toml": ('[project]\ndependencies = ["torch<2.5", "numpy"]\n', "<2.5"),
        "environment.yml": ("dependencies:\n  - pytorch=2.1.0\n", "=2.1.0"),
        "uv.lock": (lock, "==2.5.1"),
        "Pipfile.lock": ('{"default": {"torch": {"hashes": [], "version": "==2.4.0"}}}', "==2.4.0"),
    }
    for name, (text, wanted) in texts.items():
        (tmp_path / name).write_text(text)
        assert find_older_release(str(script), "2.13.0") == PinnedRelease(wanted, name)
        (tmp_path / name).unlink()


TOKENIZER = """
import transformers
transformers.BertConfig().save_pretrained("model")
tokenizer = transformers.AutoTokenizer.from_pretrained("model")
print(len(tokenizer("there was a small house by the sea " * 99, truncation=True, max_length=128)["input_ids"]))
"""


def test_a_tokenizer_without_words(rehearse: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """transformers makes one of config.json alone, by which every text is empty, or unknown."""
    pytest.importorskip("transformers")
    assert rehearse(TOKENIZER)[0] == 1
    code, lines, found = rehearse(
        TOKENIZER + MODEL + "model(torch.ones(7, 64, device='cuda'))", "--offline-data"
    )
    assert code == 0 and lines[0] == "128"
    assert found["sanity"]["made_up"] == ["model"]


FLEX = """
from torch.nn.attention.flex_attention import flex_attention
attention = {attention}
query = torch.zeros(2, 8, 1024, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
key, value = (torch.zeros(2, 2, 1024, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
attention(query, key, value, enable_gqa=True).sum().backward()
assert query.grad.shape == query.shape and key.grad.shape == key.shape
"""


def test_compiled_flex_attention_is_one_kernel(rehearse: Any) -> None:
    """Scores are not in memory; where the program is not compiled they are, and torch says so."""
    query, key, rows = 2 * 2 * 8 * 1024 * 64, 2 * 2 * 2 * 1024 * 64, 2 * 8 * 1024
    code, lines, found = rehearse(FLEX.format(attention="torch.compile(flex_attention)"))
    assert code == 0 and lines[0].startswith("fits on H100: ")
    operands, kept = query + 2 * key, query + 4 * rows  # and result, and sums
    in_backward = operands + 4 * rows  # gradients, and the sums of gradient times result
    total = operands + kept + in_backward + 2 * 512  # the sum and its gradient, which is expanded
    assert found["peak"]["allocated_bytes"] == total
    scores = 2 * 8 * 1024 * 1024
    assert found["macs"] == scores * 2 * 64 + scores * 5 * 64
    _, _, plain = rehearse(FLEX.format(attention="flex_attention"))
    assert plain["peak"]["allocated_bytes"] > 2 * scores * 4
    assert plain["margin"] == 0.02
