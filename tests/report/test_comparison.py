"""Two rehearsals side by side, from Python and from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.report.samples import HOSTILE, MiB, make_rehearsal
from understudy.cli import main
from understudy.report.comparison import compare, write_markdown
from understudy.report.rehearsal import Rehearsal

GiB = 1 << 30


def save(folder: Path, name: str, rehearsal: Rehearsal) -> str:
    file = folder / name
    file.write_text(rehearsal.to_json())
    return str(file)


def test_the_line_that_grew_comes_first() -> None:
    comparison = compare(make_rehearsal(), make_rehearsal(extra=3 * GiB))
    assert comparison.growth == 3 * GiB
    assert (comparison.lines[0].name, comparison.lines[0].growth) == ("model.py:99", 3 * GiB)
    assert [change.name for change in comparison.modules] == ["head"]
    assert [(change.name, change.growth) for change in comparison.categories] == [("activations", 3 * GiB)]


def test_lines_that_only_moved_have_not_changed() -> None:
    before, after = make_rehearsal(), make_rehearsal()
    moved = Rehearsal.from_json(after.to_json().replace("model.py:20", "model.py:31"))
    for number, row in enumerate(before.lines):
        object.__setattr__(row, "source", f"line {number}")
        object.__setattr__(moved.lines[number], "source", f"line {number}")
    assert compare(before, moved).lines == ()


def test_diff_and_its_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = save(tmp_path, "a.json", make_rehearsal())
    b = save(tmp_path, "b.json", make_rehearsal(extra=3 * GiB))
    assert main(["diff", a, a]) == 0
    capsys.readouterr()
    assert main(["diff", a, b]) == 3
    out = capsys.readouterr().out
    assert "+3.00 GiB" in out
    assert "model.py:99" in out
    assert main(["diff", b, a]) == 0
    assert main(["diff", a, b, "--allow", "4GiB"]) == 0
    worse = save(tmp_path, "c.json", make_rehearsal(verdict="does not fit"))
    assert main(["diff", a, worse, "--allow", "100%"]) == 3


def test_markdown_for_a_pull_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = save(tmp_path, "a.json", make_rehearsal())
    b = save(tmp_path, "b.json", make_rehearsal(extra=3 * GiB))
    assert main(["diff", a, b, "--markdown"]) == 3
    out = capsys.readouterr().out
    assert "| reserved | 30.00 MiB | 3.03 GiB | +3.00 GiB |" in out
    assert "| model.py:99 | `x = model.py(x)` | 0 B | 3.00 GiB | +3.00 GiB |" in out


def test_hostile_names_stay_in_their_cells() -> None:
    name = f"{HOSTILE}\n# title @user [link](http://x)"
    text = write_markdown(compare(make_rehearsal(name=name), make_rehearsal(name=name, extra=GiB)))
    for line in text.splitlines():
        assert line.startswith(("|", "**")) or not line
    assert "\x1b" not in text
    assert "\\<script" in text and "@\u200buser" in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file or directory"),
        ("{", "expected a rehearsal, got invalid JSON"),
        ("[1]", "got JSON without schema_version"),
        (
            '{"schema_version": 99}',
            "expected schema_version 2, got 99: rehearse again",
        ),
        ('{"schema_version": 2}', "invalid rehearsal: "),
        ('{"schema_version": 2, "peak": 3}', "invalid rehearsal: "),
    ],
)
@pytest.mark.parametrize("command", ["diff", "report"])
def test_files_that_are_no_rehearsals(
    command: str, content: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = save(tmp_path, "a.json", make_rehearsal()), tmp_path / "b.json"
    if content is not None:
        bad.write_text(content)
    assert main([command, *([good] if command == "diff" else []), str(bad)]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_sizes_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = save(tmp_path, "a.json", make_rehearsal())
    for wrong, message in (
        ("much", "expected a size such as 40GiB or 512MiB, got 'much'"),
        ("7", "expected a size such as 40GiB or 512MiB, got '7'"),
        ("much%", "expected --allow as in 2%"),
    ):
        assert main(["diff", a, a, "--allow", wrong]) == 2
        assert message in capsys.readouterr().err
    assert main(["diff", a, a, "--allow", "0"]) == 0


def test_report_writes_each_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = save(tmp_path, "a.json", make_rehearsal(extra=MiB))
    files = {name: tmp_path / f"out.{name}" for name in ("html", "trace", "speedscope", "folded")}
    assert (
        main(["report", a, *(part for name, file in files.items() for part in (f"--{name}", str(file)))]) == 0
    )
    assert capsys.readouterr().out == ""
    assert files["html"].read_text().startswith("<!doctype html>")
    json.loads(files["trace"].read_text())
    json.loads(files["speedscope"].read_text())
    assert main(["report", a, "--html", str(tmp_path / "none" / "x.html")]) == 2
    assert "No such file or directory" in capsys.readouterr().err


FORGED = {
    "peak.allocated_bytes: expected integer, got str": {"peak": {"allocated_bytes": "x"}},
    "peak.reserved_bytes: expected integer, got float": {"peak": {"reserved_bytes": 1.5}},
    "steps: expected integer, got bool": {"steps": True},
    "headline: expected string, got NoneType": {"headline": None},
    "modules: expected list, got dict": {"modules": {}},
    "modules[0]: expected an object, got int": {"modules": [3]},
    "margin: expected a finite number, got inf": {"margin": float("inf")},
    "flops: 1000000000000000000000000000000 is out of range": {"flops": 10**30},
    "verdict: expected one of fits, tight, does not fit, failed, no verdict, got 'maybe'": {
        "verdict": "maybe"
    },
    "timeline: its columns differ in length": {"timeline": {"steps": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]}},
    "writes[0].target: expected str, got None": {"writes": [{"what": "write"}]},
    "answers[0].answer: expected object, got None": {
        "answers": [{"line": "", "read": "", "tensor": "", "count": 1}]
    },
    "peak.x: unknown field": {"peak": {"x": 1}},
}


@pytest.mark.parametrize("message", FORGED)
@pytest.mark.parametrize("command", ["report", "html", "diff"])
def test_forged_files_are_refused_by_name(
    command: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = make_rehearsal().to_dict()
    for name, value in FORGED[message].items():
        record[name] = {**record[name], **value} if isinstance(value, dict) and name != "modules" else value
    file = tmp_path / "forged.json"
    file.write_text(json.dumps(record))
    words = {
        "report": ["report", str(file)],
        "html": ["report", str(file), "--html", str(tmp_path / "page.html")],
        "diff": ["diff", save(tmp_path, "a.json", make_rehearsal()), str(file)],
    }
    assert main(words[command]) == 2
    assert f"forged.json: invalid rehearsal: {message}\n" in capsys.readouterr().err
