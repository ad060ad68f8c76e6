"""`understudy model`, `check` and `graph`: a model's layers, its output for every size, its operators."""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from understudy.cli.commands import Command
from understudy.cli.tables import clean, format_count, format_size, print_table
from understudy.cli.targets import (
    InputSpec,
    LoadedModel,
    ModelTarget,
    TargetError,
    call_with,
    choose_examples,
    choose_inputs,
    load_target,
    parse_input,
    parse_target,
    with_one_row,
)
from understudy.errors import UnderstudyError

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from understudy.cli.layer_table import Layer, LayerRow
    from understudy.fake.mode import FakeTensorMode
    from understudy.shapes.env import ShapeEnv

FAILED = 1
"""The exit code where the model itself fails, or does not hold for every size."""

TARGETS = """\
TARGET is file.py:name, package.module:name, or the config.json of a model of transformers. The name is a class, a module,
or a function; it may be called with literals: "model.py:GPT(layers=4)". An input is written as "x: f32[batch, 3, h, w]":
dtypes are f32, f16, bf16, i64, b8, …; a size is a number, a name, or a name with an example (batch=8). Without --input it
is guessed from the configuration or the first layer."""


def _add_target(parser: argparse.ArgumentParser, examples: str) -> None:
    parser.epilog = f"{TARGETS}\n\nexamples:\n{examples}"
    parser.add_argument("target", metavar="TARGET", help="the model")
    parser.add_argument(
        "--input", action="append", default=[], metavar="SPEC", help="an input, as `x: f32[batch, 3, 224]`"
    )


def _parse_words(options: argparse.Namespace) -> tuple[ModelTarget, list[InputSpec]]:
    """Before torch is imported."""
    inputs = [parse_input(text) for text in options.input]
    choose_examples(inputs)
    return parse_target(options.target), inputs


def _run_guarded(command: str, run: Callable[[], int]) -> int:
    """What the user's own code raises is shown with its lines, without ours."""
    try:
        return run()
    except (TargetError, BrokenPipeError):  # the latter: the pipe is closed (`| head`)
        raise
    except Exception as error:
        from understudy.lines import is_user_file  # why: it imports torch, which is there by now

        frames = [
            frame for frame in traceback.extract_tb(error.__traceback__) if is_user_file(frame.filename)
        ]
        text = str(error) if isinstance(error, UnderstudyError) else f"{type(error).__name__}: {error}"
        shown = "".join(traceback.format_list(frames)) + f"understudy {command}: the model failed: {text}"
        for line in shown.splitlines():
            print(clean(line), file=sys.stderr)
        return FAILED


# understudy model

COLUMNS = ("input", "output", "params", "macs", "memory", "calls")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    _add_target(
        parser,
        """\
    understudy model train.py:GPT
    understudy model torchvision.models:resnet50 --input "x: f32[8, 3, 224, 224]" --depth 2
    understudy model llama/config.json --train --sort memory""",
    )
    parser.add_argument("--depth", type=int, default=3, metavar="N", help="levels of modules (default: 3)")
    parser.add_argument("--columns", metavar="A,B", help=f"columns to print: {', '.join(COLUMNS)}")
    parser.add_argument(
        "--sort", choices=("params", "macs", "memory"), help="the layers without children, largest first"
    )
    parser.add_argument(
        "--train", action="store_true", help="train mode; memory is what is saved for the backward pass"
    )
    parser.add_argument("--json", action="store_true", help="the whole tree, sizes in bytes")


def show_model(options: argparse.Namespace) -> int:
    target, given = _parse_words(options)
    columns = _parse_columns(options.columns)
    return _run_guarded("model", lambda: _show_model(options, target, given, columns))


def _parse_columns(text: str | None) -> tuple[str, ...]:
    columns = COLUMNS[:5] if text is None else tuple(part.strip() for part in text.split(","))
    for name in columns:
        if name not in COLUMNS:
            raise TargetError(f"--columns: invalid choice {name!r} (choose from {', '.join(COLUMNS)})")
    return columns


