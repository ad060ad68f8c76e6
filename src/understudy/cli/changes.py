"""Changes of a training script that save memory, found in its source: each is a few lines, with the place and a reason.

    for change in find_changes({"train.py": text}):
        change.name, change.line, change.apply({"train.py": text})

A change is a guess from the text: whether it runs, and what it saves, its rehearsal says. Nothing is imported or run here.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

Files = Mapping[str, str]

OPTIMIZERS = ("Adam", "AdamW", "NAdam", "RAdam", "SGD", "Adagrad", "RMSprop")
FUSED = ("Adam", "AdamW", "SGD", "Adagrad")
LOSSES = ("cross_entropy", "nll_loss", "binary_cross_entropy_with_logits")
CHECKPOINT = "torch.utils.checkpoint.checkpoint"


@dataclass(frozen=True, slots=True)
class Edit:
    """Text in place of a stretch of a file: (line, column) from 1 and 0, as `ast` counts them, in bytes."""

    file: str
    start: tuple[int, int]
    end: tuple[int, int]
    text: str


@dataclass(frozen=True, slots=True)
class Change:
    """`rank` is the cost besides time: 0 nothing, 1 more work, 2 other numbers, 3 another way of training."""

    name: str
    line: str
    rank: int
    edits: tuple[Edit, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict, hash=False)
    arguments: tuple[str, ...] = ()
    """Options of the script, added to its command line: a later value of an option wins."""
    repeats: int = 1
    """How many steps do the work of one step before."""

    def is_compatible(self, other: Change) -> bool:
        """Whether both can be made: they touch different text and different settings."""
        if set(self.environment) & set(other.environment) or set(self.arguments[:1]) & set(
            other.arguments[:1]
        ):
            return False
        return not any(
            a.file == b.file
            and a.start < b.end
            and b.start < a.end
            and (a.text, a.start) != (b.text, b.start)
            for a in self.edits
            for b in other.edits
        ) and not any(
            a.file == b.file and a.start == b.start and a.text != b.text
            for a in self.edits
            for b in other.edits
        )


def apply_changes(changes: tuple[Change, ...], files: Files) -> dict[str, str]:
    """The new texts of the files that change."""
    edits = {edit for change in changes for edit in change.edits}
    changed = {}
    for file in {edit.file for edit in edits}:
        lines = files[file].encode().split(b"\n")
        starts = [0]
        for line in lines:
            starts.append(starts[-1] + len(line) + 1)
        data = files[file].encode()
        for edit in sorted(
            (e for e in edits if e.file == file), key=lambda e: (e.start, e.end), reverse=True
        ):
            first, last = (starts[line - 1] + column for line, column in (edit.start, edit.end))
            data = data[:first] + edit.text.encode() + data[last:]
        changed[file] = data.decode()
    return changed


def write_patch(changes: tuple[Change, ...], files: Files) -> str:
    """A unified diff, and the variables to set."""
    parts = [f"{name}={value}" for change in changes for name, value in change.environment.items()]
    parts += [" ".join(change.arguments) for change in changes if change.arguments]
    text = "".join(f"# run with {part}\n" for part in parts)
    for file, new in sorted(apply_changes(changes, files).items()):
        old = files[file].splitlines(keepends=True)
        text += "".join(difflib.unified_diff(old, new.splitlines(keepends=True), f"a/{file}", f"b/{file}"))
    return text


def find_changes(files: Files, arguments: tuple[str, ...] = ()) -> list[Change]:
    """Find every change that the source files and the command line allow. Files that are not Python are skipped."""
    changes = [
        Change(
            "expandable segments",
            "environment",
            0,
            (),
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        )
    ]
    for file, text in files.items():
        try:
            source = _Source(file, text, ast.parse(text))
        except SyntaxError:
            continue
        changes += _find_switch_changes(source, arguments)
        for finder in FINDERS:
            changes += finder(source)
    given = list(_find_argument_changes(arguments))
    # A number on the command line hides its default in the text.
    return [*(c for c in changes if not given or not c.name.startswith("batch ")), *given]


SWITCHES = {
    "checkpoint": 1, "checkpointing": 1, "gradientcheckpointing": 1, "gradckpt": 1, "recompute": 1, "sdpa": 0, "flash": 0,
    "flashattention": 0, "fused": 0, "amp": 2, "bf16": 2, "fp16": 2, "mixedprecision": 2,
}  # fmt: skip
"""Names of switches that scripts have for saving memory, and their rank."""


def _find_switch_changes(source: _Source, arguments: tuple[str, ...]) -> Iterator[Change]:
    """`add_argument("--checkpoint", action="store_true")`: the script's own way."""
    for call in source.calls("add_argument"):
        action = _list_keywords(call).get("action")
        if not isinstance(action, ast.Constant) or action.value != "store_true":
            continue
        for option in (
            part.value for part in call.args if isinstance(part, ast.Constant) and isinstance(part.value, str)
        ):
            rank = SWITCHES.get(_plain(option))
            if rank is not None and option not in arguments:
                yield Change(f"its own {option}", source.place(call), rank, arguments=(option,))


