"""`understudy fix`: changes found in a source, rehearsals on executors, workers that are killed, the answers.

What a rehearsal itself says is tested elsewhere: here, most of them are answered by a function of the changed text.
"""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.report.samples import make_rehearsal
from understudy.cli import fits, fixes, main
from understudy.cli.changes import Change, apply_changes, find_changes, set_constant, write_patch
from understudy.cli.rehearsals import (
    Outcome,
    Progress,
    Variant,
    Workers,
    mirror,
    rehearse_all,
    rehearse_variant,
)
from understudy.report.rehearsal import Rehearsal

GiB = 1 << 30

SOURCE = '''"""A script."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

BATCH, LENGTH = 8, 128


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def train(model, optimizer, x, y):
    out = model(
        x
    )
    loss = F.cross_entropy(out, y, label_smoothing=0.1)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


model = Net().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(2):
    train(model, optimizer, torch.randn(BATCH, 64, device="cuda"), torch.zeros(BATCH, dtype=torch.int64, device="cuda"))
'''


def rehearsal_of(needed: int, limit: int, flops: int = 10) -> Rehearsal:
    result = make_rehearsal(verdict="fits" if needed <= limit else "does not fit")
    object.__setattr__(result.peak, "reserved_bytes", needed)
    object.__setattr__(result.peak, "allocated_bytes", needed)
    result.flops = flops
    return result


# changes


def test_changes_of_a_script() -> None:
    changes = {change.name: change for change in find_changes({"train.py": SOURCE})}
    assert list(changes) == [
        "expandable segments",
        "fused AdamW",
        "AdamW parameter by parameter",
        "gradients set to None",
        "activations in place",
        "checkpoint each block",
        "checkpoint the loss",
        "bf16 autocast",
        "batch 8 -> 4 (accumulate 2 to keep the effective batch)",
    ]
    assert changes["checkpoint each block"].line == "train.py:18"
    for change in changes.values():
        for text in apply_changes((change,), {"train.py": SOURCE}).values():
            assert text != SOURCE
            ast.parse(text)


def test_changes_together_are_one_patch() -> None:
    files = {"train.py": SOURCE}
    names = (
        "fused AdamW",
        "gradients set to None",
        "checkpoint each block",
        "checkpoint the loss",
        "bf16 autocast",
    )
    chosen = tuple(change for change in find_changes(files) if change.name in names)
    assert all(a.is_compatible(b) for a in chosen for b in chosen if a is not b)
    (text,) = apply_changes(chosen, files).values()
    ast.parse(text)
    assert text.count("import torch.utils.checkpoint\n") == 1
    assert "x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)" in text
    assert "checkpoint(F.cross_entropy, out, y, label_smoothing=0.1, use_reentrant=False)" in text
    assert (
        'with torch.autocast("cuda", dtype=torch.bfloat16):\n        out = model(\n            x\n        )'
        in text
    )
    assert "lr=1e-3, fused=True)" in text
    assert "set_to_none=True" in text
    patch = write_patch(chosen, files)
    assert patch.startswith("--- a/train.py\n+++ b/train.py\n")
    assert "+            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)" in patch


def test_two_changes_of_one_text_do_not_go_together() -> None:
    changes = {change.name: change for change in find_changes({"train.py": SOURCE})}
    assert not changes["fused AdamW"].is_compatible(changes["AdamW parameter by parameter"])
    expandable = changes["expandable segments"]
    assert not expandable.is_compatible(Change("other", "", 0, (), {"PYTORCH_CUDA_ALLOC_CONF": "x"}))
    assert write_patch((expandable,), {}) == "# run with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n"


def test_keywords_that_are_not_known_are_not_given_twice() -> None:
    """nanoGPT and torchtitan: the options say themselves whether the optimizer is fused."""
    files = {"t.py": "import torch\noptimizer = torch.optim.AdamW(groups, lr=1, **options)\n"}
    assert not [change.name for change in find_changes(files) if "AdamW" in change.name]


def test_blocks_get_what_the_one_before_gave() -> None:
    loop = "for block in blocks:\n    {}\n"
    for line, is_block in (("x = block(x)", True), ("x, c = block(x, c)", True), ("x += block(norm(x))", True),
                           ("scores[n] = block(targets)", False), ("outputs = block(model)", False)):  # fmt: skip
        names = [change.name for change in find_changes({"t.py": loop.format(line)})]
        assert ("checkpoint each block" in names) is is_block


