"""The state of an optimizer while its step is captured.

An optimizer makes its state in its first step: `state["exp_avg"] = torch.zeros_like(p)`. When it stores such a tensor,
the tensor is computed for real by the operators that were recorded for it, and the graph reads it as an attribute: from
there on, the step is recorded as any later one.

    StepState            the table `optimizer.state`; its entries report what is stored in them
    initial_value        the real value of a tensor that the step has made
    lazy_zeros           zeros whose memory the system provides when it is written to
    is_torch_optimizer   whether an optimizer is one of torch's own
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from understudy import _torch
from understudy.fake.tensor import FakeTensor

Store = Callable[[str, str, Any], Any]
"""(name of the parameter, key, value) → the value to store."""
NO_VALUE = object()


class StepEntries(dict[str, Any]):
    """The state of one parameter. `store` is called for each value that a key is given first; `changed` collects the keys
    of numbers that are given another value later: the graph would keep the one that they have now."""

    def __init__(self, name: str, store: Store, changed: set[str]) -> None:
        super().__init__()
        self.name, self._store, self._changed = name, store, changed

    def __setitem__(self, key: str, value: Any) -> None:
        before = self.get(key, NO_VALUE)
        if before is NO_VALUE or before is None:
            value = self._store(self.name, key, value)
        elif is_number(value) and before != value:
            self._changed.add(key)
        super().__setitem__(key, value)

    def __copy__(self) -> dict[str, Any]:
        return dict(self)

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *others: Any, **entries: Any) -> None:
        for key, value in dict(*others, **entries).items():
            self[key] = value


class StepState(dict[Any, StepEntries]):
    """The table of states by parameter. A parameter without state has an empty one, as in `Optimizer.state`."""

    def __init__(self, names: Mapping[torch.Tensor, str], store: Store) -> None:
        super().__init__()
        self._names, self._store = names, store
        self.changed: set[str] = set()

    def name_of(self, parameter: torch.Tensor) -> str:
        return self._names[parameter]

    def __missing__(self, parameter: torch.Tensor) -> StepEntries:
        entries = StepEntries(self._names[parameter], self._store, self.changed)
        super().__setitem__(parameter, entries)
        return entries

    def __setitem__(self, parameter: torch.Tensor, entries: Mapping[str, Any]) -> None:
        if entries is not self.get(parameter):
            self.pop(parameter, None)
            self[parameter].update(entries)

    def __copy__(self) -> dict[Any, StepEntries]:
        return dict(self)

    def setdefault(self, parameter: torch.Tensor, default: Mapping[str, Any] | None = None) -> StepEntries:
        if parameter not in self and default:
            self[parameter] = default
        return self[parameter]


def is_number(value: object) -> bool:
    return isinstance(value, (int, float, complex)) and not isinstance(value, bool)


def numbers_in(optimizer: Any) -> dict[str, Any]:
    """The plain numbers among the attributes of an optimizer and the options of its groups, by the words that name them."""
    found = {f"the attribute {name!r}": value for name, value in vars(optimizer).items() if is_number(value)}
    for position, group in enumerate(optimizer.param_groups):
        options = {name: value for name, value in group.items() if is_number(value)}
        found.update({f"the option {name!r} of group {position}": value for name, value in options.items()})
    return found


# --- the values with which state begins --------------------------------------------------------------------------------


class StateFromInputs(Exception):
    """The optimizer computes its initial state from gradients."""


UNWRITTEN = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
ZEROS = ("zeros", "zeros_like", "new_zeros")
LIKE = (*ZEROS, "ones_like", "empty_like", "full_like", "new_ones", "new_empty", "new_full")
"""Operators that read only the metadata of their input."""
LEAST_LAZY_BYTES = 1 << 18
"""Smaller tensors are zeroed at once: a mapping of their own costs more."""


def initial_value(node: Node, read: Callable[[Node], Any]) -> torch.Tensor:
    """The real value of a node that depends only on parameters, constants and metadata. `read`: the value of a `get_attr`
    node. Raises `StateFromInputs` if it depends on gradients or inputs, or is memory that a kernel fills from them."""
    name = _name(node)
    if name in UNWRITTEN:
        raise StateFromInputs(node.name)
    if name in ZEROS:
        return lazy_zeros(node.meta["val"])
    value = _evaluate(node, read, {})
    return value if name in LIKE else value.clone()


def _name(node: Node) -> str:
    return node.target.overloadpacket.__name__ if isinstance(node.target, _torch.OpOverload) else ""


def _evaluate(node: Node, read: Callable[[Node], Any], values: dict[Node, Any]) -> Any:
    if node in values:
        return values[node]
    name = _name(node)
    if name in ZEROS:
        result: Any = lazy_zeros(node.meta["val"])
    elif node.op == "get_attr":
        result = read(node)
    elif node.op == "call_function" and callable(node.target):
        like = node.args[0] if name in LIKE else None
        if isinstance(like, Node):
            values.setdefault(like, _empty_like(like.meta["val"]))
        args, kwargs = torch.fx.map_arg(
            (node.args, node.kwargs), lambda inner: _evaluate(inner, read, values)
        )
        result = node.target(*args, **kwargs)
    else:
        raise StateFromInputs(node.name)
    values[node] = result
    return result


def _sizes(val: Any) -> tuple[Sequence[int], Sequence[int]]:
    if type(val) is FakeTensor and not val._spec.is_symbolic:
        return val._spec.numbers[:2]
    return [int(size) for size in val.shape], [int(step) for step in val.stride()]


def _empty_like(val: Any) -> torch.Tensor:
    return torch.empty_strided(*_sizes(val), dtype=val.dtype, device=val.device)


def lazy_zeros(val: Any) -> torch.Tensor:
    """Zeros with the metadata of a stand-in. The memory of a large one on the CPU is mapped when it is first written to:
    the state of a model of a billion parameters is made at once, and the first step pays for it."""
    shape, stride = _sizes(val)
    length = 0
    if 0 not in shape:
        length = 1 + sum([(size - 1) * step for size, step in zip(shape, stride, strict=True)])
    size = length * val.dtype.itemsize
    if val.device.type != "cpu" or size < LEAST_LAZY_BYTES or _torch.active_fake_mode() is not None:
        return _empty_like(val).zero_()
    options = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    memory = torch.frombuffer(mmap.mmap(-1, size, **options), dtype=val.dtype).untyped_storage()
    return torch.empty(0, dtype=val.dtype).set_(memory, 0, shape, stride)


def is_torch_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this is an optimizer of torch: these make their state before they use it, and use it alike in each step."""
    return type(optimizer).__module__.split(".")[:2] == ["torch", "optim"]
