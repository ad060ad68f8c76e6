"""Each output of a rehearsal says the numbers of the text: the page in a browser, files by their readers.

The scripts are the example and three models of transformers; sizes are small, the way is the whole one: the command line.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.report.samples import make_rehearsal
from tests.report.test_page import drive, in_browser
from understudy.cli import main
from understudy.report.text import write_text
from understudy.simulation.snapshots import read_snapshot

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_gpt.py"
GPT = (
    "--layers",
    "2",
    "--width",
    "64",
    "--heads",
    "2",
    "--length",
    "64",
    "--batch",
    "2",
    "--vocabulary",
    "512",
    "--amp",
)

STEP = """
model = model.cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    ids = torch.randint(0, 512, (2, 32), device="cuda")
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
MODELS = {
    "llama": "LlamaForCausalLM(transformers.LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=128, "
    "num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2))",
    "bert": "BertForMaskedLM(transformers.BertConfig(vocab_size=512, hidden_size=64, intermediate_size=128, "
    "num_hidden_layers=2, num_attention_heads=4))",
    "t5": "T5ForConditionalGeneration(transformers.T5Config(vocab_size=512, d_model=64, d_kv=16, d_ff=128, num_layers=2, "
    "num_heads=4, decoder_start_token_id=0))",
}


@pytest.fixture(params=["example", *MODELS])
def rehearsed(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with all outputs of one run."""
    monkeypatch.chdir(tmp_path)
    script = [str(EXAMPLE), *GPT]
    if request.param != "example":
        pytest.importorskip("transformers")
        Path("train.py").write_text(
            f"import torch\nimport transformers\n\nmodel = transformers.{MODELS[request.param]}{STEP}"
        )
        script = ["train.py"]
    files = [
        "--json",
        "run.json",
        "--html",
        "run.html",
        "--trace",
        "run.json.gz",
        "--speedscope",
        "peak.json",
    ]
    files += ["--folded", "peak.folded", "--snapshot", "run.pickle"]
    assert main(["run", "--device", "4090", *files, *script]) == 0
    return tmp_path


def test_all_outputs_say_the_same(rehearsed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record: dict[str, Any] = json.loads((rehearsed / "run.json").read_text())
    allocated, headline = sum(record["categories"].values()), record["headline"]
    # Categories are what was asked for; the allocator's blocks are a little larger.
    assert allocated == record["peak"]["requested_bytes"]
    assert 0 <= record["peak"]["allocated_bytes"] - allocated <= 512 * 2000
    events = json.loads(gzip.decompress((rehearsed / "run.json.gz").read_bytes()))["traceEvents"]
    assert max(sum(event["args"].values()) for event in events if event["ph"] == "C") == allocated
    for profile in json.loads((rehearsed / "peak.json").read_text())["profiles"]:
        assert sum(profile["weights"]) == allocated
    folded = (rehearsed / "peak.folded").read_text().splitlines()
    assert sum(int(line.rpartition(" ")[2]) for line in folded) == allocated
    trace = read_snapshot(rehearsed / "run.pickle").choose_device()
    assert trace.moment(trace.peak).requested == allocated
    assert main(["report", "run.json"]) == 0
    assert headline in capsys.readouterr().out


def test_torch_reads_the_snapshot(rehearsed: Path) -> None:
    """By the module that torch's documentation names for it."""
    code = (
        "import pickle, torch.cuda._memory_viz as viz; data = pickle.load(open('run.pickle', 'rb')); "
        "print(viz.segsum(data)); page = viz.trace_plot(data); assert len(page) > 1000; print(viz.trace(data)[:2000])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=rehearsed)
    assert said.returncode == 0, said.stderr[-2000:]
    assert "total_reserved" in said.stdout


SEEN = """
  seen.ready = document.documentElement.dataset.ready; seen.headline = document.getElementById('headline').textContent;
  seen.milliseconds = performance.now();
  seen.peak = document.getElementById('alive').textContent;
"""


@in_browser
def test_the_page_says_the_same(rehearsed: Path) -> None:
    record = json.loads((rehearsed / "run.json").read_text())
    seen = drive((rehearsed / "run.html").read_text(), SEEN, rehearsed)
    assert seen["ready"] == "1"
    assert seen["headline"] == record["headline"]
    assert f"{sum(record['categories'].values()) / (1 << 20):.2f} MiB" in str(seen["peak"])


# a pull request that adds 3 GiB

BEFORE = """import torch

model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1024)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
kept = []
for step in range(4):
    x = torch.randn(8, 4096, 1024, device="cuda")
    y = model(x)
    loss = y.square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
AFTER = BEFORE.replace(
    "    y = model(x)\n",
    "    y = model(x)\n    kept.append(torch.zeros(3 * 2**28, device='cuda').requires_grad_())\n",
).replace("range(4)", "range(1)")


def test_a_pull_request_that_adds_3_gib_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the commands of the example workflow, with the line that did it."""
    workflow = (EXAMPLE.parent / "memory-check.yml").read_text()
    commands = [
        line.partition("run: ")[2] or line.strip() for line in workflow.splitlines() if "understudy " in line
    ]
    before, after, diff = (
        command.split(" || ")[0].split(" >>")[0].split()[1:] for command in commands if "pip" not in command
    )
    monkeypatch.chdir(tmp_path)

    def run(words: list[str], text: str = "") -> int:
        if text:
            Path("train.py").write_text(text)
        return main([word.replace("/tmp/", f"{tmp_path}/") for word in words])

    assert run(before, BEFORE) == 0
    assert run(after, AFTER) == 0
    capsys.readouterr()
    assert run(diff) == 3
    said = capsys.readouterr().out
    row = next(line for line in said.splitlines() if "train.py:9" in line)
    assert "+3.00 GiB" in row and "kept.append" in row
    assert run(before, BEFORE) == 0 and run([*after[:-1], "train.py"], BEFORE) == 0
    assert run(diff) == 0


def test_a_name_of_several_lines_is_one_row() -> None:
    """A module may have any name: `add_module("a\\nb", …)`."""
    rehearsal = make_rehearsal(name="a\nb.py")
    text = write_text(rehearsal)
    assert "a\\nb.py" in text
    assert not any(line.startswith("b.py") for line in text.splitlines())
