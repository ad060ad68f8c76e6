"""The current line of the user's code, and tracebacks without frames of this library."""

from __future__ import annotations

import ast
import dis
import functools
import linecache
import os
import sys
import traceback
from collections.abc import Iterator
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_LIBRARY = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_WRAPPERS = ("typing_extensions.py",)  # torch wraps deprecated functions with it
_NOT_THE_USERS = (os.path.dirname(os.path.abspath(torch.__file__)) + os.sep, _OURS, "<frozen ")


@functools.cache
def is_user_file(file: str) -> bool:
    """Whether a file belongs neither to torch, nor to this library, nor to Python's standard library."""
    if file.startswith(_NOT_THE_USERS):
        return False
    if os.path.basename(file) in _WRAPPERS:
        return False
    return not file.startswith(_LIBRARY) or file[len(_LIBRARY) :].split(os.sep)[0].endswith("-packages")


def user_frames() -> Iterator[FrameType]:
    """The frames of code that is neither torch's nor ours nor generated, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if is_user_file(code.co_filename) and (code.co_name == "<module>" or not is_generated(code)):
            yield frame
        frame = frame.f_back


def is_generated(code: CodeType) -> bool:
    """Whether a function was made by a program and has no text to show: `<string>`, the methods of a dataclass. Before
    Python 3.13, functions of `python -c` look the same."""
    file = code.co_filename
    if not file.startswith("<"):
        return False
    return not linecache.getline(file, 1) or (file == "<string>" and code not in _list_codes_of_command())


@functools.cache
def _list_codes_of_command() -> frozenset[CodeType]:
    """All functions of `python -c`, whose text Python keeps under the name that generated functions have as well."""
    found = [compile("".join(linecache.getlines("<string>")), "<string>", "exec", dont_inherit=True)]
    for code in found:
        found += [part for part in code.co_consts if isinstance(part, CodeType)]
    return frozenset(found)


@functools.cache
def is_installed(file: str) -> bool:
    """Whether a file belongs to an installed package."""
    parts = file.split(os.sep)
    return "site-packages" in parts or "dist-packages" in parts


def frames_to_show() -> tuple[FrameType | None, FrameType | None]:
    """The innermost frame of the user's own code; and, if that called a package, the innermost frame of the package."""
    library: FrameType | None = None
    for frame in user_frames():
        if not is_installed(frame.f_code.co_filename):
            return frame, library
        library = library or frame
    return library, None


def find_asserted_truth() -> bool | None:
    """What the truth value that is being read must be, if the user's innermost statement is an `assert` that fails
    otherwise."""
    frame = next(user_frames(), None)
    if frame is None:
        return None
    steps = [step for step in dis.get_instructions(frame.f_code) if step.opname not in _PADDING]
    places = {step.offset: place for place, step in enumerate(steps)}
    place = places.get(frame.f_lasti)
    if place is not None and _reads_truth(steps[place], frame):
        place += 1  # the jump comes after it
    jump = "" if place is None else steps[place].opname
    if place is None or "JUMP" not in jump or not jump.endswith(("IF_TRUE", "IF_FALSE")):
        return None
    jumps_if = jump.endswith("IF_TRUE")
    if _leads_to_failure(steps, places, place + 1):
        return jumps_if
    return not jumps_if if _leads_to_failure(steps, places, places.get(steps[place].argval)) else None


_PADDING = ("CACHE", "EXTENDED_ARG", "NOP", "NOT_TAKEN")
_TRUTH_OF_COMPARISON = 16
"""In the argument of `COMPARE_OP` since Python 3.13: the instruction also reads the truth value of the result."""


def _reads_truth(step: dis.Instruction, frame: FrameType) -> bool:
    """Whether this instruction, which is running, has called `__bool__`, and the next one jumps by the result."""
    if step.opname == "TO_BOOL":
        return True
    if (
        step.opname != "COMPARE_OP"
        or sys.version_info < (3, 13)
        or not (step.arg or 0) & _TRUTH_OF_COMPARISON
    ):
        return False
    called = _find_called(frame)  # for the comparison, or for the truth of its result
    is_of_tensor = called.f_code.co_name == "__torch_function__"
    name = getattr(called.f_locals["func"], "__name__", "") if is_of_tensor else called.f_code.co_name
    return name == "__bool__"


def _find_called(frame: FrameType) -> FrameType:
    """The frame that a running one has called."""
    called = sys._getframe(1)
    while called.f_back is not None and called.f_back is not frame:
        called = called.f_back
    return called


def _leads_to_failure(steps: list[dis.Instruction], places: dict[int, int], place: int | None) -> bool:
    """Whether an `assert` fails if the program continues here: nothing else is computed before."""
    while place is not None and place < len(steps):
        step = steps[place]
        if step.opname in ("JUMP_FORWARD", "JUMP_ABSOLUTE"):
            place = places.get(step.argval)
        elif step.opname == "POP_TOP":  # `0 < n < 9` keeps n for the second comparison
            place += 1
        else:
            return _raises_assertion(step)
    return False


def _raises_assertion(step: dis.Instruction) -> bool:
    """Whether an instruction loads `AssertionError`, which no other statement does by this instruction."""
    is_common = step.opname == "LOAD_COMMON_CONSTANT" and "AssertionError" in step.argrepr  # Python 3.14
    return is_common or step.opname == "LOAD_ASSERTION_ERROR"


