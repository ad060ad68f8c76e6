"""What `understudy plan` searches: the options that the script's parser shows, names given by --vary, changes of its text.

    found = find_space(request)
    found.space.list_candidates()
    found.make_variant(candidate)            what is rehearsed
    found.write_command(candidate)           what one types to run it

A name is, in this order: a mark `{NAME}` in the command line, an option of the script's parser, an entry of a
configuration file that the command line names, a word `NAME=…` or `--NAME …` of the command line (for parsers that can't be
read), a setting of the launcher, a number of the script's text.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from understudy.cli.changes import SWITCHES, Change, apply_changes, find_changes, set_constant, write_patch
from understudy.cli.configurations import find_configurations, read_entries, set_entry
from understudy.cli.rehearsals import Variant
from understudy.errors import UnderstudyError
from understudy.plans.axes import (
    ACCUMULATE,
    BATCH,
    CHECKPOINT,
    DP,
    NODES,
    OFF,
    PER_NODE,
    PP,
    TP,
    ZERO,
    Axis,
    Value,
    check_axis,
    double,
    find_role,
    normalise,
    parse_value,
)
from understudy.plans.candidates import Candidate, Space
from understudy.plans.constraints import PlanRequirement

MOST_BATCH = 64
LARGER_BATCH = 16
"""Times the batch of the command line: the largest that is tried."""
FLAG, SWITCH, TRUTH, CHOICE = "flag", "switch", "truth", "choice"
"""Kinds of options: see `simulation.parsers`."""
ENTRY = "entry"
"""The kind of an entry of a configuration file."""
NUMBERS = ("int", "float")
ACCELERATE = (
    "fsdp_",
    "zero_",
    "mixed_precision",
    "num_processes",
    "num_machines",
    "use_fsdp",
    "use_deepspeed",
    "dynamo_",
)
"""How the names of those options of `accelerate launch` begin that change a run."""


@dataclass(frozen=True)
class SearchRequest:
    """What the command line asks for. `launcher`: words before the script; `parsers`: what its parser shows. `module`: the
    name that `-m` is given; `script` is its file then."""

    script: str
    arguments: tuple[str, ...]
    files: Mapping[str, str]
    launcher: tuple[str, ...] = ()
    parsers: Sequence[Mapping[str, Any]] = ()
    varied: tuple[Axis, ...] = ()
    requirements: tuple[PlanRequirement, ...] = ()
    nodes: int = 1
    per_node: int = 1
    has_ranks: bool = False
    global_batch: int | None = None
    tries_changes: bool = True
    module: str = ""

    @property
    def program(self) -> tuple[str, ...]:
        """The words that name it, as for python."""
        return ("-m", self.module) if self.module else (self.script,)


@dataclass(frozen=True)
class Setter:
    """How a value becomes part of the run. `kind`: mark, option, entry, word, launcher, ranks, constant, change. For an
    entry, `flag` is the path of its file, and `option` its name there."""

    kind: str
    flag: str = ""
    option: str = ""
    off: str = ""
    before: str = ""
    """The word of a command, which stands after this option."""
    change: Change | None = None
    start: Value | None = None
    """The value of the command line as it is."""


@dataclass
class FoundSpace:
    request: SearchRequest
    space: Space
    setters: dict[str, Setter]
    not_searched: list[str] = field(default_factory=list)
    configurations: Mapping[str, str] = field(default_factory=dict)
    """Texts of the configuration files, by path."""

    def find_first(self, candidates: Sequence[Candidate]) -> Candidate | None:
        """The one that is most like the command line as it is."""

        def difference(candidate: Candidate) -> int:
            return sum(self.setters[name].start != value for name, value in candidate.values)

        return min(candidates, key=difference, default=None)

    @property
    def has_options(self) -> bool:
        """Whether anything but changes of the text is searched."""
        return any(axis.origin != "change" for axis in self.space.axes)

    @property
    def accumulation(self) -> str | None:
        """The name of the option for passes of a step."""
        return next((name for name in self.setters if find_role(name) == ACCUMULATE), None)

    def with_passes(self, candidate: Candidate, passes: int) -> Candidate:
        """The same with another number of passes of a step."""
        name = self.accumulation
        assert name is not None
        values = {**candidate.table, name: passes}
        return Candidate(tuple(values.items()), replace(candidate.shape, accumulate=passes))

    def make_variant(self, candidate: Candidate, options: Sequence[str] = ()) -> Variant:
        request, applied = self.request, self._apply(candidate)
        shape = candidate.shape
        words: list[str] = []
        if request.has_ranks:
            words = [
                "--nproc-per-node",
                str(shape.per_node),
                "--nnodes",
                str(max(1, shape.ranks // shape.per_node)),
            ]
            if shape.ranks > 3:
                words += ["--ranks", "classes"]
        return Variant(
            request.script, applied.arguments, self._change_texts(applied), applied.environment,
            (*options, *words), launcher=applied.launcher, module=request.module,
            configurations=self._change_configurations(applied),
        )  # fmt: skip

    def write_command(self, candidate: Candidate) -> str:
        request, applied = self.request, self._apply(candidate)
        shape = candidate.shape
        launcher = list(applied.launcher)
        if not launcher and request.has_ranks:
            nodes = max(1, shape.ranks // shape.per_node)
            launcher = [
                "torchrun",
                *(["--nnodes", str(nodes)] if nodes > 1 else []),
                "--nproc-per-node",
                str(shape.per_node),
            ]
        words = [*(launcher or ["python"]), *request.program, *applied.arguments]
        return " ".join([*(f"{k}={v}" for k, v in applied.environment.items()), shlex.join(words)])

    def write_patch(self, candidate: Candidate) -> str:
        applied = self._apply(candidate)
        files = self.request.files
        patch = write_patch(tuple(replace(c, environment={}, arguments=()) for c in applied.changes), files)
        settings = [f"# set {name} = {value}" for name, value in applied.constants]
        settings += [f"# in {path}: set {name} = {_write(value)}" for path, name, value in applied.entries]
        return "\n".join([*settings, *([patch] if patch else [])])

    def _change_configurations(self, applied: _Applied) -> dict[str, str]:
        texts: dict[str, str] = {}
        for path, name, value in applied.entries:
            texts[path] = set_entry(texts.get(path, self.configurations[path]), path, name, value)
        return texts

    def _change_texts(self, applied: _Applied) -> dict[str, str]:
        files = {**self.request.files}
        texts = apply_changes(applied.changes, files)
        for name, value in applied.constants:
            texts |= set_constant({**files, **texts}, name, value) or {}
        return texts

    def _apply(self, candidate: Candidate) -> _Applied:
        request = self.request
        arguments, launcher = list(request.arguments), list(request.launcher)
        applied = _Applied()
        for name, value in candidate.values:
            setter = self.setters[name]
            if setter.kind == "change" and setter.change is not None and value is True:
                applied.changes = (*applied.changes, setter.change)
                applied.environment |= setter.change.environment
            elif setter.kind == "mark":
                arguments = [part.replace("{" + setter.flag + "}", _write(value)) for part in arguments]
            elif setter.kind == "option" and value != setter.start:
                arguments = _set_option(arguments, setter, value)
            elif setter.kind == ENTRY and value != setter.start:
                applied.entries.append((setter.flag, setter.option, value))
            elif setter.kind == "word":
                arguments = _set_word(arguments, setter.flag, _write(value))
            elif setter.kind == "launcher" and value != setter.start:
                launcher = _set_option(launcher, setter, _write(value))
            elif setter.kind == "constant" and value != setter.start:
                assert isinstance(value, int)
                applied.constants.append((name, value))
        applied.arguments, applied.launcher = tuple(arguments), tuple(launcher)
        return applied


@dataclass
class _Applied:
    arguments: tuple[str, ...] = ()
    launcher: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    changes: tuple[Change, ...] = ()
    constants: list[tuple[str, int]] = field(default_factory=list)
    entries: list[tuple[str, str, Value]] = field(default_factory=list)
    """Path, name and value, for configuration files."""


def _write(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _set_option(arguments: list[str], setter: Setter, value: Value) -> list[str]:
    """The arguments with this value of the option: in place of the present one, or after all others."""
    kept: list[str] = []
    position = 0
    takes_value = setter.option not in (FLAG, SWITCH)
    while position < len(arguments):
        word = arguments[position]
        if word == setter.flag or (setter.off and word == setter.off):
            position += 2 if takes_value and _has_value(arguments, position) else 1
        elif word.startswith(f"{setter.flag}="):
            position += 1
        else:
            kept.append(word)
            position += 1
    if setter.option in (FLAG, SWITCH):
        added = [setter.flag] if value is True else [setter.off] if setter.off else []
    else:
        added = [setter.flag, str(value)]
    place = kept.index(setter.before) if setter.before in kept else len(kept)
    return [*kept[:place], *added, *kept[place:]]


def _has_value(arguments: Sequence[str], position: int) -> bool:
    """Whether the next word is the value of the option at this position, as argparse decides it: not another option."""
    following = arguments[position + 1 : position + 2]
    return bool(following) and (
        not following[0].startswith("-") or isinstance(_read(following[0], "float"), float)
    )


def _set_word(arguments: list[str], name: str, value: str) -> list[str]:
    """`NAME=…`, or the word after `NAME`."""
    found = [f"{name}={value}" if part.startswith(f"{name}=") else part for part in arguments]
    if name in found[:-1]:
        found[found.index(name) + 1] = value
    return found


# --- the space


def find_space(request: SearchRequest) -> FoundSpace:
    configurations = find_configurations(request.arguments)
    shown = _list_options(request, configurations)
    setters: dict[str, Setter] = {}
    axes: list[Axis] = []
    for axis in request.varied:
        setter = _find_setter(axis, request, shown)
        values = axis.values or _default_values(axis.role, shown.get(axis.name), setter, request)
        if not values:
            raise UnderstudyError(f"--vary {axis.name}: expected values, as in {axis.name}=1,2,4")
        axes.append(
            check_axis(
                replace(axis, values=_as_kind(values, shown.get(axis.name)), origin=_origin_of(setter))
            )
        )
        setters[axis.name] = setter
    if not request.varied:
        for axis, setter in _find_axes(request, shown):
            axes.append(axis)
            setters[axis.name] = setter
    if request.tries_changes:
        for change in _choose_changes(request, {axis.role for axis in axes}, shown):
            name = change.name
            setters[name] = Setter("change", change=change, start=False)
            axes.append(Axis(name, (False, True), CHECKPOINT if "checkpoint" in name else "", "change"))
    fixed = {
        name: start
        for name, option in shown.items()
        if name not in setters and (start := _find_start(option, request.arguments)) is not None
    }
    derived = _find_derived(request, shown, setters, axes)
    accumulation = next((name for name in fixed if find_role(name) == ACCUMULATE), None)
    if derived is not None:
        fixed.pop(derived, None)
    elif accumulation is not None:
        setters.setdefault(accumulation, _make_option_setter(shown[accumulation], request.arguments))
    space = Space(
        tuple(axes),
        fixed,
        request.requirements,
        request.nodes,
        request.per_node,
        request.global_batch,
        derived,
    )
    searched = [name for name in (*(axis.name for axis in axes), derived) if name is not None]
    flags = {setters[name].flag for name in searched}
    taken = {id(o) for name, o in shown.items() if name in searched or not flags.isdisjoint(o["flags"])}
    left = [str(option["name"]) for option in shown.values() if id(option) not in taken]
    return FoundSpace(request, space, setters, list(dict.fromkeys(left)), configurations)


def _list_options(request: SearchRequest, configurations: Mapping[str, str]) -> dict[str, Mapping[str, Any]]:
    """The options of the parser, and the entries of configuration files, by name. Of an option that is an entry as well, the
    value is that of the file."""
    shown: dict[str, Mapping[str, Any]] = {}
    for option in request.parsers:
        for flag in option["flags"]:
            shown.setdefault(normalise(flag), option)
    for path, text in configurations.items():
        for key, value in read_entries(text, path).items():
            name = normalise(key)
            if name in shown:
                same = {**shown[name], "default": value}
                shown |= {normalise(flag): same for flag in same["flags"]}
            else:
                shown[name] = {
                    "flags": [], "name": name, "kind": ENTRY, "default": value, "choices": None, "path": path, "key": key,
                }  # fmt: skip
    return shown


def _origin_of(setter: Setter) -> str:
    return "launcher" if setter.kind in ("launcher", "ranks") else "asked"


def _find_derived(
    request: SearchRequest,
    shown: Mapping[str, Mapping[str, Any]],
    setters: dict[str, Setter],
    axes: Sequence[Axis],
) -> str | None:
    """The option for accumulation, if it follows from --global-batch."""
    if request.global_batch is None or any(axis.role == ACCUMULATE for axis in axes):
        return None
    for name, option in shown.items():
        if find_role(name) == ACCUMULATE:
            setters[name] = _make_option_setter(option, request.arguments)
            return name
    for word in request.arguments:
        name = word.partition("=")[0]
        if "=" in word and find_role(normalise(name)) == ACCUMULATE:
            setters[normalise(name)] = Setter("word", flag=name)
            return normalise(name)
    if set_constant(request.files, ACCUMULATE, 1) is not None:
        setters[ACCUMULATE] = Setter("constant")
        return ACCUMULATE
    return None


def _find_setter(axis: Axis, request: SearchRequest, shown: Mapping[str, Mapping[str, Any]]) -> Setter:
    name = axis.name
    for word in request.arguments:
        for mark in re.findall(r"\{([\w.-]+)\}", word):
            if normalise(mark) == name:
                return Setter("mark", flag=mark)
    if name in shown:
        return _make_option_setter(shown[name], request.arguments)
    inner = [option for key, option in shown.items() if key.endswith(f"_{name}") and option["kind"] == ENTRY]
    if len(inner) == 1:  # the only entry of this name, in whatever section
        return _make_option_setter(inner[0], request.arguments)
    for position, word in enumerate(request.arguments):
        given, equals, value = word.partition("=")
        if normalise(given.lstrip("+-")) != name:
            continue
        if equals:
            return Setter("word", flag=given, start=parse_value(value))
        following = request.arguments[position + 1 : position + 2]
        if given.startswith("-") and following and not following[0].startswith("--"):
            return Setter("word", flag=given, start=parse_value(following[0]))
    if axis.role in (NODES, PER_NODE):
        if not request.has_ranks:
            raise UnderstudyError(
                f"--vary {name}: expected a script with several ranks, got one that runs on one card"
            )
        if request.launcher[:1] == ("accelerate",):
            raise UnderstudyError(
                f"--vary {name}: not an option of accelerate launch; name num_processes or num_machines"
            )
        return Setter("ranks", start=request.per_node if axis.role == PER_NODE else request.nodes)
    if request.launcher[:1] == ("accelerate",) and name.startswith(ACCELERATE):
        return _make_launcher_setter(name, request.launcher)
    similar = next((n for n in shown if axis.role and find_role(n) == axis.role), None)
    if similar is not None:
        return _make_option_setter(shown[similar], request.arguments)
    if all(type(value) is int for value in axis.values) and set_constant(request.files, name, 1) is not None:
        return Setter("constant")
    raise UnderstudyError(
        f"--vary {name}: not found: {request.script} has no option, word or number of this name; write {{{name}}} where it "
        "stands in the command line"
    )


def _make_launcher_setter(name: str, launcher: Sequence[str]) -> Setter:
    """`start`: the value in its command line, or in the configuration file that this names."""
    start = _read_settings(launcher).get(name)
    option = {"flags": [f"--{name}"], "kind": "text", "default": start}
    return Setter("launcher", flag=f"--{name}", start=_find_start(option, launcher))


def _make_option_setter(option: Mapping[str, Any], arguments: Sequence[str]) -> Setter:
    if option["kind"] == ENTRY:
        return Setter(ENTRY, flag=option["path"], option=option["key"], start=option["default"])
    flags = list(option["flags"])
    positive = next((flag for flag in flags if not flag.startswith("--no-")), flags[0])
    given = next((flag for flag in flags if flag in arguments), positive)
    off = next((flag for flag in flags if flag.startswith("--no-")), "") if option["kind"] == SWITCH else ""
    return Setter(
        "option", flag=given, option=option["kind"], off=off, start=_find_start(option, arguments),
        before=option.get("before", ""),
    )  # fmt: skip


def _find_start(option: Mapping[str, Any], arguments: Sequence[str]) -> Value | None:
    """The value on the command line, or the default."""
    default: Value | None = option["default"]
    for position, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if name not in option["flags"]:
            continue
        if option["kind"] in (FLAG, SWITCH):
            default = not name.startswith("--no-")
        elif equals or _has_value(arguments, position):
            default = _read(value if equals else arguments[position + 1], option["kind"])
        elif option["kind"] == TRUTH:
            default = True
    return default


def _read(text: str, kind: str) -> Value:
    try:
        return int(text) if kind == "int" else float(text) if kind == "float" else _read_word(text, kind)
    except ValueError:
        return text


def _read_word(text: str, kind: str) -> Value:
    if kind == TRUTH and text.lower() in ("true", "false"):
        return text.lower() == "true"
    return int(text) if text.isdecimal() else text


def _as_kind(values: Sequence[Value], option: Mapping[str, Any] | None) -> tuple[Value, ...]:
    """Values as the option takes them: for an option with words, `off` is a word; for a flag, `off` leaves the flag out."""
    if option is None:
        return tuple(values)
    kind = option["kind"]
    choices = option["choices"]
    found: list[Value] = []
    for value in values:
        if kind == CHOICE and choices is not None and value not in choices:
            same = next((choice for choice in choices if str(choice) == str(value)), None)
            if same is None:
                raise UnderstudyError(
                    f"--vary {option['name']}: invalid choice {value!r} (choose from {', '.join(map(str, choices))})"
                )
            value = same
        if kind in (FLAG, SWITCH) and not isinstance(value, bool):
            raise UnderstudyError(
                f"--vary {option['name']}: expected on or off (an option without a value), got {value}"
            )
        if kind in NUMBERS and isinstance(value, (str, bool)):
            raise UnderstudyError(f"--vary {option['name']}: expected numbers, got {value}")
        found.append(value)
    return tuple(found)


def _default_values(
    role: str, option: Mapping[str, Any] | None, setter: Setter, request: SearchRequest
) -> tuple[Value, ...]:
    """The values to try for an option without given values."""
    start = setter.start
    if option is not None and (option["kind"] in (FLAG, SWITCH, TRUTH) or isinstance(start, bool)):
        return (False, True)
    world = request.nodes * request.per_node
    if role == TP:
        return (
            tuple(double(1, request.per_node)) if _is_power(request.per_node) else _divisors(request.per_node)
        )
    if role in (PP, DP):
        return _divisors(world)
    if option is not None and option["choices"]:
        return tuple(option["choices"])
    if role == CHECKPOINT and start in CHECKPOINTS:
        return CHECKPOINTS
    if role == ZERO:
        return (0, 1, 2, 3)
    if isinstance(start, bool) or not isinstance(start, int) or start < 1:
        return ()
    if role == BATCH:
        most = max(MOST_BATCH, LARGER_BATCH * start)
        values = {start, *double(1, most)}
        if request.global_batch is not None:
            values = {value for value in values if request.global_batch % value == 0}
        return tuple(sorted(values))
    return tuple(sorted({max(1, start // 2), start, 2 * start, 4 * start}))


def _is_power(number: int) -> bool:
    return number & (number - 1) == 0


def _divisors(number: int) -> tuple[int, ...]:
    return tuple(value for value in range(1, number + 1) if number % value == 0)


SEARCHED = (BATCH, CHECKPOINT, TP, PP, ZERO)
"""Roles of options that are searched without being named."""
CHECKPOINTS = ("none", "selective", "full")
"""The words of options for checkpointing, where one of them is the value."""
WORDS = {
    **dict.fromkeys(("precision", "mixedprecision", "dtype", "ampdtype"), ("bf16", "bfloat16", "bf16-mixed")),
    **dict.fromkeys(
        ("attn", "attention", "attnimplementation", "attentionimplementation", "attnimpl"), ("eager", "sdpa")
    ),
}
"""By the name of an option with choices: those of them that are searched beside its value."""
UNCHANGED = ("fp32", "float32", "32")
OF_ALL_RANKS = "train_batch_size"
"""In DeepSpeed's file: it has to agree with the other sizes there."""


