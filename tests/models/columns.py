"""What is tried with a model class, and what it is compared with: the eager run on real CPU tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import understudy
from tests.graph.reality import differences
from tests.meta.reality import leaves
from tests.models.classes import Case, Inputs
from tests.oracle.compare import facts_of
from understudy import FakeTensorMode, FakeTensorProp, make_fx, symbolic_trace

SIZE, OTHER_SIZE = (2, 8), (3, 11)
"""Batch and length of the example, and of the run that a symbolic graph is tried with."""
CLOSE = 1e-5
"""What a number may differ by, beside the largest of its tensor or 1."""

Facts = dict[str, str]


class Wrong(Exception):
    """What is not as in eager."""


class Eager:
    """The real model, and what eager makes of it."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.model = case.build()
        self.state = state_facts(self.model)
        self.train = train_facts(case, case.build())
        self.model.eval()
        self.names = list(case.inputs(*SIZE))
        self.outputs = run_forward(case, self.model, SIZE)
        self.forward = {path: describe(value) for path, value in self.outputs.items()}
        if not self.outputs:
            raise Wrong("no tensor comes out of eager")

    def function(self, *tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        """The model as a function of tensors alone."""
        return leaves(self.model(**dict(zip(self.names, tensors, strict=True)), **self.case.fixed))

    def inputs(self, size: tuple[int, int], seed: int) -> Inputs:
        torch.manual_seed(seed)
        return self.case.inputs(*size)


def describe(tensor: torch.Tensor) -> str:
    facts = facts_of(tensor)
    return f"{facts.dtype}{list(facts.shape)} strides {facts.stride} {tensor.device.type}"


def state_facts(model: nn.Module) -> Facts:
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: f"{describe(value)} {value.requires_grad}" for name, value in named}


def run_forward(case: Case, model: nn.Module, size: tuple[int, int]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    with torch.no_grad():
        return leaves(model.eval()(**case.inputs(*size), **case.fixed))


def train_facts(case: Case, model: nn.Module) -> Facts:
    """Shapes and dtypes of all gradients of a step, and of the parameters after it."""
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-3)
    outputs = leaves(model(**case.inputs(*SIZE), **case.fixed))
    parts = [value.float().mean() for value in outputs.values() if value.requires_grad and value.is_floating_point()]
    if not parts:
        return {}
    torch.stack(parts).sum().backward()
    optimizer.step()
    facts = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        said = "none" if gradient is None else f"{gradient.dtype}{list(gradient.shape)} {gradient.device.type}"
        facts[name] = f"{said}, {describe(parameter)}"
    return facts


def compare_facts(real: Facts, fake: Facts, device: str = "cpu") -> None:
    wanted = {name: said.replace(" cpu", f" {device}") for name, said in real.items()}
    wrong = [f"{name}: real {wanted.get(name)}, fake {fake.get(name)}" for name in {**wanted, **fake} if wanted.get(name) != fake.get(name)]
    if wrong:
        raise Wrong(f"{len(wrong)} of {len(wanted)} differ: {wrong[0]}")


def compare_numbers(real: dict[str, Any], graph: dict[str, Any]) -> None:
    if list(real) != list(graph):
        raise Wrong(f"eager gives {list(real)}, the graph {list(graph)}")
    for path, value in real.items():
        other = graph[path]
        if (value.shape, value.dtype, value.stride()) != (other.shape, other.dtype, other.stride()):
            raise Wrong(f"{path}: real {describe(value)}, graph {describe(other)}")
        if not torch.equal(value, other) and value.numel():
            a, b = (torch.nan_to_num(part.to(torch.complex128 if part.is_complex() else torch.float64)) for part in (value, other))
            difference = float((a - b).abs().max())
            if difference > CLOSE * max(1.0, float(a.abs().max())):
                raise Wrong(f"{path} differs by {difference:.2g}")


# --- the columns -----------------------------------------------------------------------------------------------------


def construct(eager: Eager) -> None:
    with FakeTensorMode():
        compare_facts(eager.state, state_facts(eager.case.build()))


def forward(eager: Eager) -> None:
    with FakeTensorMode():
        outputs = run_forward(eager.case, eager.case.build(), SIZE)
    compare_facts(eager.forward, {path: describe(value) for path, value in outputs.items()})


def train(eager: Eager) -> None:
    with FakeTensorMode():
        facts = train_facts(eager.case, eager.case.build())
    compare_facts(eager.train, facts)