def test_text_that_is_not_ascii_keeps_its_columns() -> None:
    files = {"t.py": 'import torch\nα = "äöü"; o = torch.optim.SGD(α, lr=1)\n'}
    change = next(change for change in find_changes(files) if change.name == "fused SGD")
    assert apply_changes((change,), files)["t.py"].endswith(
        'α = "äöü"; o = torch.optim.SGD(α, lr=1, fused=True)\n'
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("BATCH = 8\n", "BATCH = 3\n"),
        ("batch_size: int = 8\n", "batch_size: int = 3\n"),
        ("A, BATCH = 1, 8\n", "A, BATCH = 1, 3\n"),
        ("load(data, batch_size=8)\n", "load(data, batch_size=3)\n"),
        (
            "p.add_argument('--batch-size', type=int, default=8)\n",
            "p.add_argument('--batch-size', type=int, default=3)\n",
        ),
        (
            "TrainingArguments(per_device_train_batch_size=8)\n",
            "TrainingArguments(per_device_train_batch_size=3)\n",
        ),
        ("batches = 8\n", None),
        ("BATCH = True\n", None),
    ],
)
def test_numbers_by_name(text: str, expected: str | None) -> None:
    changed = set_constant({"a.py": text}, "batch", 3)
    assert (changed and changed["a.py"]) == expected


def test_switches_and_arguments_of_the_script() -> None:
    text = "p.add_argument('--checkpoint', action='store_true')\np.add_argument('--batch-size', type=int, default=8)\n"
    found = {change.name: change.arguments for change in find_changes({"t.py": text}, ("--batch-size", "32"))}
    assert found["its own --checkpoint"] == ("--checkpoint",)
    assert found["batch 32 -> 16 (accumulate 2 to keep the effective batch)"] == ("--batch-size", "16")
    assert len(found) == 3
    assert "its own --checkpoint" not in {
        change.name for change in find_changes({"t.py": text}, ("--checkpoint",))
    }
    changes = find_changes({"t.py": text}, ("--batch-size", "32"))
    assert write_patch((changes[1],), {}) == "# run with --checkpoint\n"


def test_a_mirror_has_links_and_other_texts(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "package" / "inner").mkdir(parents=True)
    (home / "train.py").write_text("1")
    (home / "data.txt").write_text("data")
    (home / "package" / "model.py").write_text("2")
    (home / "package" / "inner" / "deep.py").write_text("3")
    script = mirror(home / "train.py", {str(home / "package" / "model.py"): "changed"}, tmp_path / "mirror")
    assert script == tmp_path / "mirror" / "train.py"
    assert script.read_text() == "1"
    assert not script.is_symlink()
    assert (script.parent / "package" / "model.py").read_text() == "changed"
    assert (script.parent / "package" / "inner" / "deep.py").read_text() == "3"
    assert (script.parent / "data.txt").read_text() == "data"
    assert (home / "package" / "model.py").read_text() == "2"


# executors


def die_once(variant: Variant, device: str | None) -> Outcome:
    """The second variant's worker is killed the first time."""
    mark = Path(variant.environment["mark"])
    if variant.script == "1" and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return Outcome(None, f"{variant.script} on {device}")


def die(variant: Variant, device: str | None) -> Outcome:
    os.kill(os.getpid(), signal.SIGKILL)
    return Outcome(None)


def test_a_worker_that_is_killed_is_replaced(tmp_path: Path) -> None:
    variants = [Variant(str(i), environment={"mark": str(tmp_path / "mark")}) for i in range(5)]
    outcomes = dict(rehearse_all(variants, "h100", Workers(2), die_once))
    assert {number: outcome.error for number, outcome in outcomes.items()} == {
        i: f"{i} on h100" for i in range(5)
    }
    assert (tmp_path / "mark").exists()


def test_a_rehearsal_that_kills_every_worker_is_given_up() -> None:
    ((_, outcome),) = rehearse_all([Variant("x")], None, Workers(1), die)
    assert outcome.error == "its worker was killed 3 times"


def test_a_cluster_loses_nothing_with_a_worker(tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, silence_logs=50
    ) as cluster:
        variants = [Variant(str(i), environment={"mark": str(tmp_path / "mark")}) for i in range(6)]
        outcomes = dict(rehearse_all(variants, "t4", Workers(2, cluster.scheduler_address), die_once))
    assert sorted(outcomes) == list(range(6))
    assert (tmp_path / "mark").exists()


def test_a_variant_is_really_rehearsed(tmp_path: Path) -> None:
    (tmp_path / "sizes.py").write_text("BATCH = 4096\n")
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nfrom sizes import BATCH\nmodel = torch.nn.Linear(1024, 1024).cuda()\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "model(torch.randn(BATCH, 1024, device='cuda')).sum().backward()\noptimizer.step()\n"
    )
    files = fixes.read_sources(str(script))
    assert sorted(Path(name).name for name in files) == ["sizes.py", "train.py"]
    halved = Variant(str(script), files=set_constant(files, "batch", 1024) or {})
    broken = Variant(str(script), files={str(script): "raise ValueError('no')\n"})
    full, small, failed = (
        rehearse_variant(variant, "t4") for variant in (Variant(str(script)), halved, broken)
    )
    assert full.fits and small.fits
    assert full.reserved_bytes - small.reserved_bytes >= 2 * 3072 * 1024 * 4
    assert failed.rehearsal is None and "ValueError: no" in failed.error
    assert (tmp_path / "sizes.py").read_text() == "BATCH = 4096\n"