def _find_argument_changes(arguments: tuple[str, ...]) -> Iterator[Change]:
    """`--batch-size 32` on the command line."""
    for option, value in pairwise(arguments):
        if option.startswith("--") and _is_named(option, "batch") and value.isdecimal() and int(value) >= 2:
            half = int(value) // 2
            name = f"batch {value} -> {half} (accumulate 2 to keep the effective batch)"
            yield Change(name, "command line", 3, arguments=(option, str(half)), repeats=2)


@dataclass(slots=True)
class _Source:
    file: str
    text: str
    tree: ast.Module

    def calls(self, *names: str) -> Iterator[ast.Call]:
        """The calls of functions and methods with one of these names, in the order of the source."""
        found = [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Call) and last_name(node.func) in names
        ]
        yield from sorted(found, key=lambda call: (call.lineno, call.col_offset))

    def place(self, node: ast.expr | ast.stmt) -> str:
        return f"{self.file}:{node.lineno}"

    def insert(self, line: int, column: int, text: str) -> Edit:
        return Edit(self.file, (line, column), (line, column), text)

    def replace(self, node: ast.expr | ast.stmt, text: str) -> Edit:
        return Edit(self.file, (node.lineno, node.col_offset), _end(node), text)

    def source_of(self, node: ast.AST) -> str:
        return ast.get_source_segment(self.text, node) or ast.unparse(node)

    def add_keyword(self, call: ast.Call, text: str) -> Edit:
        """Insert a keyword argument before the closing bracket of a call."""
        line, column = _end(call)
        last = max(
            (_end(part) for part in (*call.args, *(word.value for word in call.keywords))), default=None
        )
        if last is None:
            return self.insert(line, column - 1, text)
        return self.insert(*last, f", {text}")

    def import_checkpoint(self) -> list[Edit]:
        """A line below the first import, unless it is there."""
        if "torch.utils.checkpoint" in self.text:
            return []
        for node in self.tree.body:
            if isinstance(node, (ast.Import, ast.ImportFrom)) and getattr(node, "module", "") != "__future__":
                return [self.insert(node.lineno, 0, "import torch.utils.checkpoint\n")]
        return [self.insert(1, 0, "import torch.utils.checkpoint\n")]


def _end(node: ast.expr | ast.stmt) -> tuple[int, int]:
    return node.end_lineno or node.lineno, node.end_col_offset or 0


