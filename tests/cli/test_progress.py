"""The line of progress, and what a script writes to the same terminal."""

from __future__ import annotations

import builtins
import io
import sys
import threading
import time

import pytest

from understudy.cli import progress
from understudy.cli.progress import ERASE, ProgressLine, show_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def use_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """In the test itself: pytest has streams of its own while fixtures are made."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "INTERVAL", 0.01)
    return terminal


def wait_for(terminal: Terminal, text: str) -> None:
    end = time.monotonic() + 10
    while text not in terminal.getvalue() and time.monotonic() < end:
        time.sleep(0.01)
    assert text in terminal.getvalue()


def test_the_line_makes_way_for_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = use_terminal(monkeypatch)
    with show_progress(lambda: "step 1"):
        wait_for(terminal, "step 1")
        print("loss 2.5")
    assert terminal.getvalue().count("step 1" + ERASE + "loss 2.5\n") == 1
    assert "write" not in vars(terminal)


def test_a_line_that_is_not_complete_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """`print(..., end=" ")`, and bars of tqdm: nothing is written until the line is at its end."""
    terminal, asked = use_terminal(monkeypatch), threading.Event()

    def describe() -> str:
        asked.set()
        return "step 1"

    with show_progress(describe):
        print("working", end=" ")
        asked.clear()
        assert asked.wait(10)
        asked.clear()
        assert asked.wait(10)
        print("done")
        print("50%|#####", end="\r")
    assert "working done\n50%|#####" in terminal.getvalue()
    assert terminal.getvalue().endswith("#####\r\n")  # the verdict is on a line of its own


def test_a_question_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """C writes it, past `sys.stdout.write`."""
    terminal = use_terminal(monkeypatch)

    def ask(prompt: object = "") -> str:
        size = len(terminal.getvalue())
        time.sleep(0.1)
        return str(len(terminal.getvalue()) - size)

    monkeypatch.setattr(builtins, "input", ask)
    with show_progress(lambda: "step 1"):
        wait_for(terminal, "step 1")
        assert input("how many? ") == "0"
    assert builtins.input is ask


def test_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "10")
    terminal = Terminal()
    ProgressLine(terminal).show("step 1, 20 operators")
    assert terminal.getvalue() == ERASE + "step 1, 2"


def test_nothing_is_shown_elsewhere(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "INTERVAL", 0.001)
    with show_progress(lambda: "step 1"):
        time.sleep(0.05)
        print("loss 2.5")
    assert capsys.readouterr() == ("loss 2.5\n", "")
