"""The inputs of a trace: stand-ins of examples, placeholders, checks of fixed arguments."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node
from torch.fx.node import has_side_effect

from understudy import _torch
from understudy.fake.convert import spec_of_real, symbolic_spec
from understudy.fake.mode import FakeTensorMode
from understudy.fake.native import canonical
from understudy.fake.realise import make_new
from understudy.fake.tensor import FakeTensor
from understudy.graph.borrowed_state import named_parts
from understudy.meta.proxies import UNKNOWN
from understudy.meta.structures import Path, holds, leaves_in, parts_of, transform
from understudy.shapes.env import ShapeEnv

if TYPE_CHECKING:
    from understudy.meta.tracer import MetaTracer


class ExampleInputs:
    """Makes the stand-ins of the arguments.

    For an example on the meta device, the device of the root's tensors is assumed.
    """

    def __init__(
        self, root: torch.nn.Module, meta_args: Mapping[str, object] | None, symbolic: object
    ) -> None:
        if not isinstance(symbolic, (bool, Mapping)):
            raise TypeError(
                "symbolic: expected a bool, or a dict from names of arguments to dimensions, got a "
                f"{type(symbolic).__name__}"
            )
        self._symbolic = symbolic
        self._sources: list[str] = []
        parts = [part for _, part in named_parts(root)]
        self._device = _device_of(parts)
        env = next((env for env in map(_env_of, leaves_in(dict(meta_args or {}))) if env is not None), None)
        # Data-dependent sizes are symbols even if the sizes of the inputs are static.
        mode = FakeTensorMode(
            allow_non_fake_inputs=True, shape_env=env or ShapeEnv(), static_shapes=not symbolic
        )
        self._seen: dict[int, torch.Tensor] = {}
        self._made: dict[str, Any] = {}
        self.mode: FakeTensorMode = _mode_of(parts) or mode
        self.env: Any = self.mode.shape_env

    def check_names(self) -> None:
        """Raise if `symbolic` names an argument without example."""
        unknown = (
            [name for name in self._symbolic if name not in self._sources]
            if isinstance(self._symbolic, Mapping)
            else []
        )
        if unknown:
            raise TypeError(
                f"symbolic: meta_args has no example of {', '.join(map(repr, unknown))}; it has examples of "
                f"{', '.join(self._sources) or 'no argument'}"
            )

    def close(self) -> None:
        """Called at the end of a trace: drop references to the stand-ins."""
        self._made.clear()
        self._seen.clear()

    def stand_in(self, tensor: torch.Tensor, source: str) -> Any:
        """The stand-in of the example of an argument, or of a part of one (`x[0]`)."""
        if source not in self._made:
            self._made[source] = self._make(tensor, source)
        return self._made[source]

    def _make(self, tensor: torch.Tensor, source: str) -> Any:
        self._sources.append(source)
        if id(tensor) in self._seen:
            # The same example for two arguments: two values on the same memory.
            with _torch.no_modes():
                tensor = tensor.detach().requires_grad_(tensor.requires_grad)
        self._seen[id(tensor)] = tensor
        if type(tensor) is FakeTensor:
            spec = tensor._spec
        elif not self._symbolic:
            if not _has_no_device(tensor):
                return self.mode.from_tensor(tensor, static_shapes=True)
            spec = spec_of_real(tensor)
        else:
            context = self._symbolic.get(source) if isinstance(self._symbolic, Mapping) else None
            if isinstance(self._symbolic, Mapping) and context is None:
                return self.mode.from_tensor(tensor, static_shapes=True)
            if not _has_no_device(tensor):
                return self.mode.from_tensor(tensor, source=source, symbolic_context=context)
            spec = symbolic_spec(self.env, tensor, source, context)
        if spec.device.type == "meta":
            spec = spec.on(self._device)
        return make_new(self.mode, spec).requires_grad_(tensor.requires_grad)


def _has_no_device(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "meta" or getattr(tensor, "fake_mode", None) is not None


def _env_of(value: object) -> Any:
    return value.fake_mode.shape_env if type(value) is FakeTensor else None


def _mode_of(parts: list[torch.nn.Module]) -> Any:
    """The mode of a root whose tensors are stand-ins."""
    for part in parts:
        tensors: list[Any] = list(part._parameters.values())
        for tensor in tensors:
            if type(tensor) is FakeTensor:
                return tensor.fake_mode
    return None


def _device_of(parts: list[torch.nn.Module]) -> torch.device:
    """The device of the first parameter, or of the first buffer."""
    for tables in ([part._parameters for part in parts], [part._buffers for part in parts]):
        for tensor in (tensor for table in tables for tensor in table.values()):
            if tensor is not None:
                return canonical(tensor.device)
    return canonical(torch.get_default_device())


# --- The inputs of a trace: signature, examples, fixed arguments -------------
# The signature is the one that a caller sees, through `functools.wraps` and the like. Every argument keeps its name and
# its default in the graph:
#
#     an example, or a structure of examples    a value with metadata
#     a concrete argument                       fixed; the graph raises for another value
#     a default, and no example for it          fixed at the default, likewise
#     none of these                             a value with unknown metadata

EMPTY: Any = inspect.Parameter.empty
PLAIN = (int, float, complex, bool, str, type(None), torch.dtype, torch.device)
"""Types that can be written as a default and compared."""


@has_side_effect
def check_arguments(given: dict[str, object], traced: dict[str, object], needed: dict[str, object]) -> None:
    """Raise if fixed arguments differ from those of the trace.

    A tuple in `traced` lists parts of an argument: the path of each, and its value.
    """
    missing = [name for name, value in needed.items() if value is None]
    if missing:
        raise TypeError(f"this graph was traced with {', '.join(missing)}; pass it as a keyword argument")
    for name, value in given.items():
        before = traced[name]
        if not isinstance(before, tuple):
            _refuse_another(name, name, before, value)
        elif value is not None:
            for path, part in before:
                _refuse_another(name, _source(name, path), part, _part_at(value, path))


def _refuse_another(name: str, what: str, before: object, now: object) -> None:
    if now is before or (type(now) is type(before) and now == before):
        return
    raise ValueError(
        f"{what} was {before!r} when this graph was traced, and is {now!r} now; trace it again with "
        f"concrete_args={{{name!r}: …}}, or with an example in meta_args"
    )


def _part_at(value: object, path: Path) -> Any:
    """The part of an argument, None if it is missing."""
    try:
        return _reach(value, path)
    except (KeyError, IndexError, AttributeError, TypeError):
        return None


def fixed_parts(value: object, path: Path = ()) -> Iterator[tuple[Path, object]]:
    """The parts of a structure that the trace fixes: lengths of lists, keys of dicts, numbers.

    Objects other than dataclasses are not searched: caches of models have counters that change.
    """
    if isinstance(value, PLAIN):
        yield path, value
    elif isinstance(value, dict):
        if all(isinstance(key, (str, int)) for key in value):
            yield (*path, KEYS), " ".join(sorted(map(str, value)))
            for key, part in value.items():
                yield from fixed_parts(part, (*path, ("item", key)))
    elif isinstance(value, (list, tuple)) or dataclasses.is_dataclass(value):
        if isinstance(value, (list, tuple)):
            yield (*path, LENGTH), len(value)
        for how, key, part in parts_of(value):
            yield from fixed_parts(part, (*path, (how, key)))


def signature_of(function: Callable[..., object]) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except ValueError as error:  # a C function
        raise TypeError(f"{function!r} has no readable signature; wrap it in a function") from error


class TraceInputs:
    """Makes the placeholders of a graph, and the arguments with which the program is called."""

    def __init__(
        self, tracer: MetaTracer, meta_args: Mapping[str, object] | None, concrete_args: Mapping[str, object]
    ) -> None:
        self._tracer = tracer
        self._has_examples = meta_args is not None
        self._examples = dict(meta_args or {})
        self._concrete = dict(concrete_args)
        self._given: dict[str, Node] = {}
        self._traced: dict[str, Any] = {}
        self._needed: dict[str, Node] = {}

    def arguments(
        self, function: Callable[..., object], by_position: bool = False
    ) -> tuple[list[Any], dict[str, Any]]:
        """Make placeholders for each parameter, in order; returns the arguments for the function.

        `by_position`: pass arguments by position where possible, as hooks of modules expect."""
        parameters = signature_of(function).parameters
        self._check_names(parameters)
        listed = self._list_parameters(parameters)
        nodes: list[tuple[inspect.Parameter, Node]] = []
        for i, parameter in enumerate(listed):
            follows_default = any(node.args for _, node in nodes)
            nodes.append((parameter, self._placeholder(parameter, listed[i + 1 :], follows_default)))
        if self._given or self._needed:
            checks = (self._given, self._traced, self._needed)
            self._tracer.create_node("call_function", check_arguments, checks, {})
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        by_position = by_position or any(
            p.kind is p.VAR_POSITIONAL and p.name in self._examples for p in parameters.values()
        )
        for parameter, node in nodes:
            value = self._value(parameter, node)
            if value is EMPTY:
                by_position = False
            elif parameter.kind is parameter.VAR_POSITIONAL:
                args.extend(value)
            elif parameter.kind is parameter.POSITIONAL_ONLY or (
                by_position and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            ):
                args.append(value)
            else:
                kwargs[parameter.name] = value
        return args, kwargs

    def _check_names(self, parameters: Mapping[str, inspect.Parameter]) -> None:
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        for name in (*self._examples, *self._concrete):
            if name not in parameters and not takes_any:
                raise TypeError(f"the program has no argument {name!r}; it has {', '.join(parameters)}")

    def _list_parameters(self, parameters: Mapping[str, inspect.Parameter]) -> list[inspect.Parameter]:
        """The parameters of the signature, and those for its `**kwargs`. `*args` without an example is empty."""
        found = []
        for parameter in parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                extra = [name for name in (*self._examples, *self._concrete) if name not in parameters]
                found += [
                    inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None)
                    for n in dict.fromkeys(extra)
                ]
            elif parameter.kind is not parameter.VAR_POSITIONAL or parameter.name in self._examples:
                found.append(parameter)
        return found

    def _default(
        self, parameter: inspect.Parameter, later: list[inspect.Parameter], follows_default: bool
    ) -> Any:
        """The default in the code of the graph, where a default can't precede an argument without one: a fixed argument has
        none before a required one; a required keyword-only argument has None, which the graph then refuses."""
        is_fixed, value = self._find_fixed(parameter)
        if is_fixed and isinstance(value, PLAIN):
            behind = itertools.takewhile(lambda other: other.kind is not other.VAR_POSITIONAL, later)
            is_followed = parameter.default is EMPTY and any(self._is_required(other) for other in behind)
            return EMPTY if is_followed else value
        if parameter.default is EMPTY:
            return None if parameter.kind is parameter.KEYWORD_ONLY and follows_default else EMPTY
        return parameter.default if isinstance(parameter.default, PLAIN) else None

    def _is_required(self, parameter: inspect.Parameter) -> bool:
        is_fixed, value = self._find_fixed(parameter)
        is_positional = parameter.kind is not parameter.KEYWORD_ONLY
        return is_positional and parameter.default is EMPTY and not (is_fixed and isinstance(value, PLAIN))

    def _placeholder(
        self, parameter: inspect.Parameter, later: list[inspect.Parameter], follows_default: bool
    ) -> Node:
        name, default = parameter.name, self._default(parameter, later, follows_default)
        is_fixed, value = self._find_fixed(parameter)
        target = f"*{name}" if parameter.kind is parameter.VAR_POSITIONAL else name
        node = self._tracer.make_placeholder(target, () if default is EMPTY else (default,), name)
        if is_fixed and isinstance(value, PLAIN):
            self._given[name], self._traced[name] = node, value
            return node
        if not is_fixed and default is None and (name in self._examples or parameter.default is EMPTY):
            self._needed[name] = node
        parts = (
            tuple(fixed_parts(value)) if is_fixed or name in self._concrete or name in self._examples else ()
        )
        if parts:
            self._given[name], self._traced[name] = node, parts
        return node

    def _find_fixed(self, parameter: inspect.Parameter) -> tuple[bool, object]:
        """Whether the argument is fixed, and its value."""
        name = parameter.name
        if name in self._concrete:
            return not holds(self._concrete[name], _is_open), self._concrete[name]
        if name in self._examples:
            example = self._examples[name]
            return not holds(example, _is_open), example
        return self._has_examples and parameter.default is not EMPTY, parameter.default

    def _value(self, parameter: inspect.Parameter, node: Node) -> Any:
        """The argument for the program; `EMPTY` if the program should use its default."""
        name = parameter.name
        if name in self._concrete:
            return self._unpack(self._concrete[name], name, node)
        if name in self._examples:
            return self._unpack(self._examples[name], name, node)
        if self._find_fixed(parameter)[0]:
            return EMPTY
        return self._tracer.present_input(node, UNKNOWN)

    def _unpack(self, example: object, name: str, node: Node) -> Any:
        """The structure of the examples, with tensors replaced by traced values."""
        nodes: dict[Path, Node] = {(): node}

        def node_at(path: Path) -> Node:
            found = nodes.get(path)
            if found is None:
                how, key = path[-1]
                target = operator.getitem if how == "item" else getattr
                found = self._tracer.create_node("call_function", target, (node_at(path[:-1]), key), {})
                nodes[path] = found
            return found

        def value_at(leaf: object, path: Path) -> object:
            meta = (
                UNKNOWN
                if not isinstance(leaf, torch.Tensor)
                else self._tracer.example(leaf, _source(name, path))
            )
            return self._tracer.present_input(node_at(path), meta)

        value = transform(example, value_at, _is_open)
        for path, part in nodes.items():
            if "val" not in part.meta:
                self._tracer.write_meta(part, self._tracer.find_meta(_reach(value, path)))
        return value


def _reach(value: object, path: Path) -> Any:
    for how, key in path:
        value = STEPS[how](value, key)
    return value


def _keys(value: Any, key: object) -> str:
    return " ".join(sorted(map(str, value)))


LENGTH, KEYS = ("length", ""), ("keys", "")
STEPS: dict[str, Callable[[Any, Any], Any]] = {
    "item": operator.getitem,
    "attr": getattr,
    "length": lambda value, key: len(value),
    "keys": _keys,
}
"""The function for each kind of step of a path."""
SHOWN_STEPS = {"item": "{}[{!r}]", "attr": "{}.{}", "length": "the length of {}", "keys": "the keys of {}"}


def _is_open(value: object) -> bool:
    """Whether it becomes a traced value: a tensor, or fx's placeholder object."""
    return isinstance(value, torch.Tensor) or value is torch.fx.PH or isinstance(value, type(torch.fx.PH))


def _source(name: str, path: Path) -> str:
    for how, key in path:
        name = SHOWN_STEPS[how].format(name, key)
    return name