def _show_model(
    options: argparse.Namespace, target: ModelTarget, given: list[InputSpec], columns: Sequence[str]
) -> int:
    # why: report invalid arguments before torch is imported
    import torch

    from understudy.cli.layer_table import fold_layers, measure_layers  # why: as above
    from understudy.simulation.storages import ObservedMode  # why: as above

    mode = ObservedMode()
    program = load_target(target, mode)
    model = program.function
    if not isinstance(model, torch.nn.Module):
        raise TargetError(f"{target.text} is a function: `understudy graph` shows its operators")
    inputs = choose_inputs(program, given, target.text)
    if not given:
        inputs = with_one_row(inputs)
    values = _make_values(mode, inputs)
    model.train(options.train)
    with mode, torch.set_grad_enabled(options.train):
        root = measure_layers(model, mode, lambda: call_with(model, inputs, values))
    if options.json:
        print(
            json.dumps(
                {"inputs": [str(spec) for spec in inputs], "train": options.train, "model": root.to_record()}
            )
        )
        return 0
    _print_inputs(inputs, program, given)
    rows = fold_layers(root, max(0, options.depth))
    if options.sort:
        rows = _sort_leaves(root, options.sort, options.train)
    _print_layers(rows, columns, options.train)
    _print_sums(root, options.train)
    return 0


def _make_values(mode: FakeTensorMode, inputs: Sequence[InputSpec]) -> list[Any]:
    import torch  # why: after the words have been read

    examples = choose_examples(inputs)
    with mode:
        return [
            torch.zeros(
                [size if isinstance(size, int) else examples[size[0]] for size in spec.sizes],
                dtype=getattr(torch, spec.dtype),
                device=spec.device,
            )
            for spec in inputs
        ]


def _print_inputs(inputs: Sequence[InputSpec], program: LoadedModel, given: Sequence[InputSpec]) -> None:
    examples = choose_examples(inputs)
    sizes = ", ".join(f"{name}={size}" for name, size in examples.items())
    guessed = "" if given else f" (guessed from {program.origin})"
    print(
        clean(f"input: {'; '.join(map(str, inputs))}{f' with {sizes}' if sizes else ''}{guessed}"), end="\n\n"
    )


def _sort_leaves(root: Layer, by: str, train: bool) -> list[LayerRow]:
    from understudy.cli.layer_table import LayerRow  # why: it imports torch

    def size(layer: Layer) -> int:
        return {"params": layer.parameters, "macs": layer.macs}.get(by, _measure_memory(layer, train))

    leaves = [layer for layer in root.walk() if not layer.children]
    return [
        LayerRow(layer, layer.path or layer.name, 0, 1) for layer in sorted(leaves, key=size, reverse=True)
    ]


def _measure_memory(layer: Layer, train: bool) -> int:
    return layer.saved_bytes if train else layer.output_bytes


def _print_layers(rows: Sequence[LayerRow], columns: Sequence[str], train: bool) -> None:
    titles = {"memory": "saved" if train else "output size", "params": "parameters", "macs": "MACs"}
    cells = [
        [_write_label(row), *(_write_cell(row.layer, column, train) for column in columns)] for row in rows
    ]
    left = (True, *(column in ("input", "output") for column in columns))
    print_table(("layer", *(titles.get(column, column) for column in columns)), cells, left)


def _write_label(row: LayerRow) -> str:
    kind = row.layer.kind if row.label != row.layer.kind else ""
    times = f" x{row.repeats}" if row.repeats > 1 else ""
    return f"{'  ' * row.depth}{row.label}{f' ({kind}{times})' if kind or times else ''}"


def _write_cell(layer: Layer, column: str, train: bool) -> str:
    if column == "params":
        return f"{layer.parameters:,}" if layer.parameters else "-"
    if column == "calls":
        return str(layer.calls)
    if not layer.calls:
        return "" if layer.children else "(not called)" if column == "output" else ""
    if column == "macs":
        return format_count(layer.macs) if layer.macs else "-"
    if column == "memory":
        memory = _measure_memory(layer, train)
        return format_size(memory) if memory else "-"
    return layer.inputs if column == "input" else layer.outputs


def _print_sums(root: Layer, train: bool) -> None:
    frozen = root.parameters - root.trainable
    print(
        f"\nparameters: {root.parameters:,} ({format_count(root.parameters)}), {format_size(root.parameter_bytes)}"
        f"{f'; {frozen:,} of them frozen' if frozen else ''}"
    )
    print(f"multiply-adds of products: {root.macs:,} ({format_count(root.macs)}); FLOPs are twice as many")
    if train:
        print(
            f"saved for the backward pass: {format_size(root.saved_bytes)}, each storage counted where it is saved first"
        )
    idle = [layer.path for layer in root.walk() if not layer.calls and not layer.children]
    if idle:
        print(
            clean(f"not called: {', '.join(idle[:8])}{f' and {len(idle) - 8} more' if len(idle) > 8 else ''}")
        )


# understudy check


def add_check_arguments(parser: argparse.ArgumentParser) -> None:
    _add_target(
        parser,
        """\
    understudy check model.py:Net --input "x: f32[batch, 3, h, w]"
    understudy check llama/config.json

Exit code 1: the model fails, or a named size is specialised to a number.""",
    )
    parser.add_argument("--json", action="store_true", help="as data")


