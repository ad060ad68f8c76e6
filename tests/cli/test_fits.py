"""`understudy fit`: the largest size, by rehearsals that really run, and the formula of the peak."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import pytest

from tests.cli.test_fixes import GiB, answer, rehearsal_of, script
from understudy.cli import main
from understudy.cli.fits import find_formula
from understudy.cli.rehearsals import Outcome, Variant, rehearse_variant

__all__ = ["script"]

NET = """import torch

BATCH = 8
model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 512)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(10):
    x = torch.randn(BATCH, 1024, 512, device="cuda")
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

TRAINER = """import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments



class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        return {"input_ids": torch.arange(64), "labels": torch.arange(64)}


model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=64, n_head=2, vocab_size=1024, n_positions=64))
arguments = TrainingArguments("out", per_device_train_batch_size=8, report_to=[])
Trainer(model=model, args=arguments, train_dataset=Texts()).train()
"""


def test_the_largest_fits_and_the_next_does_not(
    on_small_card: Callable[[str, str, float], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    words = on_small_card("net.py", NET, 1.0)
    assert main(["fit", *words, "--workers", "1", "--vary", "batch=1..60", "net.py"]) == 0
    out = capsys.readouterr().out
    largest = int(out.split("batch = ")[1].split()[0])
    assert out.startswith(f"batch = {largest} fits, {largest + 1} does not: ")
    assert "net.py:8" in out and "understudy-" not in out
    assert "Requested at the peak: " in out
    # In the backward pass of the ReLU, 1024 positions of: x (512 numbers), the ReLU's result, its gradient, and the gradient
    # of what went into it (2048 each).
    assert " + 26.00 MiB x batch\n" in out
    assert "; exact in " in out
    for size, verdicts in ((largest, ("fits", "tight")), (largest + 1, ("does not fit",))):
        Path("net.py").write_text(NET.replace("BATCH = 8", f"BATCH = {size}"))
        code = main(["run", "--quiet", *words, "--json", "out.json", "net.py"])
        assert json.loads(Path("out.json").read_text())["verdict"] in verdicts
        assert code == (0 if "fits" in verdicts else 3)


def test_the_batch_of_a_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TRAINER)
    Path("cards.toml").write_text("[small]\nmemory = 0.25\ncontext = 0.0\n")
    words = ["--cards", "cards.toml", "--device", "small", "--workers", "1", "--json"]
    assert main(["fit", *words, "--vary", "batch=167..170", "train.py"]) == 0
    record = json.loads(capsys.readouterr().out)
    largest, sizes = record["largest"], record["sizes"]
    assert 167 <= largest < 170
    assert sizes[str(largest)]["verdict"] in ("fits", "tight")
    assert sizes[str(largest + 1)]["verdict"] == "does not fit"
    assert record["formula"] is None
    assert Path("train.py").read_text() == TRAINER


def test_requests_are_those_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET)
    outcome = rehearse_variant(Variant(str(tmp_path / "net.py"), keeps_requests=True), "t4")
    assert outcome.rehearsal is not None
    assert max(accumulate(outcome.requests)) == pytest.approx(
        outcome.rehearsal.peak.requested_bytes, rel=1e-3
    )


def test_a_formula_is_the_largest_of_the_moments() -> None:
    """Two moments: 1000 + 10 n, and n squared."""

    def outcome(n: int) -> Outcome:
        return Outcome(None, requests=[1000, 10 * n, -1000, -10 * n, n * n, -n * n])

    formula = find_formula({n: outcome(n) for n in (1, 5, 20, 40, 60, 80, 100)})
    assert formula is not None
    assert formula.sizes == (1, 40, 100)
    assert formula.deviations == {5: 0.0, 20: 0.0, 60: 0.0, 80: 0.0}
    assert [formula.at(n) for n in (10, 36, 37, 38, 50)] == [1100, 1360, 1370, 1444, 2500]
    assert formula.format("n") == "the larger of 1000 B + 10 B x n and 1 B x n^2"


def test_no_formula_where_runs_differ() -> None:
    runs = {n: Outcome(None, requests=[n] * n) for n in range(1, 9)}
    assert find_formula(runs) is None
    assert find_formula({n: Outcome(None, requests=[n, -n]) for n in range(1, 6)}) is None


def test_fit_finds_the_largest(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def rule(variant: Variant, text: str) -> Outcome:
        batch = int(text.split("BATCH, LENGTH = ")[1].split(",")[0])
        return Outcome(rehearsal_of(2 * GiB + batch * GiB // 4, 10 * GiB))

    seen = answer(monkeypatch, rule)
    assert main(["fit", "--device", "h100", "--vary", "batch=1..512", script]) == 0
    out = capsys.readouterr().out
    assert out.startswith("batch = 32 fits, 33 does not: ")
    assert "No formula for the peak: the runs differ in more than the sizes" in out
    assert len(seen) < 20


def test_fit_of_an_argument(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(monkeypatch, lambda variant, text: Outcome(rehearsal_of(int(variant.arguments[1]) * GiB, 5 * GiB)))
    command = ["fit", "--device", "h100", "--json", "--vary", "n=1..100", script, "--n", "{n}"]
    assert main(command) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["largest"] == 5
    assert record["sizes"]["6"]["verdict"] == "does not fit"
    answer(monkeypatch, lambda variant, text: Outcome(rehearsal_of(6 * GiB, 5 * GiB)))
    assert main(command) == 3


SLOW_HOST = """import torch

BATCH = 8
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8))).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10):
    model(torch.randn(BATCH, 512, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_the_fastest_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Small batches wait for the host: twice the batch is nearly twice as fast."""
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(SLOW_HOST)
    words = ["fit", "--device", "h100", "--workers", "1", "--vary", "batch=1..64", "--for", "speed"]
    assert main([*words, "--json", "net.py"]) == 0
    found = json.loads(capsys.readouterr().out)
    rates = {int(size): row["per_second"] for size, row in found["sizes"].items()}
    assert found["fastest"] == found["largest"] == 64
    assert {1, 2, 4, 8, 16, 32, 64} <= set(rates)
    assert rates[2] > 1.8 * rates[1] and rates[64] == max(rates.values())
    assert main([*words, "net.py"]) == 0
    assert "Fastest: batch = 64: step " in capsys.readouterr().out
