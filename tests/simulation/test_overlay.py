"""What a rehearsed program writes: later reads see it, the disk does not."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from understudy.patching import FILE_OVERLAY, REHEARSAL, active
from understudy.simulation import libraries as _libraries  # noqa: F401  (registers patches)
from understudy.simulation.overlay import Overlay


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "a.txt").write_text("a")
    (tmp_path / "b.txt").write_text("b")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def overlay(folder: Path) -> Iterator[Overlay]:
    before = contents(folder)
    with Overlay() as overlay, active(REHEARSAL, FILE_OVERLAY):
        yield overlay
    assert contents(folder) == before
    assert not os.path.exists(overlay.root)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path): path.read_bytes() if path.is_file() else b"folder" for path in sorted(folder.rglob("*"))
    }


def test_new_and_changed_files(overlay: Overlay) -> None:
    Path("new.txt").write_text("new")
    with open("b.txt", "a") as file:
        file.write("more")
    assert Path("new.txt").read_text() == "new"
    assert Path("b.txt").read_text() == "bmore"
    assert os.path.getsize("b.txt") == 5
    assert sorted(os.listdir(".")) == ["b.txt", "kept", "new.txt"]
    with open("b.txt", "w") as file:
        assert file.name.endswith("b.txt")
    assert Path("b.txt").read_text() == ""
    assert [(write.what, os.path.basename(write.target)) for write in overlay.writes] == [
        ("write", "new.txt"), ("write", "b.txt"),
    ]  # fmt: skip
    assert overlay.writes[1].count == 2
    assert "test_overlay.py" in overlay.writes[0].line


def test_removed_files(overlay: Overlay) -> None:
    os.remove("b.txt")
    assert not os.path.exists("b.txt")
    assert os.listdir(".") == ["kept"]
    with pytest.raises(FileNotFoundError), open("b.txt"):
        pass
    with pytest.raises(FileNotFoundError):
        os.remove("b.txt")
    Path("b.txt").write_text("again")
    assert Path("b.txt").read_text() == "again"


def test_trees(overlay: Overlay) -> None:
    shutil.rmtree("kept")
    assert not os.path.isdir("kept")
    with pytest.raises(FileNotFoundError):
        Path("kept/a.txt").read_text()
    with pytest.raises(FileNotFoundError):
        shutil.rmtree("kept")
    os.makedirs("kept/deep", exist_ok=True)
    assert os.listdir("kept") == ["deep"]
    Path("kept/deep/c.txt").write_text("c")
    assert sorted(str(path) for path in Path("kept").rglob("*")) == ["kept/deep", "kept/deep/c.txt"]
    assert [entry.name for entry in os.scandir("kept") if entry.is_dir()] == ["deep"]


def test_moves(overlay: Overlay) -> None:
    os.rename("b.txt", "c.txt")
    assert not os.path.exists("b.txt") and Path("c.txt").read_text() == "b"
    shutil.move("kept", "moved")
    assert Path("moved/a.txt").read_text() == "a" and not os.path.exists("kept")
    os.replace("c.txt", "moved/a.txt")
    assert Path("moved/a.txt").read_text() == "b"
    shutil.copytree("moved", "copied")
    assert os.listdir("copied") == ["a.txt"]


def test_a_folder_that_was_made_can_be_the_current_one(overlay: Overlay, folder: Path) -> None:
    os.makedirs("runs/first")
    os.chdir("runs/first")
    assert Path.cwd() == folder / "runs" / "first" and os.path.abspath("x") == str(
        folder / "runs" / "first" / "x"
    )
    Path("log.txt").write_text("log")
    assert os.listdir() == ["log.txt"] and os.listdir("..") == ["first"]
    assert Path("../../b.txt").read_text() == "b" and not os.path.exists("b.txt")
    Path("../../b.txt").write_text("other")
    os.chdir("../..")
    assert os.getcwd() == str(folder) and overlay.current is None
    assert Path("runs/first/log.txt").read_text() == "log" and Path("b.txt").read_text() == "other"
    shutil.rmtree("kept")
    for name in ("kept", "missing", "runs/first/missing"):
        with pytest.raises(FileNotFoundError, match=f"'{name}'"):
            os.chdir(name)
    with pytest.raises(NotADirectoryError):
        os.chdir("b.txt")
    os.chdir("runs")
    os.chdir(folder)


def test_errors_are_those_of_the_disk(overlay: Overlay) -> None:
    with pytest.raises(FileNotFoundError), open("nowhere/x.txt", "w"):
        pass
    with pytest.raises(FileExistsError):
        os.mkdir("kept")
    with pytest.raises(FileExistsError), open("b.txt", "x"):
        pass
    with pytest.raises(IsADirectoryError), open("kept", "w"):
        pass
    with pytest.raises(OSError, match="not empty"):
        os.rmdir("kept")
    with pytest.raises(FileNotFoundError), open("no.txt", "r+"):
        pass


def test_what_is_built_on_it(overlay: Overlay) -> None:
    torch.save({"a": torch.arange(3)}, "model.pt")
    assert torch.load("model.pt")["a"].tolist() == [0, 1, 2]
    np.save("array.npy", np.arange(4))
    assert np.load("array.npy").sum() == 6
    with tempfile.TemporaryDirectory() as temporary:
        Path(temporary, "x").write_text("x")
        assert os.listdir(temporary) == ["x"]
    with tempfile.NamedTemporaryFile("w+") as file:
        json.dump([1], file)
        file.flush()
        assert Path(file.name).read_text() == "[1]"
    assert {write.what for write in overlay.writes} >= {"torch.save", "write"}


def test_devices_are_left_alone(overlay: Overlay) -> None:
    with open(os.devnull, "w") as file:
        file.write("x")
    assert overlay.writes == []


def test_outside_of_it_files_are_files(folder: Path) -> None:
    with Overlay(), active(REHEARSAL, FILE_OVERLAY):
        pass
    Path("real.txt").write_text("real")
    assert (folder / "real.txt").exists()


def test_functions_can_be_pickled(overlay: Overlay) -> None:
    """Process pools pickle the functions that they are given."""
    for function in (os.mkdir, os.stat, os.listdir, os.rename, os.getcwd, os.scandir, open):
        assert pickle.loads(pickle.dumps(function)) is function


def test_variables_do_not_outlive_the_folder_that_they_name(folder: Path) -> None:
    with Overlay(), active(REHEARSAL, FILE_OVERLAY):
        os.environ["CACHE_OF_A_LIBRARY"] = os.path.join(tempfile.gettempdir(), "cache")
    assert "CACHE_OF_A_LIBRARY" not in os.environ