def check_model(options: argparse.Namespace) -> int:
    target, given = _parse_words(options)
    return _run_guarded("check", lambda: _check_model(options, target, given))


def _check_model(options: argparse.Namespace, target: ModelTarget, given: list[InputSpec]) -> int:
    # why: report invalid arguments before torch is imported
    import torch

    from understudy.cli.layer_table import describe_tensor  # why: as above
    from understudy.fake.mode import FakeTensorMode  # why: as above
    from understudy.shapes.env import ShapeEnv  # why: as above

    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    program = load_target(target, mode)
    inputs = choose_inputs(program, given, target.text)
    values = _make_symbolic_values(mode, inputs)
    if isinstance(program.function, torch.nn.Module):
        program.function.eval()
    with mode, torch.no_grad():
        result = call_with(program.function, inputs, values)
    outputs = [(name, describe_tensor(tensor)) for name, tensor in _name_tensors(result)]
    # Sizes of 0 or 1 in constants of the model are not inputs: leave them out.
    names = {name for spec in inputs for name in spec.names}
    fixed = [entry for entry in env.specialisations if entry.what in names]
    if options.json:
        print(json.dumps(_make_check_record(inputs, outputs, env), indent=2))
    else:
        _print_check(inputs, outputs, env)
    return FAILED if fixed else 0


def _make_symbolic_values(mode: FakeTensorMode, inputs: Sequence[InputSpec]) -> list[Any]:
    import torch  # why: after the words have been read

    examples = choose_examples(inputs)
    values = []
    for position, spec in enumerate(inputs):
        sizes = [size if isinstance(size, int) else examples[size[0]] for size in spec.sizes]
        example = torch.empty(sizes, dtype=getattr(torch, spec.dtype))
        context = tuple("static" if isinstance(size, int) else size[0] for size in spec.sizes)
        value: torch.Tensor = mode.from_tensor(
            example, source=spec.name or f"input{position}", symbolic_context=context
        )
        if spec.device != "cpu":
            with mode:
                value = value.to(spec.device)
        values.append(value)
    return values


def _name_tensors(value: object, name: str = "") -> list[tuple[str, Any]]:
    """The tensors of a result, each with the keys that lead to it."""
    import torch  # why: after the words have been read

    if isinstance(value, torch.Tensor):
        return [(name, value)]
    pairs = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, (list, tuple))
        else ()
    )
    return [
        found for key, part in pairs for found in _name_tensors(part, f"{name}.{key}" if name else str(key))
    ]


def _make_check_record(
    inputs: Sequence[InputSpec], outputs: list[tuple[str, str]], env: ShapeEnv
) -> dict[str, Any]:
    return {
        "inputs": [str(spec) for spec in inputs],
        "outputs": [{"name": name, "spec": spec} for name, spec in outputs],
        "guards": [{"condition": guard.text, "line": guard.line} for guard in env.guards],
        "specialisations": [
            {"size": entry.what, "number": entry.number, "line": entry.line, "reason": entry.reason}
            for entry in env.specialisations
        ],
    }


def _print_check(inputs: Sequence[InputSpec], outputs: list[tuple[str, str]], env: ShapeEnv) -> None:
    examples = choose_examples(inputs)
    sizes = ", ".join(f"{name}={size}" for name, size in examples.items())
    for spec in inputs:
        print(clean(f"input   {spec}"))
    for name, text in outputs:
        print(clean(f"output  {f'{name}: ' if name else ''}{text}"))
    print(f"\nOne run, with {sizes}." if sizes else "\nNo size is named: valid for these sizes only.")
    guards = [guard for guard in env.guards if not guard.is_specialisation]
    if sizes:
        print("Valid for every size." if not env.guards else f"Valid where ({len(env.guards)}):")
    for guard in guards:
        print(clean(f"  {guard}"))
    if env.specialisations:
        print(f"fixed to a number ({len(env.specialisations)}):")
        for entry in env.specialisations:
            print(clean(f"  {entry}"))


# understudy graph


def add_graph_arguments(parser: argparse.ArgumentParser) -> None:
    _add_target(
        parser,
        """\
    understudy graph model.py:Net --input "x: f32[batch, 3, 32, 32]"
    understudy graph model.py:Net --format dot | dot -Tsvg > net.svg""",
    )
    parser.add_argument("--format", choices=("text", "dot", "json"), default="text", help="(default: text)")
    parser.add_argument("--limit", type=int, metavar="N", help="print at most this many nodes")
    parser.add_argument("--output", metavar="FILE", help="write to a file")


