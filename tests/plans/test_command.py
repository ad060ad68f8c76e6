"""`understudy plan`: from words to the answer."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest

from understudy.cli import main, plans
from understudy.cli.program_words import read_program
from understudy.cli.rehearsals import Outcome, Queue, Variant, Workers
from understudy.cli.search_space import find_space
from understudy.plans.answer import (
    SCHEMA_FILE,
    Row,
    SearchedAxis,
    TrainingPlan,
    find_front,
)
from understudy.plans.page import make_page
from understudy.plans.store import ResultStore, make_key
from understudy.plans.text import write_plan
from understudy.report.times import write_rate

SCRIPT = """\
import argparse
import torch
parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=256)
parser.add_argument("--data", default="")
options = parser.parse_args()
width = int(open("width.txt").read())
model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4))).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(10):
    model(torch.randn(options.batch, width, device="cuda")).sum().backward()
    optimizer.step()
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    Path("train.py").write_text(SCRIPT)
    Path("width.txt").write_text("2048")
    return "train.py"


def plan(script: str, *words: str, expected: int = 0) -> TrainingPlan:
    given = ["--device", "t4", "--jobs", "1", "--cache", "kept", "--json", "plan.json", *words, script]
    assert main(["plan", *given]) == expected
    return TrainingPlan.from_json(Path("plan.json").read_text())


WORDS = ("--vary", "batch=1024,4096,1048576,2097152", "--no-changes")


