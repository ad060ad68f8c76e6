"""Launchers as people type them: what `torchrun --nproc-per-node 8 train.py --batch 4` starts, without starting it.

    launch = parse_launch(["torchrun", "--nproc-per-node", "8", "train.py", "--batch", "4"], default_per_node=8)
    launch.layout.per_node, launch.program         8, ("train.py", "--batch", "4")

Known by name: `torchrun`, `-m torch.distributed.run`, `-m torch.distributed.launch`, `accelerate launch`,
`-m accelerate.commands.launch`, `deepspeed`. Programs that start their ranks themselves (`torch.multiprocessing.spawn`,
Lightning with `devices=8`) are met while they run: `simulation.started_ranks`.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from typing import NoReturn

from understudy.cluster.layout import DEEPSPEED, Layout, LayoutError, parse_count


@dataclass(frozen=True)
class Launch:
    """What is run in each rank: a program as of `python`, "-m" in front of a module. `notes` are for the report. `count`:
    the option that gave the number of processes; "" where it is the default."""

    layout: Layout
    program: tuple[str, ...]
    notes: tuple[str, ...] = ()
    count: str = ""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise LayoutError(f"{self.prog}: {message}")


def parse_launch(words: Sequence[str], default_per_node: int) -> Launch | None:
    """The launch of a command line; None without a known launcher. `default_per_node`: the number of processes where the
    command line has none."""
    name, rest = _find_launcher(words)
    return None if name is None else _LAUNCHERS[name](name, list(rest), default_per_node)


def is_launch(words: Sequence[str]) -> bool:
    """Whether a command line begins with a known launcher."""
    return _find_launcher(words)[0] is not None


def _find_launcher(words: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    if not words:
        return None, ()
    if words[0] == "-m" and len(words) > 1:
        return (_MODULES[words[1]], words[2:]) if words[1] in _MODULES else (None, ())
    name = os.path.basename(words[0])
    if name == "accelerate":
        return ("accelerate launch", words[2:]) if words[1:2] == ["launch"] else (None, ())
    return (name, words[1:]) if name in _LAUNCHERS and not os.path.isfile(words[0]) else (None, ())


# --- torchrun --------------------------------------------------------------------------------------------------------

_VALUES = (
    "rdzv-backend rdzv-endpoint rdzv-id rdzv-conf max-restarts monitor-interval start-method event-log-handler role log-dir "
    "local-ranks-filter node-rank master-addr master-port local-addr logs-specs numa-binding signals-to-handle "
    "duplicate-stdout-filters duplicate-stderr-filters shutdown-timeout"
).split()
_FLAGS = "standalone no-python run-path virtual-local-rank use-env".split()
LEGACY = "torch.distributed.launch"
"""It gives `--local-rank` to each process, too."""


def _make_torchrun_parser(name: str) -> _Parser:
    parser = _Parser(prog=name, add_help=False, allow_abbrev=False)
    parser.add_argument("--nnodes", default="1")
    parser.add_argument("--nproc-per-node", "--nproc_per_node", dest="per_node")
    parser.add_argument("-m", "--module", action="store_true")
    add_options_of_torchrun(parser)
    parser.add_argument("program", nargs=argparse.REMAINDER)
    return parser


def add_options_of_torchrun(parser: argparse.ArgumentParser) -> None:
    """Options that change nothing in a rehearsal."""
    parser.add_argument("-r", "--redirects")
    parser.add_argument("-t", "--tee")
    for option in _VALUES:
        parser.add_argument(f"--{option}", f"--{option.replace('-', '_')}")
    for option in _FLAGS:
        parser.add_argument(f"--{option}", f"--{option.replace('-', '_')}", action="store_true")


def _parse_torchrun(name: str, words: list[str], default_per_node: int) -> Launch:
    given = _make_torchrun_parser(name).parse_args(words)
    if given.no_python:
        raise LayoutError(
            f"{name}: expected a Python program, got --no-python; rehearse the Python command that it runs"
        )
    per_node, count = default_per_node, ""
    if given.per_node not in (None, "auto", "gpu"):
        count = f"{name} --nproc-per-node"
        per_node = parse_count(count, given.per_node)
    nodes = parse_count(f"{name} --nnodes", given.nnodes)
    notes = (f"--nnodes {given.nnodes}: rehearsed with {nodes}",) if ":" in given.nnodes else ()
    environment = {
        key: value
        for key, value in (("MASTER_ADDR", given.master_addr), ("MASTER_PORT", given.master_port))
        if value
    }
    rank_option = "--local-rank" if name == LEGACY and not given.use_env else ""
    layout = Layout(nodes, per_node, environment, rank_option=rank_option)
    return Launch(layout, _program_of(name, given.program, given.module), notes, count)


def _program_of(name: str, words: list[str], is_module: bool) -> tuple[str, ...]:
    words = words[1:] if words[:1] == ["--"] else words
    if not words:
        raise LayoutError(f"{name}: expected a script: {name} [options] script.py [arguments]")
    return ("-m", *words) if is_module else tuple(words)


# --- deepspeed -------------------------------------------------------------------------------------------------------


def _parse_deepspeed(name: str, words: list[str], default_per_node: int) -> Launch:
    parser = _Parser(prog=name, add_help=False, allow_abbrev=False)
    parser.add_argument("--num_gpus", "--num_accelerators", dest="per_node", default="-1")
    parser.add_argument("--num_nodes", default="-1")
    parser.add_argument("-H", "--hostfile")
    parser.add_argument("-i", "--include", default="")
    parser.add_argument("-e", "--exclude", default="")
    parser.add_argument("-q", "--quiet", action="store_true")
    for option in (
        "master_addr master_port launcher launcher_args autotuning node_rank venv_script enable_each_rank_log "
        "bind_core_list ssh_port log_level"
    ).split():
        parser.add_argument(f"--{option}")
    for option in (
        "module no_python no_local_rank no_ssh no_ssh_check force_multi save_pid bind_cores_to_rank"
    ).split():
        parser.add_argument(f"--{option}", action="store_true")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    given = parser.parse_args(words)
    if given.no_python:
        raise LayoutError(
            f"{name}: expected a Python program, got --no_python; rehearse the Python command that it runs"
        )
    program = _program_of(name, given.program, given.module)
    hosts, has_hosts = {"localhost": default_per_node}, False
    notes: tuple[str, ...] = ()
    if given.hostfile is not None:
        if os.path.isfile(given.hostfile):
            hosts, has_hosts = _read_hosts(name, given.hostfile), True
        else:
            notes = (f"{name} --hostfile {given.hostfile}: not found; rehearsed without it",)
    is_counted = (given.per_node, given.num_nodes) != ("-1", "-1")
    if is_counted and (given.include or given.exclude):
        raise LayoutError(f"{name}: --num_nodes and --num_gpus can't be used with --include and --exclude")
    slots = _choose_slots(name, hosts, given.include, given.exclude, has_hosts)
    nodes, per_node = len(slots), slots[0]
    if given.num_nodes != "-1":
        nodes = parse_count(f"{name} --num_nodes", given.num_nodes)
        if has_hosts and nodes > len(slots):
            raise LayoutError(f"{name} --num_nodes {nodes}: {given.hostfile} has {len(slots)} hosts")
        slots = slots[:nodes]
    count = f"{name} --include" if given.include else f"{name} --hostfile" if has_hosts else ""
    if given.per_node != "-1":
        count = f"{name} --num_gpus"
        per_node = parse_count(count, given.per_node)
    elif len(set(slots)) > 1:
        raise LayoutError(f"{name}: expected as many cards on each host, got {', '.join(map(str, slots))}")
    rank_option = "" if given.no_local_rank else "--local_rank"
    layout = Layout(nodes, per_node, variables=DEEPSPEED, rank_option=rank_option)
    return Launch(layout, program, notes, count)


def _read_hosts(name: str, path: str) -> dict[str, int]:
    """The slots of each host, of lines such as `worker-0 slots=8`."""
    found: dict[str, int] = {}
    with open(path, encoding="utf-8") as file:
        lines = [line.strip() for line in file]
    for line in lines:
        match = re.match(r"(\S+)\s+slots=([0-9]+)", line)
        if match and match[1] not in found and int(match[2]):
            found[match[1]] = int(match[2])
        elif line and not line.startswith("#"):
            raise LayoutError(
                f"{name} --hostfile {path}: expected lines such as 'worker-0 slots=8', got {line!r}"
            )
    if not found:
        raise LayoutError(f"{name} --hostfile {path}: expected lines such as 'worker-0 slots=8', got none")
    return found


def _choose_slots(name: str, hosts: dict[str, int], include: str, exclude: str, has_hosts: bool) -> list[int]:
    """How many cards are used on each host. Without a file of hosts, those of --include are as they are called there."""
    if include and exclude:
        raise LayoutError(f"{name}: --include and --exclude can't be used together")
    left = {} if include else {host: set(range(slots)) for host, slots in hosts.items()}
    for part in (include or exclude).split("@") if include or exclude else ():
        host, colon, text = part.partition(":")
        most = hosts.get(host, next(iter(hosts.values())) if include and not has_hosts else 0)
        if not most or (colon and not re.fullmatch("[0-9]+(,[0-9]+)*", text)):
            raise LayoutError(
                f"{name}: expected hosts as in worker-0@worker-1:0,2 of {', '.join(hosts)}, got {part!r}"
            )
        cards = {int(card) for card in text.split(",")} if colon else set(range(most))
        if has_hosts and max(cards) >= most:
            raise LayoutError(f"{name}: {host} has cards 0 to {most - 1}, got {part!r}")
        left[host] = left.get(host, set()) | cards if include else left[host] - cards
    slots = [len(cards) for cards in left.values() if cards]
    if not slots:
        raise LayoutError(f"{name} --exclude {exclude}: no cards are left")
    return slots


# --- accelerate ------------------------------------------------------------------------------------------------------


def _parse_accelerate(name: str, words: list[str], default_per_node: int) -> Launch:
    """In a process of its own: accelerate imports torch, without which this one can be forked into a sandbox."""
    if "torch" in sys.modules or not hasattr(os, "fork"):
        return _ask_accelerate(name, words, default_per_node)
    ours, theirs = Pipe(duplex=False)
    process = os.fork()
    if not process:
        answer: Launch | LayoutError
        try:
            answer = _ask_accelerate(name, words, default_per_node)
        except LayoutError as error:
            answer = error
        theirs.send(answer)
        os._exit(0)
    theirs.close()
    try:
        answer = ours.recv()
    except EOFError:
        raise LayoutError(f"{name}: accelerate failed to parse the command line") from None
    finally:
        os.waitpid(process, 0)
    if isinstance(answer, LayoutError):
        raise answer
    return answer


def _ask_accelerate(name: str, words: list[str], default_per_node: int) -> Launch:
    """By accelerate itself, which reads its configuration file and sets variables for its libraries."""
    try:
        # why: an optional package
        from accelerate.commands.launch import (  # type: ignore[import-untyped]
            _validate_launch_command,
            launch_command_parser,
            prepare_deepspeed_cmd_env,
            prepare_multi_gpu_env,
        )
    except ImportError:
        raise LayoutError("accelerate launch: the package accelerate is not installed") from None
    try:
        parser = launch_command_parser()
        parser.error = _Parser(prog=name).error
        given = parser.parse_args(words)
        given, defaults, has_configured_precision = _validate_launch_command(given)
    except LayoutError:
        raise
    except (ValueError, FileNotFoundError) as error:
        raise LayoutError(f"{name}: {str(error).strip().splitlines()[0]}") from None
    nodes = int(given.num_machines or 1)
    count = int(given.num_processes or default_per_node * nodes)
    if count % nodes:
        raise LayoutError(
            f"{name}: expected num_processes divisible by num_machines, got {count} and {nodes}"
        )
    given.num_processes = count
    given.nproc_per_node, given.nnodes = str(count // nodes), str(nodes)
    if given.use_deepspeed:
        fields = list(defaults.deepspeed_config) if defaults else []
        fields += ["mixed_precision"] if has_configured_precision else []
        given.deepspeed_fields_from_accelerate_config = ",".join(fields)
        environment = prepare_deepspeed_cmd_env(given)[1]
    else:
        given.multi_gpu = True
        environment = prepare_multi_gpu_env(given)
    changed = {key: value for key, value in environment.items() if os.environ.get(key) != value}
    program = (("-m",) if given.module else ()) + (given.training_script, *given.training_script_args)
    return Launch(Layout(nodes, count // nodes, changed), program)


_LAUNCHERS: dict[str, Callable[[str, list[str], int], Launch]] = {
    "torchrun": _parse_torchrun,
    LEGACY: _parse_torchrun,
    "deepspeed": _parse_deepspeed,
    "accelerate launch": _parse_accelerate,
}
_MODULES = {
    "torch.distributed.run": "torchrun",
    LEGACY: LEGACY,
    "accelerate.commands.launch": "accelerate launch",
    "deepspeed.launcher.runner": "deepspeed",
}