# commands


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SOURCE)
    return "train.py"


def answer(monkeypatch: pytest.MonkeyPatch, rule: object) -> list[Variant]:
    """Rehearsals are answered by a function of the variant's text."""
    seen: list[Variant] = []

    def rehearse(variants: list[Variant], device: str, workers: object) -> object:
        for number, variant in enumerate(variants):
            seen.append(variant)
            yield number, rule(variant, variant.files.get("train.py", SOURCE))  # type: ignore[operator]

    monkeypatch.setattr(fixes, "rehearse_all", rehearse)
    monkeypatch.setattr(fits, "rehearse_all", rehearse)
    return seen


def test_fix_finds_the_cheapest(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def rule(variant: Variant, text: str) -> Outcome:
        if "inplace" in text:
            return Outcome(None, "Traceback\nRuntimeError: modified in place")
        needed, flops = 30 * GiB, 100
        if "checkpoint(block" in text:
            needed, flops = needed - 9 * GiB, flops + 33
        if "bfloat16" in text:
            needed -= 12 * GiB
        if "fused" in text:
            needed -= 2 * GiB
        return Outcome(rehearsal_of(needed, 23 * GiB, flops))

    answer(monkeypatch, rule)
    assert main(["fix", "--device", "4090", script]) == 0
    out = capsys.readouterr().out
    rows = [line for line in out.splitlines() if "GiB" in line and "train.py:" in line]
    assert rows[0].startswith("checkpoint each block")
    assert "+33%" in rows[0] and "9.00 GiB" in rows[0]
    assert "not possible: activations in place (train.py:14): RuntimeError: modified in place" in out
    assert "The cheapest that fits: checkpoint each block" in out
    assert "+            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)" in out
    assert Path(script).read_text() == SOURCE


def test_fix_combines(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def rule(variant: Variant, text: str) -> Outcome:
        saved = 3 * ("checkpoint(block" in text) + 2 * ("checkpoint(F." in text) + ("fused" in text)
        return Outcome(rehearsal_of((28 - saved) * GiB, 22 * GiB))

    seen = answer(monkeypatch, rule)
    assert main(["fix", "--device", "4090", "--json", script, "--lr", "1"]) == 0
    record = json.loads(capsys.readouterr().out)
    fitting = [entry for entry in record["changes"] if entry["verdict"] == "fits"]
    assert [sorted(entry["names"]) for entry in fitting] == [
        ["checkpoint each block", "checkpoint the loss", "fused AdamW"]
    ]
    assert fitting[0]["saved_bytes"] == 6 * GiB
    assert all(variant.arguments == ("--lr", "1") for variant in seen)


def test_fix_says_how_far_off_the_best_is(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(monkeypatch, lambda variant, text: Outcome(rehearsal_of((60 - ("fused" in text)) * GiB, GiB)))
    assert main(["fix", "--device", "4090", script]) == 3
    out = capsys.readouterr().out
    assert "Nothing fits: the best needs 59.00 GiB, 35.8" in out
    assert "It would fit on h100 (" in out or "It would fit on a100-80 (" in out


def test_a_script_that_fails(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(monkeypatch, lambda variant, text: Outcome(None, "Traceback\n  NameError: x\x1b[2J"))
    assert main(["fix", "--device", "4090", script]) == 1
    assert main(["fit", "--device", "4090", "--vary", "batch=1..4", script]) == 1
    error = capsys.readouterr().err
    assert "understudy fix: the script failed in its rehearsal" in error
    assert "NameError: x\\x1b[2J" in error


NETWORK = """import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(6))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


BATCH = 64
model = Net().cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(4):
    out = model(torch.randn(BATCH, 256, 256, device="cuda"))
    out.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
"""


def test_the_patch_of_the_first_that_fits_really_fits(
    on_small_card: Callable[[str, str, float], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is made up here: rehearsals run, the patch is applied by the tool that people use."""
    words = on_small_card("train.py", NETWORK, 0.75)
    assert main(["fix", *words, "--workers", "1", "train.py"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("unchanged: does not fit on SMALL: ")
    assert sum(line.count(" GiB") + line.count(" MiB") >= 2 for line in out.splitlines()) >= 6, (
        "five verified changes"
    )
    assert "The cheapest that fits: checkpoint each block\n" in out
    assert Path("train.py").read_text() == NETWORK
    patch = out[out.index("--- a/train.py") :]
    subprocess.run(["patch", "-p1"], input=patch, text=True, check=True, capture_output=True)
    assert Path("train.py").read_text() != NETWORK
    assert main(["run", "--quiet", *words, "train.py"]) == 0
    assert capsys.readouterr().out.startswith(("fits on SMALL", "tight on SMALL"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fix", "--device", "h10", "x.py"], "understudy fix: unknown device 'h10': did you mean h100"),
        (["fix", "--device", "h100", "missing.py"], "understudy fix: missing.py: No such file or directory"),
        (["fix", "--device", "h100", "bad.py"], "understudy fix: bad.py: invalid Python: "),
        (["fix", "x.py"], "understudy fix: the following arguments are required: --device"),
        (
            ["fit", "--device", "h100", "--vary", "batch", "train.py"],
            "understudy fit: expected --vary as in batch=1..512",
        ),
        (
            ["fit", "--device", "h100", "--vary", "b=3..1", "train.py"],
            "understudy fit: expected --vary as in batch=1..512",
        ),
        (
            ["fit", "--device", "h100", "--vary", "spam=1..2", "train.py"],
            "understudy fit: train.py has no number named 'spam'",
        ),
        (
            ["fix", "--device", "h100", "--workers", "0", "train.py"],
            "understudy fix: --workers must be a positive integer, got 0",
        ),
    ],
)
def test_wrong_words(
    arguments: list[str], message: str, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("bad.py").write_text("def :")
    try:
        code: object = main(arguments)
    except SystemExit as ended:
        code = ended.code
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    assert captured.err.startswith(message)
    assert captured.err.count("\n") == 1


def test_progress_is_for_terminals_only(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(3)
    progress.advance("one")
    progress.clear()
    assert capsys.readouterr().err == ""


TIMED = """import torch
from torch import nn

model = nn.Sequential(nn.Linear(2048, 8192), nn.GELU(), nn.Linear(8192, 2048)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(4):
    loss = model(torch.randn(4096, 2048, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_each_change_has_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """bfloat16 is faster than float32 on tensor cores, a fused optimizer a little faster than one of lists."""
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(TIMED)
    assert main(["fix", "--device", "h100", "--workers", "1", "--json", "net.py"]) == 0
    changes = json.loads(capsys.readouterr().out)["changes"]
    times = {entry["names"][0]: entry["time"] for entry in changes}
    assert all(time["low_seconds"] < time["seconds"] < time["high_seconds"] for time in times.values())
    (autocast,) = [time for name, time in times.items() if "bfloat16" in name or "autocast" in name]
    assert autocast["change"] < -0.5
    assert times["fused AdamW"]["change"] < 0.01


OPTIONS = [
    "--offline-data",
    "--budget",
    "20GiB",
    "--answers",
    "worst",
    "--margin",
    "0.1",
    "--oom",
    "raise",
    "--host",
    "cloud",
]


def test_each_rehearsal_has_the_options_of_run(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Words as they were written; options that are not given are not handed on."""
    seen = answer(monkeypatch, lambda variant, text: Outcome(rehearsal_of(GiB, GiB)))
    for command in (["fix"], ["fit", "--vary", "batch=1..4"]):
        assert main([*command, "--device", "4090", *OPTIONS, script]) == 0
        assert sorted(seen[-1].options) == sorted(OPTIONS)
        assert main([*command, "--device", "4090", script]) == 0
        assert seen[-1].options == ()
        with pytest.raises(SystemExit, match="2"):
            main([*command, "--device", "4090", "--budget", "many", script])
        assert main([*command, "--device", "4090", "--host", "moon", script]) == 2
    error = capsys.readouterr().err
    assert "argument --budget: expected a size such as" in error
    assert "--host: invalid choice 'moon' (choose from" in error


def test_every_option_of_run_that_writes_no_file_is_one_of_fix(capsys: pytest.CaptureFixture[str]) -> None:
    found = {}
    for command in ("run", "fix", "fit"):
        with pytest.raises(SystemExit, match="0"):
            main([command, "--help"])
        found[command] = set(re.findall(r"^  (--[\w-]+)", capsys.readouterr().out, re.MULTILINE))
    files = {"--json", "--html", "--trace", "--speedscope", "--folded", "--snapshot"}
    assert found["run"] - files - {"--quiet"} <= found["fix"] & found["fit"]


def test_a_run_that_is_refused_does_not_fit() -> None:
    """`tight` with --strict, or a step that is too slow: exit code 3."""
    rehearsal = rehearsal_of(GiB, GiB)
    assert Outcome(rehearsal).fits and not Outcome(rehearsal, is_accepted=False).fits
