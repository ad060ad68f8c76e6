"""Programs that a rehearsed script starts: run if they only tell something; else listed, and nothing happens."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from understudy.cli import main
from understudy.simulation.processes import is_read_only

TELLING = [
    "git rev-parse HEAD",
    "git -C .. log -1 2>/dev/null",
    "lscpu | grep Model",
    "ls -l && pwd",
    "/usr/bin/uname -p",
    "hostname",
    "nvidia-smi -L",
]
WRITING = [
    "rm -rf x", "git checkout main", "git commit -am x", "echo x > file", "ls; rm x", "cat $(touch x)", "echo `touch x`",
    "ls & rm x", "git -c core.pager=touch log", "git log --output=x", "python train.py", "bash -c ls", "git", "", "'",
    "cat x | tee y", "ls\nrm x", "hostname x", "nvidia-smi -pm 1", "ldconfig",
]  # fmt: skip


@pytest.mark.parametrize("line", TELLING)
def test_what_only_tells(line: str) -> None:
    assert is_read_only(line, True)


@pytest.mark.parametrize("line", WRITING)
def test_what_may_write(line: str) -> None:
    assert not is_read_only(line, True)


def test_words_are_not_read_by_a_shell() -> None:
    assert is_read_only(["echo", "a > b; rm c"], False)
    assert not is_read_only(["rm", "file"], False)
    assert not is_read_only("ls -l", False)  # the name of a program, with a space in it


SCRIPT = """
import os, subprocess, sys
kept = {kept!r}
assert subprocess.run(["rm", kept]).returncode == 0
assert subprocess.check_output("rm " + kept, shell=True) == b""
assert subprocess.Popen([sys.executable, "-c", f"open({{kept!r}}, 'w')"]).wait() == 0
assert os.system("rm " + kept) == 0
assert os.popen("rm " + kept).read() == ""
assert os.waitpid(os.posix_spawn("/bin/rm", ["rm", kept], os.environ), 0)[1] == 0
try:
    os.execv("/bin/rm", ["rm", kept])
except PermissionError as error:
    assert "a rehearsal can't replace its process by another program" in str(error)
assert subprocess.check_output(["echo", "told"], text=True) == "told\\n"
assert subprocess.getoutput("echo told") == "told"
"""


@pytest.mark.skipif(sys.platform == "win32", reason="its programs have other names")
def test_programs_that_write_are_listed_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    kept = tmp_path / "kept.txt"
    kept.write_text("as it was")
    Path("script.py").write_text(SCRIPT.format(kept=str(kept)))
    assert main(["run", "--quiet", "--json", "out.json", "script.py"]) == 0
    assert kept.read_text() == "as it was"
    writes = [
        write for write in json.loads(Path("out.json").read_text())["writes"] if write["what"] == "command"
    ]
    assert writes[0]["target"] == f"rm {kept}"
    assert sum(write["count"] for write in writes) == 7


def test_write_allows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text(
        "import subprocess, sys\nsubprocess.run([sys.executable, '-c', \"open('made', 'w')\"])\n"
    )
    assert main(["run", "--quiet", "--write", "script.py"]) == 0
    assert Path("made").exists()
