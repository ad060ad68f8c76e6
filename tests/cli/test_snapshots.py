"""`understudy replay` and `understudy calibrate`: what they print, wrong input, harmless names."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from tests.simulation.test_snapshots import snapshot_of_a_run
from understudy.cli import main
from understudy.simulation.allocator_parts import MiB
from understudy.simulation.catalogue import find_card


@pytest.fixture
def oom(tmp_path: Path) -> str:
    file = tmp_path / "oom.pickle"
    file.write_bytes(pickle.dumps(snapshot_of_a_run()[1]))
    return str(file)


def test_replay_says_who_held_the_memory(oom: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", oom]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "oom.pickle: GPU 0, 1,250 events, settings: none\nout of memory at event 1,249: 30.54 MiB for train.py:"
    )
    assert "out of memory: 1.59 GiB requested, 1.83 GiB reserved by torch, 26.00 MiB free on the card" in out
    assert "train.py:1 (step)" in out
    assert "as recorded                 1.84 GiB   1.63 GiB        1  out of memory at event 1,249" in out
    assert "Fragmentation: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True would have succeeded." in out


def test_replay_on_another_card_and_as_json(oom: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", oom, "--device", "t4", "--json", "--settings", "max_split_size_mb:64"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["capacity"] == find_card("t4").usable
    assert record["missing_bytes"] == 0
    assert [run["settings"] for run in record["replays"]][-1] == "max_split_size_mb:64"
    assert all(run["fits"] for run in record["replays"])
    holders = record["moments"]["out of memory"]["holders"]
    assert sum(holder["bytes"] for holder in holders) == record["moments"]["out of memory"]["requested"]


def test_replay_fits_a_narrow_terminal(
    oom: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    main(["replay", oom])
    table = [line for line in capsys.readouterr().out.splitlines() if "retries" in line or "MiB  " in line]
    assert table
    assert max(map(len, table)) <= 75


def test_names_of_the_program_do_no_harm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = snapshot_of_a_run()[1]
    for entry in record["device_traces"][0]:
        entry["frames"] = [{"filename": "a\x1b[2J\n\u202e.py", "line": 1, "name": "\x07"}]
    file = tmp_path / "bad.pickle"
    file.write_bytes(pickle.dumps(record))
    assert main(["replay", str(file)]) == 0
    out = capsys.readouterr().out
    assert "a\\x1b[2J\\n\\u202e.py:1 (\\x07)" in out
    assert not any(c in out for c in "\x1b\x07\u202e")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["replay", "no_such.pickle"], "understudy replay: no_such.pickle: No such file or directory"),
        (["replay", __file__], "understudy replay: "),
        (
            ["replay", "x", "--device", "h10"],
            "understudy replay: unknown device 'h10': did you mean h100",
        ),
        (["replay", "x", "--settings", "spam:1"], "understudy replay: the allocator has no option 'spam'"),
        (["calibrate", "--device", "t4"], "understudy calibrate: expected a snapshot or --context"),
        (
            ["calibrate", "--device", "t4", "--context", "20"],
            "understudy calibrate: --context must be between 0 and the 14.56 GiB of t4",
        ),
        (["calibrate", "x.pickle"], "understudy calibrate: the following arguments are required: --device"),
    ],
)
def test_wrong_input(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main(arguments)
    except SystemExit as ended:
        code = ended.code
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    assert captured.err.startswith(message)
    assert captured.err.count("\n") == 1


def test_calibrate_stores_what_later_runs_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNDERSTUDY_CONFIG", str(tmp_path))
    card = find_card("t4")
    from understudy.simulation.allocator import Allocator, OutOfMemory

    allocator = Allocator(card.memory, outside=512 * MiB)
    allocator.record_history()
    with pytest.raises(OutOfMemory):
        while True:
            allocator.allocate(1 << 30)
    file = tmp_path / "oom.pickle"
    file.write_bytes(pickle.dumps(allocator.snapshot()))
    assert main(["calibrate", str(file), "--device", "t4", "--dry-run"]) == 0
    assert find_card("t4") == card
    assert main(["calibrate", str(file), "--device", "t4"]) == 0
    out = capsys.readouterr().out
    assert "outside of torch: 512.00 MiB (the catalogue has 122.88 MiB)" in out
    assert "error of reserved memory: 0.00%" in out
    assert find_card("t4").outside == 512 * MiB
    main(["devices"])
    assert "0.50" in next(line for line in capsys.readouterr().out.splitlines() if line.startswith("t4"))