def user_line() -> str:
    """The innermost statement of the user's own code: `train.py:88: y = x @ w`; with the innermost statement of a
    called package: `train.py:9: model(x), in site-packages/vision/vit.py:30: q @ k`."""
    own, library = frames_to_show()
    if own is None:
        return ""
    shown = describe_line(own.f_code.co_filename, own.f_lineno)
    return (
        shown
        if library is None
        else f"{shown}, in {describe_line(library.f_code.co_filename, library.f_lineno)}"
    )


def is_inside_torch(package: str) -> bool:
    """Whether the user's innermost line has called this package of torch, which is still running."""
    start = os.path.join(_NOT_THE_USERS[0], package, "")
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        if frame.f_code.co_filename.startswith(start):
            return True
        frame = frame.f_back
    return False


def is_in_package() -> bool:
    """Whether the code that called torch belongs to an installed package."""
    own, library = frames_to_show()
    return library is not None or (own is not None and is_installed(own.f_code.co_filename))


def describe_line(file: str, number: int) -> str:
    """`train.py:88: y = x @ w`: the line, and the whole statement on it."""
    # Not memoised for code without a file (`<stdin>`, a doctest), whose name may be reused.
    return _describe_line.__wrapped__(file, number) if file.startswith("<") else _describe_line(file, number)


@functools.lru_cache(maxsize=4096)
def _describe_line(file: str, number: int) -> str:
    source = statement_at(file, number)
    if is_installed(file):
        parts = file.split(os.sep)
        kind = "site-packages" if "site-packages" in parts else "dist-packages"
        file = os.sep.join(parts[len(parts) - 1 - parts[::-1].index(kind) :])
    place = f"{short_path(file)}:{number}"
    return f"{place}: {source}" if source else place


def statement_at(file: str, number: int) -> str:
    """The statement that contains this line, on one line; for a compound statement, its head."""
    line = linecache.getline(file, number).strip()
    before = linecache.getline(file, number - 1).strip()
    if not line or (_is_statement(line) and _is_statement(before)):
        return line
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return line
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and node.lineno <= number <= _last_line(node)
    ]
    if not around:
        return line
    node = max(around, key=lambda node: node.lineno)
    lines = [linecache.getline(file, i).strip() for i in range(node.lineno, _last_line(node) + 1)]
    joined = " ".join(part for part in lines if part and not part.startswith("#"))
    return (
        joined.replace("( ", "(").replace(" )", ")").replace("[ ", "[").replace(" ]", "]").replace(",)", ")")
    )


def _last_line(node: ast.stmt) -> int:
    """The last line of a statement; of a compound statement, the last line of its head."""
    body = getattr(node, "body", None)
    if isinstance(body, list) and body and isinstance(body[0], ast.stmt):
        return max(node.lineno, body[0].lineno - 1)
    return node.end_lineno or node.lineno


def _is_statement(line: str) -> bool:
    if line.endswith(":"):
        line += " pass"
        if line.startswith(("else", "elif", "except", "finally", "case")):
            return True
    try:
        ast.parse(line)
    except (SyntaxError, ValueError):
        return False
    return True


_SHAPES = os.path.join(_OURS, "shapes", "")


def is_asked_by_operator() -> bool:
    """Whether a comparison of sizes is made by a rule of this library, and not by the user's program or torch's Python
    code."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_SHAPES, __file__)):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_OURS)


def short_path(name: str) -> str:
    relative = os.path.relpath(name) if os.path.isabs(name) else name
    return name if relative.startswith("..") else relative


# --- tracebacks of the user's program

_OPERATORS = os.path.join(os.path.dirname(os.path.abspath(torch.__file__)), "_ops.py")


def drop_own_frames(tb: TracebackType | None) -> TracebackType | None:
    """A traceback of the program's own frames and those of packages."""
    entries = []
    while tb is not None:
        entries.append(tb)
        tb = tb.tb_next
    kept: TracebackType | None = None
    for entry in reversed(entries):
        if not is_own_file(entry.tb_frame.f_code.co_filename):
            kept = TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return kept


def find_user_line(tb: TracebackType | None) -> str:
    """The innermost line of the user's own files in a traceback: "train.py:42: text"."""
    found = ""
    for frame, number in traceback.walk_tb(tb):
        if is_user_file(frame.f_code.co_filename):
            found = describe_line(frame.f_code.co_filename, number)
    return found


def is_own_file(file: str) -> bool:
    """Operators reach a mode through torch's `_ops`, which a run on real tensors does not pass."""
    return (
        file == _OPERATORS
        or file.startswith(_OURS)
        or file == "<frozen runpy>"
        or file.endswith(os.sep + "runpy.py")
    )


# --- where an object was made -----------------------------------------------------------------------------------------

MOST_FRAMES = 48
"""The most frames kept; of a deeper stack, the innermost ones."""
KeptFrames = tuple[tuple[Any, int], ...]
"""Code and instruction of each frame, innermost first. Line numbers are found when the stack is shown: that is slow."""


def keep_frames(depth: int) -> KeptFrames:
    """The frames of this thread, from `depth` functions above the caller."""
    kept: list[tuple[Any, int]] = []
    frame: FrameType | None = sys._getframe(depth + 1)
    while frame is not None and len(kept) < MOST_FRAMES:
        kept.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(kept)


def format_frames(kept: KeptFrames) -> str:
    """As Python shows a stack, the innermost frame last."""
    entries = []
    for code, instruction in reversed(kept):
        line = code.co_firstlineno
        for start, number in dis.findlinestarts(code):
            if start > instruction:
                break
            line = number if number is not None else line
        entries.append(traceback.FrameSummary(code.co_filename, line, code.co_name))
    return "".join(traceback.format_list(entries))