def _find_axes(request: SearchRequest, shown: Mapping[str, Mapping[str, Any]]) -> list[tuple[Axis, Setter]]:
    """The axes of the script's own options: those with a role in memory and time, and switches that save either."""
    found: list[tuple[Axis, Setter]] = []
    seen: set[int] = set()
    roles: set[str] = set()
    for name, option in shown.items():
        role = find_role(name)
        plain = "".join(c for c in name.lower() if c.isalnum())
        is_switch = plain in SWITCHES and (
            option["kind"] in (FLAG, SWITCH, TRUTH) or isinstance(option["default"], bool)
        )
        words = _choose_words(plain, option)
        if id(option) in seen or (role in roles and role) or not (role in SEARCHED or is_switch or words):
            continue
        if role in (TP, PP) and not request.has_ranks:
            continue
        if (plain == "fp16" and "bf16" in shown) or (option["kind"] == ENTRY and name == OF_ALL_RANKS):
            continue
        setter = _make_option_setter(option, request.arguments)
        values = words or _default_values(role, option, setter, request)
        if len(values) > 1:
            seen.add(id(option))
            roles.add(role)
            if setter.start is not None and setter.start not in values:
                values = (setter.start, *values)
            found.append((Axis(name if role else normalise(option["name"]), values, role, "found"), setter))
    return [*found, *_find_launcher_axes(request)]