def show_graph(options: argparse.Namespace) -> int:
    target, given = _parse_words(options)
    if options.output and not Path(options.output).absolute().parent.is_dir():
        raise TargetError(f"{options.output}: the folder does not exist")
    return _run_guarded("graph", lambda: _show_graph(options, target, given))


def _show_graph(options: argparse.Namespace, target: ModelTarget, given: list[InputSpec]) -> int:
    # why: report invalid arguments before torch is imported
    import torch

    from understudy.capture.make_fx import make_fx  # why: as above
    from understudy.fake.mode import FakeTensorMode  # why: as above
    from understudy.shapes.env import ShapeEnv  # why: as above

    mode = FakeTensorMode(shape_env=ShapeEnv())
    program = load_target(target, mode)
    inputs = choose_inputs(program, given, target.text)
    if isinstance(program.function, torch.nn.Module):
        program.function.eval()
    values = _make_symbolic_values(mode, inputs)
    with mode, torch.no_grad():
        graph = make_fx(
            _make_caller(program.function, inputs), tracing_mode="symbolic", record_module_stack=True
        )(*values)
    if options.format == "text" and not options.output:
        _print_graph(graph, options.limit)
        return 0
    text = _WRITERS[options.format](graph)
    if options.output:
        Path(options.output).write_text(text + "\n")
    else:
        print(text)
    return 0


def _make_caller(function: object, inputs: Sequence[InputSpec]) -> Callable[..., Any]:
    """A function of positional arguments; of a module, one that lets the paths of its modules be recorded."""
    import torch  # why: after the words have been read

    if not isinstance(function, torch.nn.Module):
        return lambda *args: call_with(function, inputs, args)

    class Caller(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = function

        def forward(self, *args: object) -> Any:
            return call_with(self.model, inputs, args)

    return Caller()


def _print_graph(graph: GraphModule, limit: int | None) -> None:
    from understudy.graph.show import rows_of  # why: it imports torch

    rows = [(row.name, row.operator, row.spec, row.module, row.line) for row in rows_of(graph)]
    if limit is not None and len(rows) > limit:
        head = (limit + 1) // 2
        rows = [
            *rows[:head],
            ("…", f"{len(rows) - limit} more", "", "", ""),
            *rows[len(rows) - limit + head :],
        ]
    print_table(("name", "operator", "gives", "module", "line"), rows, (True,) * 5)


def _write_graph_text(graph: GraphModule) -> str:
    from understudy.graph.show import rows_of  # why: it imports torch

    return "\n".join(
        clean("  ".join((r.name, r.operator, r.spec, r.module, r.line))).rstrip() for r in rows_of(graph)
    )


def _make_graph_record(graph: GraphModule) -> str:
    from understudy.graph.show import rows_of  # why: it imports torch

    nodes = [
        {
            "name": row.name, "operation": node.op, "target": str(node.target), "text": row.operator, "gives": row.spec,
            "module": row.module, "line": row.line, "inputs": [parent.name for parent in node.all_input_nodes],
        }
        for row, node in zip(rows_of(graph), graph.graph.nodes, strict=True)
    ]  # fmt: skip
    env = getattr(graph, "shape_env", None)
    guards = [{"condition": guard.text, "line": guard.line} for guard in getattr(env, "guards", ())]
    return json.dumps({"nodes": nodes, "guards": guards}, indent=1)


def _write_graph_dot(graph: GraphModule) -> str:
    from understudy.graph.show import rows_of  # why: it imports torch

    lines = ["digraph understudy {", '  node [shape=box, fontname="Helvetica", fontsize=10];']
    for row, node in zip(rows_of(graph), graph.graph.nodes, strict=True):
        label = json.dumps(clean(f"{row.operator.partition('(')[0]}\n{row.spec}").replace("\\n", "\n"))
        tooltip = json.dumps(clean(f"{row.module} {row.line}".strip()))
        lines.append(f"  {json.dumps(row.name)} [label={label}, tooltip={tooltip}];")
        lines += [
            f"  {json.dumps(parent.name)} -> {json.dumps(row.name)};" for parent in node.all_input_nodes
        ]
    return "\n".join([*lines, "}"])


_WRITERS: dict[str, Callable[[Any], str]] = {
    "text": _write_graph_text,
    "dot": _write_graph_dot,
    "json": _make_graph_record,
}


COMMANDS = (
    Command("model", add_model_arguments, show_model),
    Command("check", add_check_arguments, check_model),
    Command("graph", add_graph_arguments, show_graph),
)
