"""The arguments of `model`, `check` and `graph`: a model by its name, and its inputs as specs.

    parse_target("train.py:GPT(layers=4)")      a class, an instance, or a function that makes one
    parse_target("torchvision.models:resnet18")
    parse_target("llama/config.json")           a configuration of transformers
    parse_input("x: f32[batch=8, 3, h, w]")     a name for each size that may vary, with its example

Parsing needs no torch: errors in the arguments are reported before it is imported.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.abc import Loader
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from understudy.errors import UnderstudyError

if TYPE_CHECKING:
    import torch

    from understudy.fake.mode import FakeTensorMode


class TargetError(UnderstudyError, ValueError):
    """A target or an input that can't be used, in one line."""


DTYPES = {
    "f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16", "i64": "int64", "i32": "int32",
    "i16": "int16", "i8": "int8", "u8": "uint8", "b8": "bool", "c64": "complex64", "c128": "complex128",
}  # fmt: skip
"""As in the text of specs, and torch's names."""

EXAMPLES = (4, 96, 80, 112, 144, 176)
"""Sizes for names without an example: each its own, so that names do not become equal by accident."""
IMAGE_SIDE = 224


# inputs


@dataclass(frozen=True, slots=True)
class InputSpec:
    """An input in words. A size is a number, or a name with the example that stands for it, if there is one."""

    name: str
    dtype: str
    sizes: tuple[int | tuple[str, int | None], ...]
    device: str = "cpu"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(size[0] for size in self.sizes if not isinstance(size, int))

    def __str__(self) -> str:
        sizes = ", ".join(str(size) if isinstance(size, int) else size[0] for size in self.sizes)
        short = {torch_name: short for short, torch_name in DTYPES.items()}[self.dtype]
        return f"{self.name}: {short}[{sizes}]" if self.name else f"{short}[{sizes}]"


_INPUT = re.compile(
    r"\s*(?:(?P<name>\w+)\s*:)?\s*(?P<dtype>\w+)\s*\[(?P<sizes>[^\]]*)\]\s*(?:@\s*(?P<device>[\w:]+))?\s*"
)
_SIZE = re.compile(r"(?:(?P<number>\d+)|(?P<name>[^\W\d]\w*)\s*(?:=\s*(?P<example>\d+))?)")


def parse_input(text: str) -> InputSpec:
    found = _INPUT.fullmatch(text)
    if found is None:
        raise TargetError(f'expected an input such as "x: f32[batch, 3, 224]", got {text!r}')
    dtype = DTYPES.get(found["dtype"], found["dtype"])
    if dtype not in DTYPES.values():
        raise TargetError(f"unknown dtype {found['dtype']!r}: choose from {', '.join(DTYPES)}")
    sizes: list[int | tuple[str, int | None]] = []
    for part in found["sizes"].split(",") if found["sizes"].strip() else []:
        size = _SIZE.fullmatch(part.strip())
        if size is None:
            raise TargetError(
                f"expected a size as a number, a name, or name=example, got {part.strip()!r} in {text!r}"
            )
        example = int(size["example"]) if size["example"] else None
        sizes.append(int(size["number"]) if size["number"] else (size["name"], example))
    return InputSpec(found["name"] or "", dtype, tuple(sizes), found["device"] or "cpu")


def choose_examples(inputs: Sequence[InputSpec]) -> dict[str, int]:
    """A number for each name: as given, else one that the position suggests."""
    examples: dict[str, int] = {}
    for spec in inputs:
        for size in spec.sizes:
            if isinstance(size, int) or size[1] is None:
                continue
            if examples.setdefault(size[0], size[1]) != size[1]:
                raise TargetError(f"{size[0]} has two examples, {examples[size[0]]} and {size[1]}")
    for spec in inputs:
        for position, size in enumerate(spec.sizes):
            if not isinstance(size, int) and size[0] not in examples:
                is_image_side = len(spec.sizes) == 4 and position >= 2
                sizes = (IMAGE_SIDE, IMAGE_SIDE + 32, *EXAMPLES) if is_image_side else EXAMPLES
                examples[size[0]] = next(
                    (n for n in sizes if n not in examples.values()), 200 + len(examples)
                )
    return examples