def _choose_words(plain: str, option: Mapping[str, Any]) -> tuple[Value, ...]:
    """The value of an option with choices, and those that may be faster and train the same model."""
    start, choices = option["default"], option["choices"] or ()
    if start is None:  # usually as if it was the word for that
        start = next((choice for choice in choices if choice in OFF or choice in UNCHANGED), None)
    if start is None or start not in choices:
        return ()
    better = WORDS.get(plain, ())
    if plain in ("optim", "optimizer"):
        better = (f"{start}_fused", f"fused_{start}")
    words = tuple(dict.fromkeys([start, *(choice for choice in choices if choice in better)]))
    return words if len(words) > 1 else ()


def _find_launcher_axes(request: SearchRequest) -> list[tuple[Axis, Setter]]:
    """How `accelerate launch` shards a model with FSDP, where it is asked to."""
    settings = _read_settings(request.launcher)
    if request.launcher[:1] != ("accelerate",) or not (
        settings.get("distributed_type") == "FSDP" or "--use_fsdp" in request.launcher
    ):
        return []
    version = _make_launcher_setter("fsdp_version", request.launcher).start
    values: tuple[Value, ...]
    if version in (2, "2"):
        name, values = "fsdp_reshard_after_forward", (True, False)
    else:
        mixed = ("HYBRID_SHARD",) if request.nodes > 1 else ()
        name, values = "fsdp_sharding_strategy", ("FULL_SHARD", "SHARD_GRAD_OP", *mixed)
    setter = _make_launcher_setter(name, request.launcher)
    if setter.start is not None and setter.start not in values:
        values = (setter.start, *values)
    return [(Axis(name, values, origin="launcher"), setter)]


