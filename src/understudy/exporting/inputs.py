"""The inputs of an export: their dynamic dimensions, and the guards on them.

Inputs           the leaves of the arguments, with their names and dynamic dimensions
read_inputs      reads the arguments of `export`, in all of torch's forms and in ours
guard_code       guards as code for `ep.module()`, with the line that made each
guards_of        the guards of a program
check_inputs     the guards that some inputs violate
check_requests   whether the requested dimensions are dynamic
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram

from understudy import _torch
from understudy.errors import ConstraintViolationError
from understudy.shapes.checking import InputCode, bind_inputs, describe_inputs, read_symbols
from understudy.shapes.env import ShapeEnv
from understudy.shapes.guards import holds_at
from understudy.shapes.input_dims import Dim

NAME = re.compile(r"[^a-zA-Z0-9]")


@dataclass(frozen=True)
class Inputs:
    """The arguments of a program, flat."""

    leaves: list[Any]
    names: list[str]
    """The names of the placeholders: `x`, or `x_0` for a part of it."""
    paths: list[str]
    """The paths of the leaves in the arguments of the exported module: `L['x'][0]`."""
    requests: list[Any]
    """For each leaf: None, an entry for each dimension of a tensor, or the request for a number."""
    in_spec: Any
    forward_names: list[str]
    verify: Callable[[Any], None]
    """The check of `AdditionalInputs` on the finished program."""

    @property
    def is_dynamic(self) -> bool:
        return any(request is not None for request in self.requests)


def read_inputs(
    model: torch.nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object], dynamic_shapes: object
) -> Inputs:
    arguments = _torch.bind_arguments(model, args, kwargs)
    verify: Callable[[Any], None] = lambda program: None  # noqa: E731
    if isinstance(dynamic_shapes, (torch.export.AdditionalInputs, torch.export.ShapesCollection)):
        verify = getattr(dynamic_shapes, "verify", verify)
        collected: Any = dynamic_shapes
        dynamic_shapes = collected.dynamic_shapes(model, args, dict(kwargs))
    keywords = _torch.name_of_keywords(model)
    if isinstance(dynamic_shapes, Mapping) and keywords in dynamic_shapes and keywords not in arguments:
        others = {name: value for name, value in dynamic_shapes.items() if name != keywords}
        dynamic_shapes = {**others, **(dynamic_shapes[keywords] or {})}
    leaves, in_spec = _torch.tree_flatten((args, dict(kwargs)))
    with_paths = _torch.flatten_with_paths(arguments)
    names = ["_".join(map(_key_name, path)).lower() for path, _ in with_paths]
    forward_names = _forward_names(arguments, args)
    given = dict(zip(forward_names, (*args, *kwargs.values()), strict=True))
    paths = ["L" + _torch.key_text(path) for path, _ in _torch.flatten_with_paths(given)]
    requests = _read_requests(arguments, dynamic_shapes, leaves, names)
    return Inputs(leaves, names, paths, requests, in_spec, forward_names, verify)


def _forward_names(arguments: Mapping[str, object], args: tuple[object, ...]) -> list[str]:
    """The names of the arguments, with one for each of `*args`."""
    count = len(args)
    names: list[str] = []
    for name, value in arguments.items():
        if len(names) < count and isinstance(value, tuple) and not any(value is arg for arg in args):
            names.extend(f"{name}_{position}" for position in range(len(value)))
        else:
            names.append(name)
    return names


def _key_name(key: object) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return NAME.sub("_", str(getattr(key, attribute)))
    return NAME.sub("_", str(key))


def _read_requests(
    arguments: dict[str, Any], dynamic_shapes: object, leaves: Sequence[object], names: Sequence[str]
) -> list[Any]:
    if not dynamic_shapes:
        return [None] * len(leaves)
    if isinstance(dynamic_shapes, Mapping):
        dynamic_shapes = dict(dynamic_shapes)
        inner = [
            name
            for name, value in arguments.items()
            if isinstance(value, dict) and name not in dynamic_shapes
        ]
        if len(inner) == 1 and set(dynamic_shapes) & set(arguments[inner[0]]):
            raise ValueError(
                f"dynamic_shapes: expected a nested entry for the arguments in {inner[0]!r}; write {{{inner[0]!r}: {{…}}}}"
            )
    dynamic_shapes = _to_torch_dims(dynamic_shapes, {})
    _torch.check_dynamic_shapes(arguments, dynamic_shapes)
    asked = _torch.flatten_shapes(arguments, dynamic_shapes)
    return [_request_for(*one) for one in zip(leaves, asked, names, strict=True)]


def _to_torch_dims(asked: Any, known: dict[str, Any]) -> Any:
    """Convert `understudy.Dim` and names of dimensions to `torch.export.Dim`, the same one for the same name."""
    if isinstance(asked, Dim):
        if asked.name not in known:
            known[asked.name] = torch.export.Dim(asked.name, min=asked.min, max=asked.max)
        return known[asked.name]
    if isinstance(asked, str):
        return _to_torch_dims(Dim(asked), known)
    if isinstance(asked, Mapping):
        return {key: _to_torch_dims(value, known) for key, value in asked.items()}
    if type(asked) in (list, tuple):
        return type(asked)(_to_torch_dims(value, known) for value in asked)
    return asked


def _request_for(leaf: object, asked: Any, name: str) -> Any:
    if asked is None:
        return None
    if not isinstance(leaf, torch.Tensor):
        return None if getattr(getattr(asked, "type", None), "name", "") == "STATIC" else asked
    entries = asked if isinstance(asked, Mapping) else dict(enumerate(asked))
    wrong = [dim for dim in entries if not -leaf.ndim <= dim < leaf.ndim]
    if wrong:
        raise ValueError(
            f"dynamic_shapes: expected a dimension of {name} from {-leaf.ndim} to {leaf.ndim - 1}, got {wrong[0]}"
        )
    by_dim = {dim % leaf.ndim: entry for dim, entry in entries.items() if entry is not None}
    for dim, entry in by_dim.items():
        if isinstance(entry, int) and entry != leaf.shape[dim]:
            raise ConstraintViolationError(
                f"expected {name}.size({dim}) to be {entry}, as in dynamic_shapes, got {leaf.shape[dim]} in the example"
            )
    return {dim: entry for dim, entry in by_dim.items() if not isinstance(entry, int)} or None


# --- guards ---------------------------------------------------------------------------------------------------------

BECAUSE = " or (not 'because "
TO_ADMIT = "; to run it on the path of its example: "
"""Separates the hint from the line in the text of a guard."""


@dataclass(frozen=True, slots=True)
class GuardRecord:
    """A condition on the inputs of a program, with the line that made it."""

    condition: str
    line: str
    code: str
    """As stored in the program and its files: `L['x'].size(0) % 2 == 0 or (not 'because model.py:3: …')`."""

    def __str__(self) -> str:
        return f"{self.condition}    because {self.line}" if self.line else self.condition


def guard_code(
    env: ShapeEnv | None, vals: Sequence[object], paths: Sequence[str], guard_zero_one: bool = True
) -> list[GuardRecord]:
    """The guards on the inputs, without static sizes and ranges, which are in their values.

    Operators handle sizes of 0 and 1 when they run: a guard of an operator that only distinguishes these is left out.
    Such a guard of the program itself is kept if `guard_zero_one` is set.
    """
    if env is None:
        return []
    sized = [
        (val, path)
        for val, path in zip(vals, paths, strict=True)
        if isinstance(val, (torch.Tensor, torch.SymInt))
    ]
    inputs = describe_inputs([val for val, _ in sized], [path for _, path in sized])
    code = InputCode(read_symbols(bind_inputs(inputs)), env.definitions)
    records = []
    for required in env.checks.choose_requirements(inputs, _simplified=True):
        is_of_zero_one = _depends_only_on_zero_one(required.condition)
        if is_of_zero_one and (required.is_of_operator or not guard_zero_one):
            continue
        text = required.write_code(code)
        what_to_do = f"{TO_ADMIT}export(…, guard_zero_one=False)" if is_of_zero_one else ""
        records.append(
            GuardRecord(_condition_of(text), required.why, _with_line(text, required.why + what_to_do))
        )
    return list(dict.fromkeys(records))


EXAMPLES = (2, 3, 4, 5, 7, 8, 16, 31, 1009, (1 << 20) + 7)


def _depends_only_on_zero_one(condition: Any) -> bool:
    """Whether a condition holds for all example sizes other than 0 and 1."""
    symbols = list(condition.symbols)
    if len(symbols) > 2:
        return False
    return all(
        holds_at(condition, dict(zip(symbols, sizes, strict=True)))
        for sizes in itertools.product(EXAMPLES, repeat=len(symbols))
    )


def _condition_of(code: str) -> str:
    """`L['x'].size(0) > 3` as `x.size(0) > 3`."""
    return code.replace("L['", "").replace("']", "")


def _with_line(code: str, line: str) -> str:
    """Add the line to the code of a guard, so that it is saved with it and shown when the guard fails."""
    if not line:
        return code
    plain = line.replace("\\", "/").replace("'", "`").replace('"', "`").replace("\n", " ")
    return f"{code}{BECAUSE}{plain}')"


def guards_of(program: ExportedProgram) -> list[GuardRecord]:
    """The guards of a program, each with the line that made it; also for a program loaded from a file."""
    records = []
    for code in program._guards_code:
        condition, _, line = code.partition(BECAUSE)
        line = line.removesuffix("')").partition(TO_ADMIT)[0]
        records.append(GuardRecord(_condition_of(condition), line, code))
    return records


def check_inputs(program: ExportedProgram, *args: object, **kwargs: object) -> list[str]:
    """The sizes, ranges and guards of the program that these inputs violate; empty if it can run on them."""
    module = program.module()
    leaves, _ = _torch.tree_flatten((args, kwargs))
    guards = getattr(module, "_guards_fn", None)
    if guards is None:
        return []
    return _torch.broken_guards(guards, leaves)


# --- violated requests -----------------------------------------------------------------------------------


def check_requests(env: ShapeEnv | None, inputs: Inputs) -> None:
    """Raise one error for all dimensions that were requested to be dynamic and that the program specialises."""
    if env is None:
        return
    broken: list[str] = []
    known: dict[Any, str] = {}
    for place in env.inputs.sizes:
        if place.what not in ("size", "number") or place.source not in inputs.names:
            continue
        request = inputs.requests[inputs.names.index(place.source)]
        asked = request.get(place.dim) if isinstance(request, dict) else request
        if asked is None or _may_be_fixed(asked):
            continue
        value = env.simplify(getattr(place.size, "value", place.size))
        if isinstance(value, int):
            broken.append(_describe_fixed(env, place, asked, value))
        elif (name := _name_of(asked)) and (other := known.setdefault(value, name)) != name:
            broken.append(_equal(env, place, name, other))
    if broken:
        count = f"{len(broken)} of the dimensions that were" if len(broken) > 1 else "a dimension that was"
        raise ConstraintViolationError(
            "\n".join([f"the program specialises {count} requested as dynamic:", *dict.fromkeys(broken)])
        )


def _may_be_fixed(asked: object) -> bool:
    return getattr(getattr(asked, "type", None), "name", "") in ("AUTO", "STATIC")


def _name_of(asked: object) -> str:
    return str(getattr(asked, "__name__", "") or "")


def _describe_fixed(env: ShapeEnv, place: Any, asked: object, number: int) -> str:
    size = getattr(place.size, "value", place.size)
    symbols = set(getattr(size, "symbols", ()))
    guard = next((g for g in env.guards if g.is_specialisation and symbols & set(g.condition.symbols)), None)
    found = next((s for s in env.specialisations if s.what in map(str, symbols)), None)
    line = guard.line if guard is not None and guard.line else found and (found.line or found.reason)
    called = _name_of(asked)
    condition = f"{place.text} == {number}"
    if called and (guard is not None or found is not None):
        condition = (
            f"{found.what} == {found.number}"
            if guard is None and found is not None
            else str(guard and guard.text)
        )
    is_number = place.what == "number"
    name = place.source if is_number else f"dimension {place.dim} of {place.source}"
    return (
        f"  {place.text}, requested as dynamic{f' ({called})' if called else ''}, is always {number}\n"
        f"    condition:  {condition}\n"
        + (f"    because:    {line}\n" if line else "")
        + f"    ways out:   leave {name} out of dynamic_shapes (or Dim.STATIC), "
        f"or change that line to hold for every {'number' if is_number else 'size'}"
    )


def _equal(env: ShapeEnv, place: Any, name: str, other: str) -> str:
    symbol = getattr(place.size, "value", place.size)
    guard = next(
        (g for g in env.guards if getattr(symbol, "symbols", {symbol}) & set(g.condition.symbols)), None
    )
    return (
        f"  {place.text}, requested as dynamic ({name}), is always equal to {other}\n"
        + (f"    condition:  {guard.text}\n" if guard else "")
        + (f"    because:    {guard.line}\n" if guard and guard.line else "")
        + f"    ways out:   use one name for both, or change that line to hold where {name} and {other} differ"
    )