# targets


@dataclass(frozen=True, slots=True)
class ModelTarget:
    """A model by its place: a file or module and a name in it, with literal arguments; or a configuration file."""

    text: str
    file: str = ""
    module: str = ""
    name: str = ""
    arguments: tuple[Any, ...] = ()
    keywords: tuple[tuple[str, Any], ...] = ()
    is_called: bool = False
    is_config: bool = False


def parse_target(text: str) -> ModelTarget:
    """Check for missing names without importing the program."""
    if text.endswith(".json") or os.path.isdir(text):
        path = os.path.join(text, "config.json") if os.path.isdir(text) else text
        _read_config(path)
        return ModelTarget(text, file=path, is_config=True)
    place, colon, call = text.partition(":") if not re.match(r"[A-Za-z]:[\\/]", text) else _split_drive(text)
    if not colon or not call:
        hint = _suggest_names(place) if place.endswith(".py") else ""
        raise TargetError(f"expected file.py:name, package.module:name or a config.json, got {text!r}{hint}")
    name, arguments, keywords, is_called = _parse_call(call, text)
    parts = (name, arguments, keywords, is_called)
    if place.endswith(".py"):
        _check_name(place, name)
        return ModelTarget(text, place, "", *parts)
    try:
        known = importlib.util.find_spec(place.partition(".")[0])
    except (ImportError, ValueError):
        known = None
    if (
        known is None
        and not Path(place.partition(".")[0] + ".py").exists()
        and not Path(place.partition(".")[0]).is_dir()
    ):
        raise TargetError(f"no module named {place!r}")
    return ModelTarget(text, "", place, *parts)


def _split_drive(text: str) -> tuple[str, str, str]:
    place, colon, call = text[2:].partition(":")
    return text[:2] + place, colon, call


def _parse_call(call: str, text: str) -> tuple[str, tuple[Any, ...], tuple[tuple[str, Any], ...], bool]:
    """`GPT(4, width=8)`: a dotted name, and literals."""
    problem = TargetError(f"expected a name, or a call with literals, after the colon in {text!r}")
    try:
        node = ast.parse(call, mode="eval").body
        arguments: tuple[Any, ...] = ()
        keywords: tuple[tuple[str, Any], ...] = ()
        is_called = isinstance(node, ast.Call)
        if isinstance(node, ast.Call):
            arguments = tuple(ast.literal_eval(argument) for argument in node.args)
            keywords = tuple((word.arg, ast.literal_eval(word.value)) for word in node.keywords if word.arg)
            node = node.func
        name = ast.unparse(node)
    except (SyntaxError, ValueError):
        raise problem from None
    if not all(part.isidentifier() for part in name.split(".")):
        raise problem
    return name, arguments, keywords, is_called


def _suggest_names(path: str) -> str:
    """The names of the classes and then the functions of a file, for an error that asks which of them is meant."""
    found = _parse_file(path).body
    classes = [node.name for node in found if isinstance(node, ast.ClassDef)]
    names = classes + [node.name for node in found if isinstance(node, ast.FunctionDef)]
    return f": choose from {', '.join(names[:8])}" if names else ""


def _parse_file(path: str) -> ast.Module:
    try:
        source = Path(path).read_bytes()
    except OSError as error:
        raise TargetError(f"{path}: {error.strerror or error}") from None
    try:
        return ast.parse(source, path)
    except (SyntaxError, ValueError) as error:
        raise TargetError(f"{path}: invalid Python: {str(error).splitlines()[0]}") from None


def _check_name(path: str, name: str) -> None:
    names = set(_list_bound_names(_parse_file(path).body))
    first = name.partition(".")[0]
    if first not in names and "*" not in names:
        near = difflib.get_close_matches(first, names, n=1)
        hint = f": did you mean {near[0]}?" if near else _suggest_names(path)
        raise TargetError(f"{path} does not define {first!r}{hint}")


