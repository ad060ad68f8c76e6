"""The time of a step of all ranks: options of the command line, and what is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from understudy.cli import main
from understudy.report.cluster_rehearsal import ClusterRehearsal

UNEVEN = """
import os, torch, torch.nn as nn, torch.distributed as dist
dist.init_process_group("nccl"); rank = int(os.environ["RANK"]); torch.cuda.set_device(rank)
model = nn.Linear(2048, 2048).cuda().bfloat16(); optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    x = torch.randn(8192, 2048, device="cuda", dtype=torch.bfloat16)
    for _ in range(4 if rank else 1):
        x = model(x)
    x.sum().backward(); dist.all_reduce(model.weight.grad); optimizer.step(); optimizer.zero_grad()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "uneven.py").write_text(UNEVEN)
    return tmp_path


def test_all_ranks_wait_for_the_slowest(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "--device", "2xh100", "--nproc-per-node", "2", "--json", "run.json"]
    limits = ["--max-step-time", "1us", "--total-steps", "3600000", "--cost", "2/h"]
    assert main([*words, *limits, "uneven.py"]) == 3
    shown = capsys.readouterr()
    assert "(all ranks together)" in shown.out and "3,600,000 steps" in shown.out
    assert "a step takes longer than 1e-06 s" in shown.err
    cluster = ClusterRehearsal.from_json(json.dumps(json.loads(Path("run.json").read_text())))
    time, own = cluster.time, [row.rehearsal.time for row in cluster.rows if row.rehearsal is not None]
    assert time is not None and own[0] is not None and own[1] is not None
    assert own[0].seconds_per_step < 0.7 * own[1].seconds_per_step
    assert time.seconds_per_step == pytest.approx(own[1].seconds_per_step, rel=0.02)
    assert time.low_seconds < time.seconds_per_step < time.high_seconds
    assert time.cost is not None and time.cost.cards == 2
    assert time.cost.money == pytest.approx(2 * 2 * 1000 * time.seconds_per_step)


def test_a_card_of_a_file_of_your_own(folder: Path) -> None:
    Path("cards.toml").write_text(
        '[mine]\nmemory = 40\ncontext = 0.5\nkind = "cuda"\ncapability = "9.0"\nmultiprocessors = 132\n'
        'threads_per_multiprocessor = 2048\nbandwidth = 3000\ninterconnect = { name = "NVLink 4", bandwidth = 900 }\n'
        "teraflops = { float32 = 67, float16 = 989, bfloat16 = 989 }\n"
    )
    words = ["run", "--quiet", "--cards", "cards.toml", "--device", "mine", "--nproc-per-node", "2"]
    assert main([*words, "--json", "run.json", "uneven.py"]) == 0
    cluster = ClusterRehearsal.from_json(Path("run.json").read_text())
    assert cluster.device.key == "mine" and cluster.time is not None
