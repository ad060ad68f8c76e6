"""A line on a terminal that shows the progress of a script, without disturbing the script's own output.

The line is on the terminal only while the script's last line is complete, and is gone before the script writes more: a
program that shows a bar of its own (tqdm), or asks for input, has the terminal for itself.
"""

from __future__ import annotations

import builtins
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

INTERVAL = 0.5
"""Seconds."""
ERASE = "\r\x1b[K"


class ProgressLine:
    """`terminal` is where it is shown; other output to it goes through `write_above`."""

    def __init__(self, terminal: Any) -> None:
        self._terminal = terminal
        self._write = terminal.write
        self._is_shown = False
        self._is_at_start = True
        """Whether the script has ended its last line."""
        self._lock = threading.RLock()

    def show(self, text: str) -> None:
        with self._lock:
            if self._is_at_start:
                self._write(f"{ERASE}{text[: shutil.get_terminal_size().columns - 1]}")
                self._terminal.flush()
                self._is_shown = True

    def clear(self) -> None:
        with self._lock:
            if self._is_shown:
                self._write(ERASE)
                self._terminal.flush()
                self._is_shown = False

    def end(self) -> None:
        """For what comes after the script, whose last line may be a bar of its own."""
        with self._lock:
            self.clear()
            if not self._is_at_start:
                self._write("\n")
                self._terminal.flush()

    def write_above(self, write: Callable[[str], Any], text: str) -> Any:
        with self._lock:
            self.clear()
            written = write(text)
            if text:
                self._is_at_start = text.endswith("\n")
        return written

    @contextmanager
    def make_way(self, stream: Any) -> Iterator[None]:
        """What is written to this stream is written above the line."""
        write = stream.write
        stream.write = lambda text: self.write_above(write, text)
        try:
            yield
        finally:
            del stream.write

    @contextmanager
    def make_way_for_input(self) -> Iterator[None]:
        """C writes the question of `input` to the terminal; debuggers ask in the same way."""
        original = builtins.input

        def ask(prompt: object = "", /) -> str:
            with self._lock:  # until it is answered
                self.clear()
                self._is_at_start = True
                return original(prompt)

        builtins.input = ask
        try:
            yield
        finally:
            if builtins.input is ask:
                builtins.input = original


@contextmanager
def show_progress(describe: Callable[[], str]) -> Iterator[None]:
    """Every half a second, if standard error is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    line, ended = ProgressLine(sys.stderr), threading.Event()

    def show() -> None:
        while not ended.wait(INTERVAL):
            line.show(describe())

    with ExitStack() as stack:
        for stream in {sys.stdout, sys.stderr}:
            if stream.isatty():
                stack.enter_context(line.make_way(stream))
        stack.enter_context(line.make_way_for_input())
        thread = threading.Thread(target=show, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            line.end()
