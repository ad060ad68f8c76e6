"""understudy from scratch: the whole idea in some 300 lines that run.

Read this file from top to bottom, or run it: `python docs/understudy-from-scratch.py`. It builds a toy of the library
and uses nothing of it, only torch. Each part has the name of the package that does the same for real:

    1. spec       what is known of a tensor without its data
    2. outcomes   what an operator returns: a new tensor, a view, or one of its inputs
    3. rules      one pure function for each operator
    4. plans      the answer of a call, kept under the key of the call
    5. fake       a tensor without data, and the mode that makes them
    6. capture    a recorder that writes each call down as a node of a graph
    7. report     a question that needs no data: how much memory does a training step hold?

The grammar of the toy:

    key      ::= (op, spec or number, ...)
    plan     ::= tuple of outcomes
    outcome  ::= New(spec) | View(of, spec) | Same(of)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten

# 1. spec
# -------
# A tensor has a shape, strides, a dtype and a device. None of these needs the elements. A spec is
# that list of facts, frozen. There is one object for each list (specs are *interned*), so two specs
# are equal if they are the same object, and a key that is made of specs is hashed by address.


@dataclass(frozen=True)
class Spec:
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


_SPECS: dict[Spec, Spec] = {}


def intern(spec: Spec) -> Spec:
    return _SPECS.setdefault(spec, spec)


def dense(shape: tuple[int, ...], dtype: torch.dtype) -> Spec:
    """A tensor whose elements lie side by side, the last dimension fastest."""
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return intern(Spec(tuple(shape), strides, dtype))


row = dense((2, 3), torch.float32)
assert str(row) == "float32[2, 3]"
assert dense((2, 3), torch.float32) is row
assert row.nbytes == 24

# 2. outcomes
# -----------
# The shape of a result is half of the answer. The other half is aliasing: does the result have
# memory of its own? A program that writes to a view changes the base, and a program that keeps a
# view keeps the memory of the base alive.


@dataclass(frozen=True)
class New:
    """A tensor with memory of its own."""

    spec: Spec


@dataclass(frozen=True)
class View:
    """A tensor on the memory of input number `of`."""

    of: int
    spec: Spec


@dataclass(frozen=True)
class Same:
    """Input number `of` itself, as an in-place operator returns it."""

    of: int


Outcome = New | View | Same

# 3. rules
# --------
# A rule is called with the arguments of the operator, a spec for each tensor. It is pure: no
# tensors, no modes, no global state. So it can be tested by calling it, and its answer can be kept.

RULES: dict[Any, Callable[..., Outcome]] = {}


def rule(*ops: Any) -> Callable[[Callable[..., Outcome]], Callable[..., Outcome]]:
    def register(function: Callable[..., Outcome]) -> Callable[..., Outcome]:
        for op in ops:
            if op in RULES:
                raise ValueError(f"{op} has a rule already")
            RULES[op] = function
        return function

    return register


@rule(aten.mm.default)
def mm(a: Spec, b: Spec) -> Outcome:
    (n, k), (k2, m) = a.shape, b.shape
    if k != k2:
        raise ValueError(f"mm: expected {k} rows in the second matrix, got {k2}: {a} @ {b}")
    return New(dense((n, m), a.dtype))


@rule(aten.t.default)
def t(a: Spec) -> Outcome:
    return View(0, intern(Spec(a.shape[::-1], a.strides[::-1], a.dtype)))


@rule(aten.detach.default)
def detach(a: Spec) -> Outcome:
    return View(0, a)


@rule(aten.relu.default)
def relu(a: Spec) -> Outcome:
    return New(dense(a.shape, a.dtype))


@rule(aten.add.Tensor, aten.mul.Tensor)
def elementwise(a: Spec, b: Spec | float) -> Outcome:
    other = b.shape if isinstance(b, Spec) else ()
    return New(dense(tuple(torch.broadcast_shapes(a.shape, other)), a.dtype))


@rule(aten.threshold_backward.default)
def threshold_backward(grad: Spec, a: Spec, threshold: float) -> Outcome:
    return New(dense(a.shape, a.dtype))


@rule(aten.add_.Tensor, aten.mul_.Tensor)
def in_place(a: Spec, b: Spec | float, alpha: float = 1) -> Outcome:
    return Same(0)


@rule(aten.sum.default)
def total(a: Spec) -> Outcome:
    return New(dense((), a.dtype))


@rule(aten.expand.default)
def expand(a: Spec, size: tuple[int, ...]) -> Outcome:
    missing = len(size) - len(a.shape)
    strides = [0] * missing + [
        s if n == m else 0 for s, n, m in zip(a.strides, a.shape, size[missing:], strict=True)
    ]
    return View(0, intern(Spec(tuple(size), tuple(strides), a.dtype)))


@rule(aten.randn.default, aten.ones.default, aten.zeros.default)
def factory(size: tuple[int, ...], dtype: torch.dtype | None = None, **ignored: object) -> Outcome:
    return New(dense(tuple(size), dtype or torch.float32))


@rule(aten.ones_like.default)
def like(a: Spec, **ignored: object) -> Outcome:
    return New(dense(a.shape, a.dtype))


assert mm(dense((8, 4), torch.float32), dense((4, 2), torch.float32)) == New(dense((8, 2), torch.float32))
assert t(row) == View(0, intern(Spec((3, 2), (1, 3), torch.float32)))

# The library has rules for some hundreds of operators. For the others it asks further *sources*, in
# order: functions that the author of a custom operator registered, decompositions, torch's own meta
# kernels.

# 4. plans
# --------
# Models repeat themselves: 50 equal layers make 50 equal calls. The key of a call names everything
# that its answer may depend on. The answer, a plan, is looked up by it.

_PLANS: dict[tuple[object, ...], Outcome] = {}
statistics = {"hits": 0, "misses": 0}


def freeze(value: Any) -> Any:
    """Arguments as parts of a key. 1, 1.0 and True are equal in Python, and different arguments."""
    if isinstance(value, (list, tuple)):
        return tuple(freeze(part) for part in value)
    return value if isinstance(value, Spec) else (type(value), value)


def infer(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outcome:
    key = (op, freeze(args), freeze(tuple(sorted(kwargs.items()))))
    plan = _PLANS.get(key)
    statistics["hits" if plan else "misses"] += 1
    if plan is None:
        if op not in RULES:
            raise NotImplementedError(f"{op} has no rule; register one with @rule({op})")
        plan = _PLANS[key] = RULES[op](*args, **kwargs)
    return plan


# 5. fake
# -------
# A stand-in is a tensor subclass with a spec and no data. PyTorch's C++ core keeps its sizes and
# strides, and autograd works on it as on any tensor. The mode sits on PyTorch's dispatcher: each
# operator, from Python, from C++ or from a backward pass, is handed to it instead of to a kernel.
# What it does is the diagram of the library: key, plan, tensors.


class Memory:
    """The memory that a stand-in would have. Views share the object: it ends with the last of them."""

    def __init__(self, nbytes: int, ledger: Ledger) -> None:
        self.nbytes, self.ledger = nbytes, ledger
        ledger.now += nbytes
        ledger.peak = max(ledger.peak, ledger.now)

    def __del__(self) -> None:
        self.ledger.now -= self.nbytes


@dataclass
class Ledger:
    now: int = 0
    peak: int = 0


class StandIn(torch.Tensor):
    spec: Spec
    memory: Memory

    @staticmethod
    def __new__(cls, spec: Spec, memory: Memory, requires_grad: bool = False) -> StandIn:
        self = torch.Tensor._make_wrapper_subclass(
            cls, spec.shape, strides=spec.strides, dtype=spec.dtype, requires_grad=requires_grad
        )
        self.spec, self.memory = spec, memory
        return self

    def __repr__(self, **ignored: object) -> str:
        return f"StandIn({self.spec})"

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{op}: stand-ins need their mode; call it inside `with Mode():`")


class Mode(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = [value for value in tree_leaves((args, kwargs)) if isinstance(value, StandIn)]
        specs, spec_kwargs = tree_map(lambda v: v.spec if isinstance(v, StandIn) else v, (args, kwargs or {}))
        return self.realise(infer(op, specs, spec_kwargs), inputs)

    def realise(self, outcome: Outcome, inputs: list[StandIn]) -> StandIn:
        match outcome:
            case New(spec):
                return StandIn(spec, Memory(spec.nbytes, self.ledger))
            case View(of, spec):
                return StandIn(spec, inputs[of].memory)
            case Same(of):
                return inputs[of]


with Mode():
    x = torch.randn(1_000_000, 1_000_000)  # four terabytes, if it were real
    y = torch.relu(x.t() @ x)
    z = y.t()
assert y.memory is not x.memory and z.memory is y.memory
assert repr(y) == "StandIn(float32[1000000, 1000000])"

# A mistake is found as in eager, before anything is computed:
with Mode():
    try:
        torch.randn(8, 128) @ torch.randn(64, 32)
    except ValueError as error:
        assert str(error).startswith("mm: expected 128 rows in the second matrix, got 64")

# Reality is the oracle. What a rule says is compared with the real operator on real tensors:
for shape in [(2, 3), (1, 1), (5, 4)]:
    real = torch.randn(shape)
    with Mode():
        fake = torch.randn(shape)
        answers = [fake.t(), torch.relu(fake), fake @ fake.t(), fake + 1]
    for answer, truth in zip(answers, [real.t(), torch.relu(real), real @ real.t(), real + 1], strict=True):
        assert (answer.shape, answer.stride(), answer.dtype) == (truth.shape, truth.stride(), truth.dtype)

# 6. capture
# ----------
# A recorder is one more mode, above the first: it passes each call on, and writes it down. A value
# is known by the node that made it. What it writes is a graph of torch.fx, which prints as Python
# and can be run on real tensors.


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.graph = torch.fx.Graph()
        self.node_of: dict[int, torch.fx.Node] = {}
        self.alive: list[Any] = []  # ids are unique only among living objects

    def know(self, value: Any, node: torch.fx.Node) -> None:
        self.node_of[id(value)] = node
        self.alive.append(value)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        as_nodes = tree_map(lambda v: self.node_of.get(id(v), v), (args, kwargs or {}))
        self.know(result, self.graph.call_function(op, *as_nodes))
        return result


def capture(function: Callable[..., Any], *examples: torch.Tensor) -> torch.fx.GraphModule:
    """The operators that `function` runs, as a graph. Every line of the function is run, once, on stand-ins."""
    mode, recorder = Mode(), Recorder()
    with mode:
        inputs = [mode.realise(New(dense(tuple(x.shape), x.dtype)), []) for x in examples]
    for position, value in enumerate(inputs):
        recorder.know(value, recorder.graph.placeholder(f"x{position}"))
    with mode, recorder:
        result = function(*inputs)
    recorder.graph.output(recorder.node_of[id(result)])
    recorder.graph.lint()
    return torch.fx.GraphModule(torch.nn.Module(), recorder.graph)


def two_layers(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ first) @ second + 1


examples = [torch.randn(4, 8), torch.randn(8, 16), torch.randn(16, 2)]
graph_module = capture(two_layers, *examples)
calls = [node.target for node in graph_module.graph.find_nodes(op="call_function", target=aten.mm.default)]
assert calls == [aten.mm.default] * 2
torch.testing.assert_close(graph_module(*examples), two_layers(*examples))

# 7. report
# ---------
# Memory needs no data either. Every `Memory` enters the ledger when it is born and leaves it when
# the last tensor on it dies, so the ledger's peak is the peak of the program: forward, what
# autograd keeps for backward, gradients.

with Mode() as mode:
    weights = [torch.randn(512, 512).requires_grad_() for _ in range(8)]
    hidden = torch.randn(64, 512)
    for weight in weights:
        hidden = torch.relu(hidden @ weight)
    hidden.sum().backward()

parameters = sum(weight.memory.nbytes for weight in weights)
gradients = sum(weight.grad.memory.nbytes for weight in weights)
assert parameters == gradients == 8 * 512 * 512 * 4
assert mode.ledger.peak > parameters + gradients

if __name__ == "__main__":
    print(graph_module.code.strip())
    print(f"plans: {statistics['hits']} hits, {statistics['misses']} misses")
    print(
        f"peak of a step of 8 layers: {mode.ledger.peak / 2**20:.1f} MiB, of which parameters {parameters / 2**20:.1f}"
    )

# What the library adds to this toy: every operator, every dtype and layout, devices that are not
# here, sizes that are symbols, values that follow from the program, errors with your line, the
# allocators of real cards, and the command `understudy run`. How it does so is in docs/how-it-
# works.md.