def _read_settings(launcher: Sequence[str]) -> dict[str, Value]:
    """The entries of the launcher's configuration file, without their sections."""
    return {
        key.rpartition(".")[2]: value
        for path, text in find_configurations(launcher).items()
        for key, value in read_entries(text, path).items()
    }


TRIED = ("fused ", "bf16 autocast", "checkpoint each", "gradient checkpointing", "checkpoint the loss")
"""How the names of those changes begin that may make a run faster, or let a larger batch in."""


def _choose_changes(
    request: SearchRequest, roles: set[str], shown: Mapping[str, Mapping[str, Any]]
) -> list[Change]:
    """The text's own changes, without those for which the script has an option, whether that is searched or not."""
    names = {"".join(c for c in name.lower() if c.isalnum()) for name in shown}
    has_checkpoints = CHECKPOINT in roles or any(find_role(name) == CHECKPOINT for name in shown)
    has_precision = bool(names & {"amp", "bf16", "fp16", "mixedprecision", "precision", "dtype"})
    chosen: dict[str, Change] = {}
    for change in find_changes(request.files, request.arguments):
        if not change.name.startswith(TRIED) or change.arguments:
            continue
        if has_checkpoints and "checkpoint" in change.name and "loss" not in change.name:
            continue
        if has_precision and change.name == "bf16 autocast":
            continue
        known = chosen.get(change.name)
        if known is None:
            chosen[change.name] = change
        elif known.is_compatible(change):
            chosen[change.name] = replace(known, edits=(*known.edits, *change.edits))
    return list(chosen.values())


USES_RANKS = re.compile(
    r"\b(torch\.distributed|init_process_group|LOCAL_RANK|WORLD_SIZE|Accelerator|accelerate|Trainer|lightning|Fabric|"
    r"deepspeed|DistributedDataParallel|fully_shard)\b"
)


def uses_ranks(files: Mapping[str, str]) -> bool:
    """Whether anything in the texts looks like a program for several cards."""
    return any(USES_RANKS.search(text) for text in files.values())
