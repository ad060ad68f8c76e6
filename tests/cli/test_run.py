"""`understudy run`: exit codes, options, wrong input, several cards."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import zipapp
from pathlib import Path
from typing import Any

import pytest

from understudy.cli import main

TRAINING = """
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
options = parser.parse_args()
model = torch.nn.Linear(options.width, options.width, device=options.device)
optimizer = torch.optim.Adam(model.parameters())
for step in range(50):
    loss = model(torch.randn(8, options.width, device=options.device)).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: {loss.item():.2f}")
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "train.py").write_text(TRAINING)
    monkeypatch.chdir(tmp_path)
    return "train.py"


def record(file: str = "out.json") -> Any:
    return json.loads(Path(file).read_text())


def test_a_verdict_and_tables(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            ["run", "--device", "h100", "--json", "out.json", "--html", "out.html", script, "--width", "512"]
        )
        == 0
    )
    said = capsys.readouterr().out
    lines = said.splitlines()
    assert lines[0] == "step 0: 2.50"
    assert lines[1].startswith("fits on H100: ")
    assert "Where the memory goes" in said
    assert "train.py:14: item of f32[]@cuda:0 → 2.5" in said
    found = record()
    assert (found["verdict"], found["steps"], found["device"]["key"]) == ("fits", 2, "h100")
    assert found["peak"]["requested_bytes"] > 4 * 4 * 512 * 512
    assert found["answers"][0]["count"] == 1
    assert found["program"] == "train.py --width 512"
    assert "<title>train.py --width 512</title>" in Path("out.html").read_text()


