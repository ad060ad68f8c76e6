"""The program of a command line, as people type it.

python -u train.py --lr 1      train.py --lr 1
litgpt pretrain pythia-160m    the Python file of the installed command, with its arguments
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence

from understudy.cluster.launchers import is_launch
from understudy.errors import UnderstudyError

FLAGS_OF_PYTHON = re.compile(r"-(?!m$|c$)[a-zA-Z]+")
VALUES_OF_PYTHON = ("-W", "-X")


class ProgramError(UnderstudyError, ValueError):
    """Words that are not a Python program."""


def read_program(words: Sequence[str]) -> list[str]:
    """The script, or -m and a module, and its arguments. Words that are not known here stay."""
    if not words or words[0].startswith("-"):
        return list(words)
    if is_launch(words):
        return list(words)
    first, folder = words[0], os.path.dirname(words[0])
    if os.path.isfile(first):
        if os.path.exists(os.path.join(folder, "python")) and is_launch(
            [os.path.basename(first), *words[1:]]
        ):
            return [os.path.basename(first), *words[1:]]  # /venv/bin/torchrun
        return [*_check_kind(first), *words[1:]]
    if re.fullmatch(r"python(\d(\.\d+)?)?", os.path.basename(first)):
        return _skip_flags(words[1:])
    found = shutil.which(first) if os.path.basename(first) == first else None
    if found is not None and _is_python(found):
        return [found, *words[1:]]
    if found is not None:
        raise ProgramError(
            f"expected a Python script or a launcher, got the command {first!r}; rehearse the Python command that it runs"
        )
    return list(words)


def _check_kind(file: str) -> list[str]:
    if file.endswith(".ipynb"):
        script = f"{os.path.splitext(os.path.basename(file))[0]}.py"
        raise ProgramError(
            f"expected a Python script, got the notebook {file!r}; convert it: jupyter nbconvert --to script {file}, then "
            f"rehearse {script}"
        )
    if file.endswith((".sh", ".bash", ".slurm", ".sbatch")):
        raise ProgramError(
            f"expected a Python script, got the shell script {file!r}; rehearse the Python command that it runs"
        )
    return [file]


def _skip_flags(words: Sequence[str]) -> list[str]:
    position = 0
    while position < len(words) and FLAGS_OF_PYTHON.fullmatch(words[position]):
        position += 2 if words[position] in VALUES_OF_PYTHON else 1
    rest = list(words[position:])
    if not rest or rest[0] == "-c":
        raise ProgramError("expected a script or -m and a module after python; write the program into a file")
    return rest


def _is_python(file: str) -> bool:
    """Whether an installed command is a Python script."""
    with open(file, "rb") as script:
        return re.match(rb"#!.*python|#!/bin/sh\n'''exec' .*python", script.read(200)) is not None