def last_name(node: ast.expr) -> str:
    """`Adam` of `torch.optim.Adam`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _list_keywords(call: ast.Call) -> dict[str, ast.expr]:
    return {word.arg: word.value for word in call.keywords if word.arg}


def _has_unknown_keywords(call: ast.Call) -> bool:
    """`AdamW(parameters, **options)`: any of them may be given there."""
    return any(word.arg is None for word in call.keywords)


def _find_optimizer_changes(source: _Source) -> Iterator[Change]:
    for call in source.calls(*OPTIMIZERS):
        if _list_keywords(call).keys() & {"fused", "foreach"} or _has_unknown_keywords(call):
            continue
        name = last_name(call.func)
        if name in FUSED:
            yield Change(f"fused {name}", source.place(call), 0, (source.add_keyword(call, "fused=True"),))
        yield Change(
            f"{name} parameter by parameter",
            source.place(call),
            1,
            (source.add_keyword(call, "foreach=False"),),
        )


def _find_gradient_changes(source: _Source) -> Iterator[Change]:
    for call in source.calls("zero_grad"):
        kept = _list_keywords(call).get("set_to_none") or (call.args[0] if call.args else None)
        if isinstance(kept, ast.Constant) and kept.value is False:
            yield Change("gradients set to None", source.place(call), 0, (source.replace(kept, "True"),))


def _list_names(*nodes: ast.AST) -> set[str]:
    return {part.id for node in nodes for part in ast.walk(node) if isinstance(part, ast.Name)}


def _find_checkpoint_changes(source: _Source) -> Iterator[Change]:
    """`for block in self.blocks: x = block(x)`: the blocks are run again in the backward pass."""
    for loop in ast.walk(source.tree):
        if not isinstance(loop, ast.For) or not isinstance(loop.target, (ast.Name, ast.Tuple)):
            continue
        names = _list_names(loop.target)
        for statement in ast.walk(ast.Module(loop.body, [])):
            if not isinstance(statement, (ast.Assign, ast.AugAssign)):
                continue
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            passed_on = {name for target in targets for name in _list_names(target)}
            for call in ast.walk(statement.value):
                if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
                    continue
                if call.func.id not in names or passed_on.isdisjoint(_list_names(*call.args)):
                    continue  # not a block: it does not get what the one before it gave
                given = ", ".join(source.source_of(part) for part in (call.func, *call.args))
                words = "".join(
                    f", {word.arg}={source.source_of(word.value)}" for word in call.keywords if word.arg
                )
                edit = source.replace(call, f"{CHECKPOINT}({given}{words}, use_reentrant=False)")
                name = f"checkpoint each {call.func.id}"
                yield Change(name, source.place(call), 1, (edit, *source.import_checkpoint()))


def _find_pretrained_changes(source: _Source) -> Iterator[Change]:
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
            continue
        inner = [last_name(call.func) for call in ast.walk(node.value) if isinstance(call, ast.Call)]
        if {"from_pretrained", "from_config"} & set(inner) and "model" in node.targets[0].id.lower():
            text = f"\n{' ' * node.col_offset}{node.targets[0].id}.gradient_checkpointing_enable()"
            yield Change("gradient checkpointing", source.place(node), 1, (source.insert(*_end(node), text),))


def _find_loss_changes(source: _Source) -> Iterator[Change]:
    for call in source.calls(*LOSSES):
        if not call.args or any(isinstance(part, ast.Starred) for part in call.args):
            continue
        given = ", ".join(source.source_of(part) for part in (call.func, *call.args))
        words = "".join(f", {word.arg}={source.source_of(word.value)}" for word in call.keywords if word.arg)
        edit = source.replace(call, f"{CHECKPOINT}({given}{words}, use_reentrant=False)")
        yield Change("checkpoint the loss", source.place(call), 1, (edit, *source.import_checkpoint()))


def _find_autocast_changes(source: _Source) -> Iterator[Change]:
    """The statement that calls the model, under autocast: its indented lines are written anew."""
    if "autocast" in source.text:
        return
    models = {
        last_name(call.func.value)
        for call in source.calls("parameters")
        if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, (ast.Name, ast.Attribute))
    } - {"self", ""}
    for node in ast.walk(source.tree):
        if not isinstance(node, (ast.Assign, ast.Expr, ast.Return, ast.AugAssign)) or node.value is None:
            continue
        if any(
            isinstance(call, ast.Call) and last_name(call.func) in models for call in ast.walk(node.value)
        ):
            indent = " " * node.col_offset
            lines = source.source_of(node).split("\n")
            body = "\n".join([lines[0], *(f"    {line}" for line in lines[1:])])
            text = f'with torch.autocast("cuda", dtype=torch.bfloat16):\n{indent}    {body}'
            yield Change("bf16 autocast", source.place(node), 2, (source.replace(node, text),))


def _find_batch_changes(source: _Source) -> Iterator[Change]:
    for constant in find_constants(source, "batch"):
        size = constant.value
        if isinstance(size, int) and size >= 2:
            name = f"batch {size} -> {size // 2} (accumulate 2 to keep the effective batch)"
            yield Change(
                name, source.place(constant), 3, (source.replace(constant, str(size // 2)),), repeats=2
            )


def _find_relu_changes(source: _Source) -> Iterator[Change]:
    calls = [call for call in source.calls("ReLU", "ReLU6", "SiLU") if not call.args and not call.keywords]
    if calls:
        edits = tuple(source.add_keyword(call, "inplace=True") for call in calls)
        yield Change("activations in place", source.place(calls[0]), 0, edits)


FINDERS: tuple[Callable[[_Source], Iterator[Change]], ...] = (
    _find_optimizer_changes,
    _find_gradient_changes,
    _find_relu_changes,
    _find_checkpoint_changes,
    _find_pretrained_changes,
    _find_loss_changes,
    _find_autocast_changes,
    _find_batch_changes,
)
"""One function for each kind of change."""


# numbers of a script, by name


def find_constants(source: _Source, name: str) -> Iterator[ast.Constant]:
    """Integers that a script calls by a name like this: `BATCH = 8`, `batch_size=8`, the default of an option."""
    wanted = _plain(name)
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield from _find_assigned(target, node.value, wanted)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            yield from _find_assigned(node.target, node.value, wanted)
        elif isinstance(node, ast.Call):
            yield from _find_passed(node, wanted)


def _find_assigned(target: ast.expr, value: ast.expr, wanted: str) -> Iterator[ast.Constant]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        for one, part in zip(target.elts, value.elts, strict=True):
            yield from _find_assigned(one, part, wanted)
    elif _is_named(last_name(target), wanted) and _is_integer(value):
        assert isinstance(value, ast.Constant)
        yield value


def _find_passed(call: ast.Call, wanted: str) -> Iterator[ast.Constant]:
    words = _list_keywords(call)
    if last_name(call.func) == "add_argument":
        options = [
            part.value for part in call.args if isinstance(part, ast.Constant) and isinstance(part.value, str)
        ]
        default = words.get("default")
        if (
            default is not None
            and _is_integer(default)
            and any(_is_named(option, wanted) for option in options)
        ):
            assert isinstance(default, ast.Constant)
            yield default
        return
    for name, value in words.items():
        if _is_named(name, wanted) and _is_integer(value):
            assert isinstance(value, ast.Constant)
            yield value


def _is_integer(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


def _is_named(name: str, wanted: str) -> bool:
    return _plain(name) in (
        wanted,
        f"{wanted}size",
        f"n{wanted}",
        f"micro{wanted}size",
        f"perdevicetrain{wanted}size",
    )


def set_constant(files: Files, name: str, value: int) -> dict[str, str] | None:
    """Return the files with all numbers of this name set; None without such a number."""
    edits = []
    for file, text in files.items():
        source = _Source(file, text, ast.parse(text))
        edits += [source.replace(constant, str(value)) for constant in find_constants(source, name)]
    return apply_changes((Change(name, "", 0, tuple(edits)),), files) if edits else None