def capture_fake(eager: Eager) -> None:
    with torch.no_grad():
        graph = make_fx(eager.function, tracing_mode="fake")(*eager.inputs(SIZE, 1).values())
        _compare_runs(eager, graph, SIZE)


def capture_symbolic(eager: Eager) -> str:
    """The graph at another batch and length, or, where its guards fix the length, at another batch."""
    with torch.no_grad():
        graph = make_fx(eager.function, tracing_mode="symbolic")(*eager.inputs(SIZE, 1).values())
        _compare_runs(eager, graph, SIZE)
        for size, note in ((OTHER_SIZE, ""), ((OTHER_SIZE[0], SIZE[1]), "length fixed")):
            inputs = list(eager.inputs(size, 2).values())
            if graph.shape_env.evaluate_guards(*inputs):
                _compare_runs(eager, graph, size)
                return note
    fixed = "; ".join(str(entry) for entry in graph.shape_env.specialisations)
    raise Wrong(f"holds for no other batch: {fixed or '; '.join(map(str, graph.shape_env.guards))}")


def _compare_runs(eager: Eager, graph: Callable[..., Any], size: tuple[int, int]) -> None:
    inputs = eager.inputs(size, 2).values()
    torch.manual_seed(3)
    real = eager.function(*(value.clone() for value in inputs))
    torch.manual_seed(3)
    compare_numbers(real, graph(*inputs))


def propagate(eager: Eager) -> None:
    """Every node of the captured graph. Where sizes are data, nodes keep the symbols that say so, and are not compared."""
    inputs = list(eager.inputs(SIZE, 1).values())
    with torch.no_grad():
        graph = copy.deepcopy(make_fx(eager.function, tracing_mode="fake")(*inputs))
        has_symbols = any(_symbols_in(node) for node in graph.graph.nodes)
        for node in () if has_symbols else graph.graph.nodes:
            node.meta.pop("val", None)
        FakeTensorProp(graph).propagate(*inputs)
        open_nodes = {node.format_node() for node in graph.graph.nodes if _symbols_in(node)}
        found = [line for line in differences(graph, *inputs) if line.partition(": real ")[0] not in open_nodes]
    if found:
        raise Wrong(f"{len(found)} nodes differ: {found[0]}")


def _symbols_in(node: torch.fx.Node) -> bool:
    parts = tree_leaves(node.meta.get("val"))
    numbers = [number for part in parts for number in (part.shape if isinstance(part, torch.Tensor) else (part,))]
    return any(isinstance(number, (torch.SymInt, torch.SymBool, torch.SymFloat)) for number in numbers)


def trace(eager: Eager) -> None:
    with torch.no_grad():
        graph = symbolic_trace(eager.model, meta_args=eager.inputs(SIZE, 1), concrete_args=eager.case.fixed)
        names = eager.names
        _compare_runs(eager, lambda *tensors: leaves(graph(**dict(zip(names, tensors, strict=True)))), SIZE)


def construct_cuda(eager: Eager) -> None:
    with _cuda():
        compare_facts(eager.state, state_facts(_build_on_cuda(eager)), "cuda")


def forward_cuda(eager: Eager) -> None:
    with _cuda():
        outputs = run_forward(eager.case, _build_on_cuda(eager), SIZE)
        facts = {path: describe(value) for path, value in outputs.items()}
    compare_facts(eager.forward, facts, "cuda")


def train_cuda(eager: Eager) -> None:
    with _cuda():
        facts = train_facts(eager.case, _build_on_cuda(eager))
    compare_facts(eager.train, facts, "cuda")


@contextmanager
def _cuda() -> Iterator[None]:
    with understudy.simulate("h100"), torch.device("cuda"):
        yield


def _build_on_cuda(eager: Eager) -> nn.Module:
    """Legacy constructors (`torch.Tensor(3)`) make tensors on the CPU whatever the default device is."""
    return eager.case.build().to("cuda")


COLUMNS: dict[str, Callable[[Eager], str | None]] = {
    "construct": construct, "forward": forward, "train step": train, "make_fx fake": capture_fake,
    "make_fx symbolic": capture_symbolic, "FakeTensorProp": propagate, "symbolic_trace": trace,
    "construct, cuda": construct_cuda, "forward, cuda": forward_cuda, "train step, cuda": train_cuda,
}  # fmt: skip