def _list_bound_names(body: Sequence[ast.stmt]) -> Iterator[str]:
    """Names that a file defines at its top, also below `if` and `try`."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
            yield node.name
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        else:
            yield from (
                n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
            )
            for part in ("body", "orelse", "finalbody"):
                yield from _list_bound_names(getattr(node, part, []))


def _read_config(path: str) -> dict[str, Any]:
    try:
        record = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise TargetError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        raise TargetError(f"{path}: invalid JSON: {error}") from None
    if not isinstance(record, dict) or not isinstance(record.get("model_type"), str):
        raise TargetError(f"{path}: expected a configuration of transformers, with model_type")
    return record


# loading: from here on the program's own code runs


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model or function, with a guess of its inputs. `origin`: the basis of the guess."""

    function: Any
    inputs: tuple[InputSpec, ...]
    origin: str


def load_target(target: ModelTarget, mode: FakeTensorMode) -> LoadedModel:
    """Make the model with stand-ins for its parameters."""
    import torch  # why: words are parsed without it

    if target.is_config:
        return _load_config(target.file, mode)
    found = _find_object(target, mode)
    made = found
    if target.is_called or isinstance(found, type) or _is_model_factory(found):
        with mode:
            made = found(*target.arguments, **dict(target.keywords))
    elif isinstance(found, torch.nn.Module):
        made = mode.from_module(found)
    if not callable(made):
        raise TargetError(f"{target.text}: expected a module or a function, got a {type(made).__name__}")
    is_module = isinstance(made, torch.nn.Module)
    return LoadedModel(made, _guess_inputs(made) if is_module else (), "the first layer")


def _is_model_factory(found: object) -> bool:
    """Functions whose every argument has a default, and which say that they return a module, or are named like it."""
    if not inspect.isfunction(found):
        return False
    parameters = inspect.signature(found).parameters.values()
    open_ended = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return all(
        p.default is not p.empty or p.kind in open_ended or p.kind == p.KEYWORD_ONLY for p in parameters
    )


def _find_object(target: ModelTarget, mode: FakeTensorMode) -> Any:
    if target.file:
        path = Path(target.file).resolve()
        if str(path.parent) not in sys.path:
            sys.path.insert(0, str(path.parent))
        name = path.stem if path.stem.isidentifier() else "__understudy_target__"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(name, module)
        try:
            _run_file(spec.loader, module)
        except (AssertionError, RuntimeError) as error:
            if "CUDA" not in str(error):
                raise
            with mode:  # which has every device
                _run_file(spec.loader, module)
    else:
        if "" not in sys.path and os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        try:
            module = importlib.import_module(target.module)
        except ModuleNotFoundError as error:
            if error.name is None or not target.module.startswith(error.name):
                raise
            raise TargetError(f"no module named {error.name!r}") from None
    found: Any = module
    for part in target.name.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), n=1)
            raise TargetError(
                f"{target.text}: name {part!r} not found{f', did you mean {near[0]}?' if near else ''}"
            )
        found = getattr(found, part)
    return found


def _run_file(loader: Loader, module: ModuleType) -> None:
    """Import a file, which may be a script that trains as soon as it is imported: it is ended at its first optimizer step,
    writes nothing, and does not get the arguments of this command."""
    # why: words are parsed without torch
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    from understudy.patching import FILE_OVERLAY, REHEARSAL, active  # why: as above
    from understudy.simulation.overlay import Overlay  # why: as above
    from understudy.simulation.steps import EndOfScript  # why: as above

    def end(*_: object) -> None:
        raise EndOfScript

    hook = register_optimizer_step_pre_hook(end)
    words = sys.argv[:]
    sys.argv[:] = [str(module.__file__)]
    try:
        with Overlay(), active(REHEARSAL, FILE_OVERLAY):
            loader.exec_module(module)
    except EndOfScript:
        pass
    finally:
        hook.remove()
        sys.argv[:] = words


def _load_config(path: str, mode: FakeTensorMode) -> LoadedModel:
    try:
        import transformers  # why: only for its configurations
    except ImportError:
        raise TargetError(f"{path} is a configuration of transformers, which is not installed") from None
    record = _read_config(path)
    try:
        config = transformers.AutoConfig.for_model(**record)
    except (ValueError, KeyError) as error:
        raise TargetError(f"{path}: {str(error).splitlines()[0]}") from None
    if hasattr(config, "use_cache"):
        config.use_cache = False
    names = [name for name in record.get("architectures") or () if hasattr(transformers, name)]
    make: Callable[..., Any] = (
        getattr(transformers, names[0]) if names else transformers.AutoModel.from_config
    )
    with mode:
        model = make(config)
    return LoadedModel(model, _find_inputs_of_config(model, config), "the configuration")


