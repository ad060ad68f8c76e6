"""The layers of a model: one run on stand-ins, what each module took and gave, and equal neighbours folded into one row."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from understudy.fake.tensor import FakeTensor
from understudy.ops.traits.flops import work_of
from understudy.simulation.events import Listener, specs_of_call
from understudy.simulation.storages import ObservedMode
from understudy.spec.call import flat

NUMBER = re.compile(r"\d+")
"""Layers whose names differ in a number only are neighbours of one kind."""


@dataclass(slots=True)
class Layer:
    """One module, with those in it. Sizes in bytes; `saved` is what autograd keeps for the backward pass."""

    path: str
    name: str
    kind: str
    inputs: str = ""
    outputs: str = ""
    parameters: int = 0
    trainable: int = 0
    parameter_bytes: int = 0
    output_bytes: int = 0
    saved_bytes: int = 0
    macs: int = 0
    calls: int = 0
    children: list[Layer] = field(default_factory=list)

    def signature(self) -> tuple[Any, ...]:
        """Equal for layers that differ in their place only."""
        sizes = (self.parameters, self.parameter_bytes, self.saved_bytes, self.macs, self.calls)
        own = (self.kind, self.inputs, self.outputs, *sizes)
        return (*own, *((child.name, child.signature()) for child in self.children))

    def walk(self) -> Iterator[Layer]:
        yield self
        for child in self.children:
            yield from child.walk()

    def to_record(self) -> dict[str, Any]:
        record = {name: getattr(self, name) for name in Layer.__slots__ if name != "children"}
        return record | {"children": [child.to_record() for child in self.children]}


@dataclass(frozen=True, slots=True)
class LayerRow:
    """A layer of the table, or several equal ones."""

    layer: Layer
    label: str
    depth: int
    repeats: int


def measure_layers(model: nn.Module, mode: ObservedMode, run: Callable[[], object]) -> Layer:
    """Call `run`, which calls the model in this mode, and note what happens in each of its modules."""
    root = _make_layers(model, type(model).__name__)
    by_path = {layer.path: layer for layer in root.walk()}
    layers = {module: by_path[path] for path, module in model.named_modules()}
    watch = _Watch(model, layers)
    handles = []
    mode.add_listener(watch)
    try:
        for module in layers:
            handles.append(module.register_forward_pre_hook(watch.enter, with_kwargs=True))
            handles.append(module.register_forward_hook(watch.leave))
        with torch.autograd.graph.saved_tensors_hooks(watch.save, lambda kept: kept):
            run()
    finally:
        mode.remove_listener(watch)
        for handle in handles:
            handle.remove()
    for path, module in model.named_modules(remove_duplicate=False):
        first = layers[module]
        if path in by_path and path != first.path:  # a module that is in several places
            other = by_path[path]
            other.calls, other.inputs, other.outputs = first.calls, first.inputs, first.outputs
    return root


def _make_layers(module: nn.Module, name: str, path: str = "") -> Layer:
    layer = Layer(path, name, type(module).__name__)
    parameters = list(module.parameters())
    layer.parameters = sum(parameter.numel() for parameter in parameters)
    layer.trainable = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    layer.parameter_bytes = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    seen: set[int] = set()
    for child_name, child in module.named_children():
        if id(child) not in seen:
            seen.add(id(child))
            layer.children.append(
                _make_layers(child, child_name, f"{path}.{child_name}" if path else child_name)
            )
    return layer


class _Watch(Listener):
    """The hooks of one run, and the modules that are being called."""

    def __init__(self, model: nn.Module, layers: dict[nn.Module, Layer]) -> None:
        self.layers = layers
        self.stack: list[Layer] = []
        tensors = (*model.parameters(), *model.buffers())
        self.kept: set[int] = {_find_storage(tensor) for tensor in tensors}
        """Storages that are counted already, or are the model's own."""
        self.alive: list[Tensor] = []
        """What is saved stays alive: a new storage must not get the number of an old one."""

    def enter(self, module: nn.Module, args: Sequence[object], kwargs: dict[str, Any]) -> None:
        layer = self.layers[module]
        layer.calls += 1
        if layer.calls == 1:
            layer.inputs = describe([*args, *kwargs.values()])
        self.stack.append(layer)

    def leave(self, module: nn.Module, args: Sequence[object], result: object) -> None:
        layer = self.layers[module]
        if layer.calls == 1:
            layer.outputs = describe([result])
        layer.output_bytes += sum(
            tensor.numel() * tensor.element_size() for tensor in flat(Tensor, (result,), {})
        )
        self.stack.pop()

    def after_operator(
        self, func: Any, args: tuple[object, ...], kwargs: dict[str, Any], result: object
    ) -> None:
        if not self.stack:
            return
        macs = work_of(*specs_of_call(func, args, kwargs, result)).macs
        for layer in {id(layer): layer for layer in self.stack}.values() if macs else ():
            layer.macs += macs

    def save(self, tensor: Tensor) -> Tensor:
        storage = _find_storage(tensor)
        if storage not in self.kept:
            self.kept.add(storage)
            self.alive.append(tensor)
            for layer in {id(layer): layer for layer in self.stack}.values():
                layer.saved_bytes += tensor.untyped_storage().nbytes()
        return tensor


def _find_storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def describe(values: object) -> str:
    """The specs of the tensors, without the device where it is the CPU."""
    return ", ".join(describe_tensor(tensor) for tensor in flat(Tensor, (values,), {}))


def describe_tensor(tensor: Tensor) -> str:
    spec = (
        str(tensor.spec)
        if isinstance(tensor, FakeTensor)
        else f"{tensor.dtype}{list(tensor.shape)}@{tensor.device}"
    )
    return spec.partition("~")[0].partition("@")[0] if spec.endswith("@cpu") else spec


# rows


def fold_layers(root: Layer, depth: int) -> list[LayerRow]:
    """The rows of the table, down to a depth: equal neighbours are one row."""
    return list(_list_rows(root, root.name, 0, depth, 1))


def _list_rows(layer: Layer, label: str, level: int, depth: int, repeats: int) -> Iterator[LayerRow]:
    yield LayerRow(layer, label, level, repeats)
    if level >= depth:
        return
    children = layer.children
    index = 0
    while index < len(children):
        end = index + 1
        signature = children[index].signature()
        stem = NUMBER.sub("", children[index].name)
        while (
            end < len(children)
            and stem != children[end].name
            and NUMBER.sub("", children[end].name) == stem
            and children[end].signature() == signature
        ):
            end += 1
        count = end - index
        first, last = children[index].name, children[end - 1].name
        folded = f"{first}..{last}" if count > 1 else first
        yield from _list_rows(children[index], folded, level + 1, depth, count)
        index = end
