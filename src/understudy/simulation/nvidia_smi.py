"""`nvidia-smi` in a rehearsed script: answered for the simulated machine, whatever the real one has.

The program is replaced by `echo` with the answer, in the command that the script starts.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Sequence
from typing import Any

from understudy.patching import REHEARSAL, patch_call
from understudy.simulation.machine import ACTIVE, machine

Function = Callable[..., Any]
NAME = "nvidia-smi"
MIB = 1 << 20
COMMAND = re.compile(rf"(?:^|(?<=[|;&(]))\s*(?:\S*/)?{NAME}(?P<options>(?:\s+[^\s|;&<>)]+)*)")
"""In a shell command line: the program and its options, up to the next operator of the shell."""


def answer(options: Sequence[str]) -> str:
    """What `nvidia-smi` prints with these options."""
    given = " ".join(options)
    fields = re.search(r"--query-gpu[= ](\S+)", given)
    if fields is not None:
        style = re.search(r"--format[= ](\S+)", given)
        return _write_table(fields.group(1).split(","), style.group(1).split(",") if style else ["csv"])
    cards = range(machine().device_count)
    if "-L" in options or "--list-gpus" in options:
        return "\n".join(
            f"GPU {index}: {_find('name', index)} (UUID: {_find('uuid', index)})" for index in cards
        )
    used = [(_find("memory.used", index), _find("memory.total", index)) for index in cards]
    rows = [
        f"| {index:3}  {_find('name', index):40} {taken} / {total} |"
        for index, (taken, total) in enumerate(used)
    ]
    software = machine().software
    return "\n".join([f"NVIDIA-SMI  Driver Version: {software.driver}  CUDA Version: {software.cuda}", *rows])


def _write_table(fields: Sequence[str], style: Sequence[str]) -> str:
    rows = [[_find(field, index) for field in fields] for index in range(machine().device_count)]
    if "nounits" in style:
        rows = [
            [cell.removesuffix(" MiB").removesuffix(" %").removesuffix(" W") for cell in row] for row in rows
        ]
    heads = [] if "noheader" in style else [[f"{field}{_find_unit(field, style)}" for field in fields]]
    return "\n".join(", ".join(row) for row in (*heads, *rows))


def _find_unit(field: str, style: Sequence[str]) -> str:
    if field.startswith("memory."):
        return " [MiB]"
    return " [%]" if field.startswith("utilization.") else ""


def _find(field: str, index: int) -> str:
    """One cell. What a simulation does not know is what nvidia-smi prints for it."""
    device = machine().device(index)
    free, total = device.memory_info()
    major, minor = device.card.capability or (0, 0)
    known = {
        "name": device.card.name, "gpu_name": device.card.name, "index": str(index), "count": str(machine().device_count),
        "memory.total": f"{total // MIB} MiB", "memory.free": f"{free // MIB} MiB",
        "memory.used": f"{(total - free) // MIB} MiB", "uuid": f"GPU-00000000-0000-0000-0000-{index:012d}",
        "gpu_uuid": f"GPU-00000000-0000-0000-0000-{index:012d}", "driver_version": machine().software.driver,
        "compute_cap": f"{major}.{minor}", "utilization.gpu": "0 %", "utilization.memory": "0 %", "temperature.gpu": "30",
        "pci.bus_id": f"00000000:{index + 1:02X}:00.0",
    }  # fmt: skip
    return known.get(field, "[N/A]")


def _has_cards() -> bool:
    found = ACTIVE.machine
    return found is not None and found.device_count > 0 and found.device(0).card.kind == "cuda"


def _replace(command: Any, is_shell: bool) -> Any:
    """The same command with `echo` in place of `nvidia-smi`."""
    if not _has_cards():
        return command
    if isinstance(command, (str, bytes, os.PathLike)):
        line = os.fsdecode(command)
        if not is_shell:
            return ["echo", answer(())] if os.path.basename(line) == NAME else command
        return COMMAND.sub(lambda found: f" echo {shlex.quote(answer(found.group('options').split()))}", line)
    words = [os.fsdecode(word) for word in command]
    if is_shell:
        return [_replace(words[0], True), *words[1:]] if words else words
    return ["echo", answer(words[1:])] if words and os.path.basename(words[0]) == NAME else command


@patch_call("subprocess.Popen.__init__", during=REHEARSAL)
def ask_simulated_cards(original: Function, self: object, args: Any, *rest: Any, **options: Any) -> None:
    """The real machine has other cards, or none."""
    original(self, _replace(args, bool(options.get("shell"))), *rest, **options)


@patch_call("os.system", during=REHEARSAL)
def ask_simulated_cards_by_line(original: Function, command: Any) -> int:
    """As `subprocess.Popen`."""
    status: int = original(_replace(command, True))
    return status


@patch_call("shutil.which", during=REHEARSAL)
def find_nvidia_smi(original: Function, cmd: Any, *args: Any, **kwargs: Any) -> Any:
    """Programs look for nvidia-smi before they run it."""
    found = original(cmd, *args, **kwargs)
    return found or (f"/usr/bin/{NAME}" if cmd == NAME and _has_cards() else None)
