"""The program of a command line, as people type it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from understudy.cli import main
from understudy.cli.program_words import ProgramError, read_program


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    for name, text in {
        "bin/tune": f"#!{sys.executable}\nprint(1)\n",
        "bin/torchrun": f"#!{sys.executable}\n",
        "bin/python": "",
        "bin/job": "#!/bin/sh\n",
        "train.py": "",
        "run.sh": "",
        "train.ipynb": "",
    }.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


@pytest.mark.parametrize(
    ("words", "program"),
    [
        ("train.py --lr 1", "train.py --lr 1"),
        ("python train.py -u", "train.py -u"),
        ("python3.11 -u -X dev -W ignore train.py", "train.py"),
        ("/usr/bin/python -m package --x", "-m package --x"),
        ("-m package", "-m package"),
        ("torchrun --nproc-per-node 2 train.py", "torchrun --nproc-per-node 2 train.py"),
        ("accelerate launch train.py", "accelerate launch train.py"),
        ("nothere.py", "nothere.py"),
    ],
)
def test_programs(words: str, program: str) -> None:
    assert " ".join(read_program(words.split())) == program


def test_installed_commands(folder: Path) -> None:
    assert read_program(["tune", "run", "x"]) == [str(folder / "bin" / "tune"), "run", "x"]
    assert read_program([str(folder / "bin" / "torchrun"), "train.py"]) == ["torchrun", "train.py"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "train.ipynb",
            "expected a Python script, got the notebook 'train.ipynb'; convert it: jupyter nbconvert --to script train.ipynb, "
            "then rehearse train.py",
        ),
        (
            "run.sh 3",
            "expected a Python script, got the shell script 'run.sh'; rehearse the Python command that it runs",
        ),
        (
            "job 3",
            "expected a Python script or a launcher, got the command 'job'; rehearse the Python command that it runs",
        ),
        (
            "python -c pass",
            "expected a script or -m and a module after python; write the program into a file",
        ),
        ("python", "expected a script or -m and a module after python; write the program into a file"),
    ],
)
def test_what_is_not_a_program(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ProgramError) as error:
        read_program(words.split())
    assert str(error.value) == message
    assert main(["run", "--device", "t4", *words.split()]) == 2
    assert capsys.readouterr().err == f"understudy: {message}\n"