LENGTH = 128
"""Tokens of a guessed input; fewer where the model takes fewer."""


def _find_inputs_of_config(model: object, config: object) -> tuple[InputSpec, ...]:
    name = getattr(model, "main_input_name", "input_ids")
    text = getattr(config, "text_config", config)
    length = min(LENGTH, getattr(text, "max_position_embeddings", LENGTH) or LENGTH)
    batch = ("batch", None)
    if name == "pixel_values":
        vision = getattr(config, "vision_config", config)
        side = getattr(vision, "image_size", IMAGE_SIDE) or IMAGE_SIDE
        high, wide = side if isinstance(side, (list, tuple)) else (side, side)
        return (InputSpec(name, "float32", (batch, getattr(vision, "num_channels", 3), high, wide)),)
    if name == "input_values":
        return (InputSpec(name, "float32", (batch, ("samples", 16_000))),)
    if name == "input_features":
        frames = 2 * getattr(config, "max_source_positions", 1500)
        features = InputSpec(name, "float32", (batch, getattr(config, "num_mel_bins", 80), frames))
        return (features, InputSpec("decoder_input_ids", "int64", (batch, ("length", length))))
    inputs: tuple[InputSpec, ...] = (InputSpec("input_ids", "int64", (batch, ("length", length))),)
    if getattr(config, "is_encoder_decoder", False):
        inputs += (InputSpec("decoder_input_ids", "int64", (batch, ("length", length))),)
    return inputs


def _guess_inputs(module: torch.nn.Module) -> tuple[InputSpec, ...]:
    """For a module with one argument: what its first layer takes, on its device."""
    import torch  # why: words are parsed without it
    from torch import nn

    parameters = inspect.signature(module.forward).parameters.values()
    required = [
        p
        for p in parameters
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if len(required) != 1:
        return ()
    name, batch = required[0].name, ("batch", None)
    for layer in module.modules():
        weight = getattr(layer, "weight", None)
        device = str(weight.device) if isinstance(weight, torch.Tensor) else "cpu"
        if isinstance(layer, nn.Embedding):
            return (InputSpec(name, "int64", (batch, ("length", LENGTH)), device),)
        if isinstance(layer, nn.Conv2d):
            sides = ("height", IMAGE_SIDE), ("width", IMAGE_SIDE)
            return (InputSpec(name, "float32", (batch, layer.in_channels, *sides), device),)
        if isinstance(layer, nn.Conv1d):
            return (InputSpec(name, "float32", (batch, layer.in_channels, ("length", LENGTH)), device),)
        if isinstance(layer, nn.Linear):
            return (InputSpec(name, "float32", (batch, layer.in_features), device),)
    return ()


def choose_inputs(program: LoadedModel, given: Sequence[InputSpec], text: str) -> tuple[InputSpec, ...]:
    inputs = tuple(given) or program.inputs
    if not inputs:
        signature = inspect.signature(getattr(program.function, "forward", program.function))
        raise TargetError(
            f'no guess for the inputs of {text}{signature}; describe them, as in --input "x: f32[batch, 3, 224, 224]"'
        )
    return inputs


def with_one_row(inputs: Sequence[InputSpec]) -> tuple[InputSpec, ...]:
    """A guessed batch has one row, as in other tools that list layers."""
    return tuple(
        replace(spec, sizes=tuple(("batch", 1) if size == ("batch", None) else size for size in spec.sizes))
        for spec in inputs
    )


def call_with(function: Any, inputs: Sequence[InputSpec], values: Sequence[object]) -> Any:
    """Named inputs by keyword, others by position."""
    positional = [value for spec, value in zip(inputs, values, strict=True) if not spec.name]
    named = {spec.name: value for spec, value in zip(inputs, values, strict=True) if spec.name}
    return function(*positional, **named)