def test_a_whole_search(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Batches of which the largest do not fit; a second search rehearses nothing; a changed file that the script reads
    makes it rehearse again."""
    found = plan(script, *WORDS, "--html", "plan.html")
    assert found.is_complete
    assert {row.values["batch"] for row in found.choices} == {"1024", "4096"}
    assert found.choices[0].command.startswith("python train.py --batch ")
    assert sum(found.ruled_out.values()) >= 1
    assert found.kept == 0
    jsonschema.validate(found.to_dict(), json.loads(SCHEMA_FILE.read_text()))
    text = capsys.readouterr().out
    assert "Fastest on NVIDIA Tesla T4" in text or "Fastest on" in text
    assert "candidates: " in text
    assert "<svg" in Path("plan.html").read_text()
    again = plan(script, *WORDS)
    assert again.rehearsed == 0
    assert [row.values for row in again.choices] == [row.values for row in found.choices]
    Path("width.txt").write_text("1024")
    changed = plan(script, *WORDS)
    assert changed.rehearsed > 0
    assert changed.choices[0].reserved_bytes < found.choices[0].reserved_bytes


def check(device: str, *program: str) -> plans.Wishes:
    parser = argparse.ArgumentParser()
    plans.add_plan_arguments(parser)
    options = parser.parse_args(["--device", device, "--vary", "batch=8", "--no-changes"])
    options.program = list(program)
    return plans.check_words(options)


def test_a_script_for_one_card_is_told_how_to_use_the_others(script: str) -> None:
    wishes = check("8xt4", script)
    assert wishes.notes == [
        "note: train.py uses one of the 8 cards: nothing in it starts or joins other ranks; use DistributedDataParallel, "
        "accelerate or a Trainer for the others"
    ]
    assert (wishes.request.has_ranks, wishes.request.per_node) == (False, 1)
    Path(script).write_text("from torch.nn.parallel import DistributedDataParallel\n" + SCRIPT)
    wishes = check("8xt4", script)
    assert (wishes.notes, wishes.request.has_ranks, wishes.request.per_node) == ([], True, 8)


@pytest.mark.parametrize(
    "words",
    [
        ("-m", "project.train", "--batch", "4"),
        ("python", "-m", "project.train", "--batch", "4"),
        ("torchrun", "--nproc-per-node", "2", "-m", "project.train", "--batch", "4"),
        ("accelerate", "launch", "--module", "--num_processes", "2", "project.train", "--batch", "4"),
    ],
)
def test_modules_as_people_start_them(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("project").mkdir()
    Path("project/train.py").write_text("import torch.distributed\nfrom project import sizes\n")
    Path("project/sizes.py").touch()
    request = check("2xt4", *read_program(words)).request
    assert (request.module, request.arguments) == ("project.train", ("--batch", "4"))
    assert set(request.files) == {"project/train.py", "project/sizes.py"}
    launcher = ("accelerate", "launch", "--num_processes", "2") if words[0] == "accelerate" else ()
    assert request.launcher == launcher
    assert not request.tries_changes


def find_key(script: str, *arguments: str) -> str:
    """What the result of the first candidate is kept by."""
    wishes = check("t4", script, "--batch", "{batch}", *arguments)
    found = find_space(wishes.request)
    with Workers(1) as workers:
        rehearser = plans.Rehearser(wishes, found, Queue(workers, None), (), wishes.request.files)
        return rehearser._make_key(found.make_variant(found.space.list_candidates()[0]), None)


def test_results_are_kept_by_all_that_they_depend_on(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [find_key(script)]
    assert find_key(script) == keys[0]
    keys.append(find_key(script, "--data", "x"))
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    keys.append(find_key(script))
    Path(script).write_text(SCRIPT + "# more\n")
    keys.append(find_key(script))
    # A copy reads its own files, by the same names.
    Path("copy").mkdir()
    Path("copy", script).write_text(Path(script).read_text())
    monkeypatch.chdir("copy")
    keys.append(find_key(script))
    monkeypatch.setattr(plans, "find_versions", lambda: {"torch": "2.99"})
    keys.append(find_key(script))
    assert len(set(keys)) == 6


MODULE = """\
import json, sys
import torch
from project.sizes import WIDTH
batch = json.load(open(sys.argv[2]))["training"]["batch_size"]
model = torch.nn.Linear(WIDTH, WIDTH).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(10):
    model(torch.randn(batch, WIDTH, device="cuda")).sum().backward()
    optimizer.step()
"""


def test_a_module_with_a_configuration_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("project").mkdir()
    Path("project/__init__.py").touch()
    Path("project/sizes.py").write_text("WIDTH = 1024\n")
    Path("project/train.py").write_text(MODULE)
    configuration = '{"training": {"batch_size": 4096}}'
    Path("c.json").write_text(configuration)
    words = [
        "--device",
        "t4",
        "--jobs",
        "1",
        "--cache",
        "-",
        "--json",
        "plan.json",
        "--vary",
        "batch_size=4096,65536",
    ]
    assert main(["plan", *words, "-m", "project.train", "--config", "c.json"]) == 0
    found = TrainingPlan.from_json(Path("plan.json").read_text())
    small, large = sorted(found.rehearsals, key=lambda row: row.reserved_bytes)
    assert large.reserved_bytes > 4 * small.reserved_bytes
    assert (small.command, small.patch) == ("python -m project.train --config c.json", "")
    assert (large.command, large.patch) == (small.command, "# in c.json: set training.batch_size = 65536")
    assert Path("c.json").read_text() == configuration
    assert main(["plan", *words, "-m", "project.test"]) == 2
    assert "can't run -m project.test: no module of this name" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "h100"], "expected a script: understudy plan --device D [options] script.py [arguments]"),
        (["--device", "h100", "none.py"], "none.py: No such file or directory"),
        (["--device", "h101", "train.py"], "unknown device 'h101': did you mean h100 or v100-16?"),
        (["--device", "h100", "--vary", "batch=", "train.py"], "--vary batch=: expected non-empty values"),
        (["--device", "h100", "--vary", "b=1", "--vary", "b=2", "train.py"], "--vary b: given more than once; give all its values in one --vary"),
        (["--device", "h100", "--require", "f(1)=2", "train.py"],
         "--require f(1)=2: expected names, numbers, arithmetic and comparisons, got a call"),
        (["--device", "h100", "--jobs", "0", "train.py"], "--jobs must be a positive integer, got '0'"),
        (["--device", "h100", "--global-batch", "x", "train.py"], "--global-batch must be a positive integer, got 'x'"),
        (["--device", "h100", "--cost", "free", "train.py"], "--cost must be a price such as 2.49/h, got 'free'"),
        (["--device", "h100", "--max-step-time", "soon", "train.py"], "expected a time such as 0.5s or 250ms, got 'soon'"),
        (["--device", "h100", "--html", "no/where.html", "train.py"],
         "--html 'no/where.html': expected a file in a folder that exists"),
        (["--device", "2xh100", "torchrun", "--nproc-per-node", "8", "train.py"],
         "expected one card per process of a node, got 8 processes and --device 2xh100"),
    ],
)  # fmt: skip
def test_wrong_words(words: list[str], message: str, script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    assert capsys.readouterr().err == f"understudy plan: {message}\n"


def test_wrong_words_need_no_torch(script: str) -> None:
    code = (
        "import sys\nfrom understudy.cli import main\n"
        "code = main(['plan', '--device', 'h100', '--vary', 'batch=', 'train.py'])\n"
        "sys.exit(code if 'torch' not in sys.modules else 9)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 2


def test_a_script_that_fails(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("width.txt").unlink()
    found = plan(script, "--vary", "batch=1,2", "--no-changes", expected=1)
    assert not found.choices
    assert "FileNotFoundError" in found.rehearsals[0].error
    assert "No candidate ran" in capsys.readouterr().out


# workers


def give(variant: Variant, device: str | None) -> Outcome:
    return Outcome(None, f"{variant.script} on {device}")


def kill_if_bad(variant: Variant, device: str | None) -> Outcome:
    """Each attempt leaves a mark."""
    if variant.script == "bad":
        with open(variant.environment["marks"], "a") as file:
            file.write("x")
        os.kill(os.getpid(), signal.SIGKILL)
    return give(variant, device)


def drain(queue: Queue) -> dict[int, Outcome]:
    found: dict[int, Outcome] = {}
    while len(queue):
        found.update(queue.wait())
    return found


def test_a_candidate_that_kills_its_worker_twice_has_failed(tmp_path: Path) -> None:
    """The others, which ran beside it, are not blamed."""
    marks = tmp_path / "marks"
    with Workers(2) as workers:
        queue = Queue(workers, "h100", kill_if_bad, attempts=2)
        for number, name in enumerate(["a", "bad", "b", "c"]):
            queue.add(number, Variant(name, environment={"marks": str(marks)}))
        found = drain(queue)
    assert {number: outcome.error for number, outcome in found.items()} == {
        0: "a on h100", 1: "its worker was killed 2 times", 2: "b on h100", 3: "c on h100",
    }  # fmt: skip
    assert found[1].was_killed
    assert len(marks.read_text()) <= 3  # once beside others, and alone until it is known


def wait_for_a_mark(variant: Variant, device: str | None) -> Outcome:
    """The first worker that has this one is killed."""
    mark = Path(variant.environment["mark"])
    if variant.script == "2" and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return give(variant, device)


def test_workers_of_a_cluster_may_be_lost(tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, silence_logs=50
        ) as cluster,
        Workers(2, cluster.scheduler_address) as workers,
    ):
        queue = Queue(workers, "t4", wait_for_a_mark, attempts=2)
        for number in range(5):
            queue.add(number, Variant(str(number), environment={"mark": str(tmp_path / "mark")}))
        found = drain(queue)
    assert {number: outcome.error for number, outcome in found.items()} == {i: f"{i} on t4" for i in range(5)}
    assert (tmp_path / "mark").exists()


def test_an_interrupt_prints_the_best_so_far(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was rehearsed by then is kept, and not rehearsed again."""
    begin: Callable[..., object] = plans.Rehearser.begin
    begun: list[str] = []

    def interrupt_the_second(self: plans.Rehearser, candidate: object) -> object:
        begun.append(str(candidate))
        if len(begun) == 2:
            raise KeyboardInterrupt
        return begin(self, candidate)

    monkeypatch.setattr(plans.Rehearser, "begin", interrupt_the_second)
    words = ("--vary", "batch=1024,4096", "--no-changes", "--top", "2")
    found = plan(script, *words, expected=130)
    assert not found.is_complete
    assert len(found.rehearsals) == 1
    assert "so far; the search did not end" in capsys.readouterr().out
    monkeypatch.setattr(plans.Rehearser, "begin", begin)
    whole = plan(script, *words)
    assert whole.is_complete
    assert (whole.kept, whole.rehearsed) == (1, 1)


# the store, and the answer


def test_records_hold_as_long_as_files_stay(tmp_path: Path) -> None:
    data = tmp_path / "data.txt"
    data.write_text("1")
    store = ResultStore(tmp_path / "kept")
    key = make_key({"arguments": ["a"]})
    assert store.read(key) is None
    store.write(key, {"x": 1}, [str(data)])
    data.write_text("2")
    assert store.read(key) is None
    store.write(key, {"x": 2}, [str(data)])
    assert store.read(key) == {"x": 2}
    data.write_text("1")
    assert store.read(key) == {"x": 1}
    (tmp_path / "kept" / f"{key}.json").write_text("{broken")
    assert store.read(key) is None
    assert make_key({"arguments": ["b"]}) != key


def make_row(memory: int, seconds: float, place: int = 0, verdict: str = "fits", name: str = "x") -> Row:
    return Row(
        {"batch": name}, verdict, place, memory << 30, 80 << 30, seconds, seconds * 0.9, seconds * 1.1,
        tokens_per_second=1000 / seconds, command=f"python train.py --batch {name}",
    )  # fmt: skip


def make_answer(*rows: Row) -> TrainingPlan:
    return TrainingPlan(
        "NVIDIA H100", 8, "speed", True, [row for row in rows if row.place], list(rows), [SearchedAxis("batch", ["1"], "asked")],
        40, 30, {"a smaller one does not fit": 20, "predicted to be slower": 5}, len(rows), 0, ["lr"], script="train.py",
    )  # fmt: skip


def test_a_narrow_terminal_cuts_no_change() -> None:
    answer = make_answer(
        make_row(10, 3.0, place=1, name="a rather long value of an option"), make_row(20, 2.0)
    )
    narrow, wide = (write_plan(answer, width) for width in (60, 150))
    assert "  1: batch=a rather long value of an option\n" in narrow
    assert all(len(line) <= 60 for line in narrow.splitlines() if "python" not in line)
    assert any(line.startswith("  1  ") and line.endswith("option") for line in wide.splitlines())


def test_the_front_is_what_nothing_beats() -> None:
    rows = [
        make_row(10, 3.0),
        make_row(20, 2.0),
        make_row(15, 3.5),
        make_row(30, 1.0),
        make_row(5, 0.5, verdict="does not fit"),
    ]
    assert [row.reserved_bytes >> 30 for row in find_front(rows)] == [10, 20, 30]


def test_the_text_of_a_plan() -> None:
    text = write_plan(make_answer(make_row(10, 3.0, 1, name="8"), make_row(20, 4.0, 2, name="4")))
    assert "Fastest on 8 x NVIDIA H100: batch=8" in text
    assert "30 candidates: 2 rehearsed, 25 ruled out without a rehearsal (83%)" in text
    assert "40 combinations, of which 30 are allowed" in text
    assert "Not searched: lr (name them with --vary)" in text


def test_names_are_no_markup() -> None:
    page = make_page(make_answer(make_row(10, 3.0, 1, name="</script><b>&x")))
    assert "</script><b>" not in page
    assert "<b>" not in page
    assert page.count("</script>") == 2


def test_large_rates_have_no_exponent() -> None:
    row = Row({}, "fits", tokens_per_second=1_402_345.0)
    assert write_rate(row) == "1,400,000 tokens/s"
