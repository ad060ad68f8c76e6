"""Completion in shells: what is offered where, the scripts, and that torch is not imported."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from understudy.cli import COMMANDS, main


def complete(*words: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """For a cursor at the end of the last word."""
    assert main(["--complete", str(len(words)), "understudy", *words]) == 0
    return capsys.readouterr().out.split()


def test_commands_options_cards_and_choices(capsys: pytest.CaptureFixture[str]) -> None:
    assert complete("", capsys=capsys)[: len(COMMANDS)] == [name for name, _, _ in COMMANDS]
    assert complete("re", capsys=capsys) == ["report", "replay"]
    assert complete("run", "--de", capsys=capsys) == ["--device"]
    assert complete("run", "--device", "h", capsys=capsys) == ["h100", "h200"]
    assert complete("run", "--oom", "", capsys=capsys) == ["record", "raise"]
    assert complete("fix", "--device", "rtx4", capsys=capsys) == ["rtx4090"]
    assert "--requests" not in complete("run", "--", capsys=capsys)


def test_files_are_left_to_the_shell(capsys: pytest.CaptureFixture[str]) -> None:
    """Also all that follows a script: it has options of its own."""
    for words in (
        ["run", "tr"],
        ["run", "--json", ""],
        ["run", "train.py", "--de"],
        ["nothing", "x"],
        ["report", ""],
    ):
        assert complete(*words, capsys=capsys) == []


def test_torch_is_not_imported() -> None:
    code = (
        "import sys; from understudy.cli import main; main(['--complete', '3', 'understudy', 'run', '--device', 'h1']); "
        "main(['--show-completion', 'zsh']); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_are_valid(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--show-completion", shell]) == 0
    script = capsys.readouterr().out
    assert "understudy --complete" in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_asks_and_gets(tmp_path: Path) -> None:
    command = tmp_path / "understudy"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m understudy "$@"\n')
    command.chmod(0o755)
    script = (
        'eval "$(understudy --show-completion bash)"; COMP_WORDS=(understudy fit --dev); COMP_CWORD=2; '
        '_understudy_complete; echo "${COMPREPLY[@]}"; complete -p understudy'
    )
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    said = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert said.splitlines() == ["--device", "complete -o default -F _understudy_complete understudy"]


def test_installing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SHELL", "/usr/bin/zsh")
    (tmp_path / ".zshrc").write_text("setopt x")
    assert main(["--install-completion"]) == 0
    assert capsys.readouterr().out == f"written to {tmp_path / '.zshrc'}: open a new shell\n"
    assert (tmp_path / ".zshrc").read_text() == 'setopt x\neval "$(understudy --show-completion zsh)"\n'
    assert main(["--install-completion", "zsh"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / '.zshrc'}: completion is already installed\n"
    assert main(["--install-completion", "fish"]) == 0
    assert "complete -c understudy" in (tmp_path / ".config/fish/completions/understudy.fish").read_text()


@pytest.mark.parametrize("words", [["--show-completion", "csh"], ["--complete"], ["--complete", "x"]])
def test_wrong_input(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("understudy: ") and error.count("\n") == 1