def test_the_cpu_without_a_device(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--quiet", "--steps", "1", "--json", "out.json", script]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("fits on this machine's CPU: ")
    assert record()["steps"] == 1


def test_exit_codes(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--quiet", "--device", "t4", "--budget", "1MiB", script]) == 3
    said = capsys.readouterr().out
    assert (
        said.startswith("does not fit on T4 with a budget of 1.00 MiB: ")
        and "GiB over the budget, peak in" in said
    )
    assert main(["run", "--device", "t4", script, "--width", "40000"]) == 3
    said = capsys.readouterr().out
    assert (
        "does not fit on T4" in said
        and "train.py" in said
        and "with --oom raise the script receives it" in said
    )
    assert main(["run", "--quiet", "--device", "t4", "--margin", "0.99", script]) == 0


def test_an_out_of_memory_error_that_ends_the_script_is_a_verdict(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = ["--oom", "raise", "--json", "out.json", script, "--width", "40000"]
    assert main(["run", "--quiet", "--device", "t4", *wide]) == 3
    said = capsys.readouterr()
    assert "torch.OutOfMemoryError" in said.err
    assert said.out.startswith(
        "does not fit on T4: the script failed in its first step, out of memory at train.py:"
    )
    assert "; until then " in said.out
    found = record()
    assert found["verdict"] == "does not fit" and found["out_of_memory"]["line"].startswith("train.py:")
    Path("catches.py").write_text(
        "import torch\ntry:\n    torch.empty(1 << 40, device='cuda')\nexcept torch.OutOfMemoryError:\n    pass\n"
        "torch.ones(2, 3) @ torch.ones(2, 3)\n"
    )
    assert main(["run", "--quiet", "--device", "t4", "--oom", "raise", "catches.py"]) == 1
    assert capsys.readouterr().out.startswith("no verdict on ")


def test_a_script_that_fails(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad.py").write_text("import torch\ntorch.ones(2, 3) @ torch.ones(2, 3)\n")
    assert main(["run", "--quiet", "bad.py"]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("Traceback (most recent call last):\n")
    assert 'bad.py", line 2' in captured.err and "understudy/simulation" not in captured.err
    Path("exits.py").write_text("import sys\nsys.exit(7)\n")
    assert main(["run", "--quiet", "exits.py"]) == 1
    assert "the script ended with exit code 7" in capsys.readouterr().err
    Path("usage.py").write_text("import argparse\nargparse.ArgumentParser().parse_args()\n")
    assert main(["run", "--quiet", "usage.py", "--bogus"]) == 1
    assert "unrecognized arguments: --bogus" in capsys.readouterr().err
    Path("interrupted.py").write_text("raise KeyboardInterrupt\n")
    assert main(["run", "--quiet", "interrupted.py"]) == 130


def test_no_tables_hide_a_traceback(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad.py").write_text("import torch\nx = torch.ones(2, 3)\nx @ x\n")
    assert main(["run", "bad.py"]) == 1
    captured = capsys.readouterr()
    assert captured.out.startswith("no verdict on") and captured.out.count("\n") == 1
    assert "ShapeMismatch" in captured.err


def test_warnings_name_a_line_of_the_script(script: str) -> None:
    Path("warns.py").write_text(
        "import torch\ndata = [torch.ones(2)] * 4\n"
        "for batch in torch.utils.data.DataLoader(data, batch_size=2, pin_memory=True):\n    print(batch.shape)\n"
    )
    command = [sys.executable, "-m", "understudy", "run", "warns.py"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    assert "warns.py:3: UserWarning: 'pin_memory' argument is set as true" in said
    assert "patches" not in said


def test_several_cards_are_a_table(script: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--device", "h100,t4", "--json", "out.json", script, "--width", "40000"]) == 3
    said = capfd.readouterr().out
    rows = [line.split()[:2] for line in said.splitlines() if line.startswith(("h100", "t4"))]
    assert [row[0] for row in rows] == ["h100", "t4"]
    assert [found["verdict"] for found in record()] == ["fits", "does not fit"]
    assert all(", train.py:" in line for line in said.splitlines() if line.startswith(("h100", "t4")))


def test_of_several_cards_only_the_first_is_heard(script: str, capfd: pytest.CaptureFixture[str]) -> None:
    Path("says.py").write_text(
        "import sys, torch\nprint('here')\nprint('there', file=sys.stderr)\ntorch.ones(2, device='cuda').sum()\n"
    )
    assert main(["run", "--device", "h100,t4", "says.py"]) == 0
    captured = capfd.readouterr()
    assert captured.out.count("here") == captured.err.count("there") == 1


def test_a_card_of_ones_own(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("cards.toml").write_text("[mine]\nmemory = 0.6\n")
    assert (
        main(["run", "--quiet", "--cards", "cards.toml", "--device", "mine", "--context", "0", script]) == 0
    )
    assert "MINE" in capsys.readouterr().out.upper()


WRONG = [
    (["run"], "understudy run: expected a script"),
    (["run", "nope.py"], "understudy run: can't run 'nope.py': file not found"),
    (
        ["run", "trian.py"],
        "understudy run: can't run 'trian.py': file not found: did you mean train.py?",
    ),
    (
        ["run", "-m", "no.such.module"],
        "understudy run: can't run -m no.such.module: no module named 'no'",
    ),
    (["run", "."], "understudy run: can't run '.': expected a file, got a folder without __main__.py"),
    (["run", "-m"], "understudy run: -m requires the name of a module"),
    (["run", "--device", "h10", "train.py"], "understudy run: unknown device 'h10': did you mean h100"),
    (["run", "--device", "h100,nope", "train.py"], "understudy run: unknown device 'nope'"),
    (
        ["run", "--steps", "0", "train.py"],
        "understudy run: argument --steps: expected a positive integer, got '0'",
    ),
    (
        ["run", "--budget", "40 sacks", "train.py"],
        "understudy run: argument --budget: expected a size such as 40GiB or 512MiB, got '40 sacks'",
    ),
    (
        ["run", "--budget", "40", "train.py"],
        "understudy run: argument --budget: expected a size such as 40GiB or 512MiB, got '40'",
    ),
    (
        ["run", "--devic", "h100", "train.py"],
        "understudy run: unknown option --devic: did you mean --device?",
    ),
    (
        ["run", "--margin", "2", "train.py"],
        "understudy run: argument --margin: expected a number between 0 and 1, got '2'",
    ),
    (
        ["run", "--answers", "maybe", "train.py"],
        "understudy run: --answers: invalid choice 'maybe' (choose from plausible",
    ),
    (
        ["run", "--json", "no/where.json", "train.py"],
        "understudy run: --json 'no/where.json': the folder does not exist",
    ),
    (["run", "--cards", "no.toml", "--device", "h100", "train.py"], "understudy run: no.toml: No such file"),
]


@pytest.mark.parametrize(
    ("arguments", "message"), WRONG, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_wrong_input(
    script: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main(arguments)
    except SystemExit as ended:
        code = ended.code
    captured = capsys.readouterr()
    assert code == 2
    assert captured.err.startswith(message), captured.err
    assert captured.err.count("\n") == 1 and captured.out == ""


def test_help_and_wrong_input_do_not_import_torch(script: str) -> None:
    code = """
import sys
from understudy.cli import main
for arguments in (["run", "--help"], ["run", "nope.py"], ["run", "--device", "h10", "train.py"], ["--help"]):
    try:
        main(arguments)
    except SystemExit:
        pass
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_the_package_is_the_command(script: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "understudy", "run", "nope.py"], capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout) == (2, "")


def test_standard_input_is_the_scripts(script: str) -> None:
    Path("reads.py").write_text("print('read', input())\n")
    ended = subprocess.run(
        [sys.executable, "-m", "understudy", "run", "reads.py"],
        input="a line\n",
        capture_output=True,
        text=True,
    )
    assert ended.stdout.splitlines()[0] == "read a line"
    assert ended.returncode == 0, ended.stderr


def test_folders_and_archives_with_a_main_file(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As `python app` and `python app.pyz`: what is first in `sys.path`, and `__name__`."""
    Path("app").mkdir()
    Path("app/helper.py").write_text("WIDTH = 512\n")
    Path("app/__main__.py").write_text(
        f"import helper, sys\nassert __name__ == '__main__'\nsys.argv += ['--width', str(helper.WIDTH)]\n{TRAINING}"
    )
    zipapp.create_archive("app", "app.pyz")
    for target in ("app", "app.pyz"):
        assert main(["run", "--device", "h100", "--json", "out.json", target]) == 0, capsys.readouterr()
        found = record()
        assert (found["verdict"], found["steps"]) == ("fits", 2)
        assert "f32[8, 512]" in json.dumps(found["sanity"])
        sys.modules.pop("helper")


def test_a_card_of_a_file(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("cards.toml").write_text("[small]\nmemory = 1.5\n")
    Path("none.toml").write_text("")
    assert main(["run", "--quiet", "--device", "cards.toml", script]) == 0
    assert "of 1.5 GiB" in capsys.readouterr().out
    assert main(["run", "--device", "none.toml", script]) == 2
    assert capsys.readouterr().err == "understudy run: none.toml: has 0 cards\n"


def test_names_of_files_do_no_harm(script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A terminal acts upon escape sequences; a page would load an image."""
    name = "a\x1b[31m<img src=x>'\".py"
    Path(name).write_text(Path(script).read_text())
    files = ["--html", "page.html", "--folded", "peak.folded", "--json", "out.json"]
    assert main(["run", "--device", "t4", *files, name]) == 0
    said = capsys.readouterr().out
    assert "\x1b" not in said and "a\\x1b[31m<img src=x>" in said
    assert "<img" not in Path("page.html").read_text() and "\x1b" not in Path("peak.folded").read_text()
    assert main(["run", name.replace("a", "b")]) == 2
    assert "\x1b" not in capsys.readouterr().err


def test_a_narrow_terminal(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["run", "--device", "t4", script]) == 0
    tables = capsys.readouterr().out.partition("Where the memory goes")[2].partition("\nNotes")[0]
    rows = [line for line in tables.splitlines() if line.startswith("  ")]
    assert len(rows) > 10
    assert max(len(line) for line in rows) <= 60


def test_a_script_that_fails_has_no_verdict(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad.py").write_text("import torch\nx = torch.ones(2, 3, device='cuda')\nx @ x\n")
    assert main(["run", "--device", "h100", "--json", "bad.json", "bad.py"]) == 1
    said = capsys.readouterr()
    assert said.out.startswith(
        "no verdict on H100: the script failed in its first step; until then 0.002 of 79.1 GiB"
    )
    assert "fits" not in said.out.splitlines()[0]
    assert "_ops.py" not in said.err
    assert record("bad.json")["verdict"] == "failed"
    assert main(["diff", "bad.json", "bad.json"]) == 2
    assert "bad.json can't be compared: no verdict on H100" in capsys.readouterr().err


def test_a_script_that_fails_before_it_uses_the_card_says_so(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("bad.py").write_text("import a_package_that_nobody_has\n")
    assert main(["run", "--quiet", "--device", "h100", "bad.py"]) == 1
    assert capsys.readouterr().out.splitlines()[0] == (
        "no verdict on H100: the script failed in its first step, before anything was put on the card"
    )


def test_a_card_that_nothing_was_put_on(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--quiet", "--device", "h100", script, "--device", "cpu"]) == 4
    assert (
        capsys.readouterr().out
        == "no verdict on H100: nothing ran on it; the first steps were on the CPU, and the run ended after 2 (--steps)\n"
    )


def test_a_card_on_which_the_script_fails_is_a_row(script: str, capfd: pytest.CaptureFixture[str]) -> None:
    Path("new.py").write_text(
        "import torch\nx = torch.ones(9, device='cuda').sum()\nassert torch.cuda.get_device_capability() >= (8, 0), 'too old'\n"
    )
    assert main(["run", "--device", "h100,t4", "new.py"]) == 1
    said = capfd.readouterr()
    assert [line.split()[:2] for line in said.out.splitlines()[1:]] == [["h100", "fits"], ["t4", "failed"]]
    assert "AssertionError: too old" in said.err


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--json", "folder"], "--json: expected a file, got the folder 'folder'"),
        (
            ["--device", "h100", "--snapshot", "folder"],
            "--snapshot: expected a file, got the folder 'folder'",
        ),
        (["--device", "h100,t4", "--html", "x.html"], "--html requires one card, got 2 in --device"),
        (["--device", "h100,t4", "--snapshot", "x"], "--snapshot requires one card, got 2 in --device"),
        (["--cards", "binary"], "binary: invalid TOML"),
    ],
)
def test_outputs_are_checked_before_the_run(
    script: str, capsys: pytest.CaptureFixture[str], options: list[str], text: str
) -> None:
    Path("folder").mkdir()
    Path("binary").write_bytes(b"\xa3\x00\xff")
    assert main(["run", *options, script]) == 2
    said = capsys.readouterr()
    assert text in said.err
    assert said.out == ""


NEAR_THE_LIMIT = """
import torch
GiB = 1 << 30
kept = [torch.empty(GiB // 4, device="cuda") for _ in range(4)]
del kept
x = torch.empty(12 * GiB // 4, device="cuda")
x += 1
"""


def test_the_snapshot_says_what_the_report_says(script: str) -> None:
    """Where the card releases what is cached, an allocator without limit would have kept it."""
    Path("near.py").write_text(NEAR_THE_LIMIT)
    assert (
        main(
            ["run", "--quiet", "--device", "t4", "--json", "out.json", "--snapshot", "out.pickle", "near.py"]
        )
        == 0
    )
    with open("out.pickle", "rb") as file:
        (trace,) = pickle.load(file)["device_traces"]
    reserved, most = 0, 0
    for entry in trace:
        reserved += {"segment_alloc": entry["size"], "segment_free": -entry["size"]}.get(entry["action"], 0)
        most = max(most, reserved)
    peak = record()["peak"]
    assert most == peak["reserved_bytes"] == 12 << 30
    assert peak["fragmentation_bytes"] == peak["reserved_bytes"] - peak["allocated_bytes"]


def test_moments_of_the_timeline_follow_each_other(script: str) -> None:
    """Of what is freed, the step and the phase are those in which it is, not those in which it was made."""
    assert main(["run", "--quiet", "--device", "h100", "--json", "out.json", script]) == 0
    timeline = record()["timeline"]
    assert timeline["steps"] == sorted(timeline["steps"])
    moments = list(zip(timeline["steps"], timeline["phases"], strict=True))
    changes = [moment for i, moment in enumerate(moments) if i == 0 or moment != moments[i - 1]]
    assert len(changes) == len(set(changes))


TWO_OPTIMIZERS = """
import torch
from tqdm import tqdm
first, second = (torch.nn.Linear(64, 64, device="cuda") for _ in range(2))
optimizers = [torch.optim.Adam(part.parameters()) for part in (first, second)]
scaler = torch.amp.GradScaler("cuda")
for _ in tqdm(range(50)):
    for part, optimizer in zip((first, second), optimizers):
        scaler.scale(part(torch.randn(8, 64, device="cuda")).sum()).backward()
        scaler.step(optimizer)
        optimizer.zero_grad()
    scaler.update()
"""


def test_steps_of_several_optimizers_and_what_is_assumed_of_gradients(
    script: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """A step is one of all optimizers, in every figure; a bar in whose middle the script was ended ends its line."""
    Path("two.py").write_text(TWO_OPTIMIZERS)
    assert main(["run", "--device", "h100", "--json", "out.json", "two.py"]) == 0
    found, said = record(), capfd.readouterr()
    assert found["steps"] == 2
    assert {row["step"] for row in found["phases"]} == {0, 1, 2}
    assert max(found["timeline"]["steps"]) == 1
    assert said.err.endswith("\n")
    assert ("overflow of gradients", False) in [
        (entry["read"], entry["answer"]) for entry in found["answers"]
    ]
    assert "two.py:10: overflow of gradients of f32[]@cuda:0 → False, 4 times" in said.out


# --- time


def test_the_time_of_a_step_stands_below_the_verdict(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--quiet", "--device", "h100", "--json", "out.json", script]) == 0
    verdict, time = capsys.readouterr().out.splitlines()
    assert verdict.startswith("fits on H100") and time.startswith("step ") and "bound by: launches" in time
    found = record()["time"]
    assert found["low_seconds"] < found["seconds_per_step"] < found["high_seconds"]
    assert (found["per"], found["steps"], found["cost"]) == ("step", 1, None)


def test_a_step_that_takes_too_long(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--quiet", "--device", "h100", "--max-step-time", "1us", script]) == 3
    assert "a step takes longer than 1e-06 s" in capsys.readouterr().err
    assert main(["run", "--quiet", "--device", "h100", "--max-step-time", "10s", script]) == 0
    assert main(["run", "--quiet", "--max-step-time", "10s", script]) == 0
    assert "--max-step-time was not checked" in capsys.readouterr().err


def test_what_a_run_costs(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--device", "8xh100", "--cost", "2.5/h", "--total-steps", "1000000", "--json", "out.json"]
    assert main(["run", "--quiet", *words, script]) == 0
    assert "1,000,000 steps: " in capsys.readouterr().out
    time = record()["time"]
    cost = time["cost"]
    assert cost["hours"] == pytest.approx(1e6 * time["seconds_per_step"] / 3600)
    assert cost["card_hours"] == pytest.approx(8 * cost["hours"])
    assert cost["money"] == pytest.approx(2.5 * cost["card_hours"])
    assert cost["low_money"] < cost["money"] < cost["high_money"]


@pytest.mark.parametrize(
    "words, message",
    [
        (["--max-step-time", "soon"], "expected a time such as 0.5s or 250ms, got 'soon'"),
        (["--cost", "2.49/h"], "--cost requires --total-steps or --total-tokens"),
        (["--cost", "cheap", "--total-steps", "3"], "expected a positive number such as 300e9, got 'cheap'"),
        (["--host", "fridge"], "--host: invalid choice 'fridge' (choose from desktop, server, cloud, heavy)"),
        (
            ["--total-tokens", "1e9"],
            "--total-tokens: the inputs of the model are not tokens; use --total-steps",
        ),
    ],
)
def test_wrong_words_about_time(
    script: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with_exit = pytest.raises(SystemExit) if "expected" in message else None
    if with_exit is not None:
        with with_exit as left:
            main(["run", "--device", "h100", *words, script])
        assert left.value.code == 2
    else:
        assert main(["run", "--quiet", "--device", "h100", *words, script]) == 2
    assert message in capsys.readouterr().err


TRAINER = """
import torch
class Trainer:
    def __init__(self, model):
        self.model, self.optimizer = model, torch.optim.Adam(model.parameters())
    def train(self):
        for _ in range(3):
            hidden = self.model[0](torch.randn(512, 256, device="cuda"))
            loss = torch.relu(self.model[1](hidden)).sum()
            loss.backward()
            self.optimizer.step()
"""
ONE_LINE = """
import sys
sys.path.insert(0, "site-packages")
import torch, trainers
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 4096)).cuda()
trainer = trainers.Trainer(model)
trainer.train()
"""


def test_a_line_with_most_of_the_memory_is_shown_by_the_lines_that_it_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "site-packages" / "trainers"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(TRAINER)
    (tmp_path / "train.py").write_text(ONE_LINE)
    assert main(["run", "--quiet", "--device", "t4", "--json", "out.json", "train.py"]) == 0
    found = record()
    rows = {row["line"]: row for row in found["lines"]}
    assert "train.py:7" not in rows
    inside = {row["source"] for line, row in rows.items() if "trainers/__init__.py" in line and row["bytes"]}
    assert {"loss.backward()", "loss = torch.relu(self.model[1](hidden)).sum()"} <= inside
    assert found["peak"]["line"] == "train.py:7"
    assert sum(row["bytes"] for row in rows.values()) > 0.9 * found["peak"]["allocated_bytes"]
