"""What is tried with a model class, and what it is compared with: the eager run on real CPU tensors."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

import understudy
from tests.graph.reality import differences
from tests.meta.reality import leaves
from tests.models.classes import Case, Inputs
from tests.models.variants import bind_structure
from tests.oracle.compare import facts_of
from understudy import FakeTensorMode, FakeTensorProp, make_fx, symbolic_trace
from understudy.errors import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
)
from understudy.meta.errors import MetaTraceError

SIZE = (2, 8)
"""Batch and length of the example."""
OTHER_SIZES = {(3, 11): "", (3, 8): "length fixed", (4, 11): "batch even"}
"""Those of the run that a symbolic graph is tried with: the first that its guards allow, and what is noted of it."""
CLOSE = 1e-5
"""What a number may differ by, beside the largest of its tensor or 1."""

STRIDES = re.compile(r" strides (\([^)]*\)|None)")
Facts = dict[str, str]
Results = dict[str, Facts | Exception]
"""Of each step."""


BOUND = "grid bound"
"""The note of a capture that decides by the structure of the batch: it is taken again with this input as a constant, and holds
for no other structure."""
ANSWERED = "plausible answers"
"""The note of a step that reads data: a plain mode refuses it, `answers="plausible"` does not."""


class Wrong(Exception):
    """What is not as in eager."""


class Eager:
    """The real model, what eager makes of it, and what several columns need."""

    def __init__(self, case: Case, is_bound: bool = False) -> None:
        self.case, self.is_bound = case, is_bound
        self.model = case.build()
        self.names = list(case.inputs(*SIZE))
        self.function = as_function(self.model, self.names, case.fixed)
        self.facts = {"construct": state_facts(self.model), "train step": train_facts(case, self.model)}
        self.model.zero_grad()
        self.facts["forward"] = forward_facts(case, self.model)
        if not self.facts["forward"]:
            raise Wrong("no tensor comes out of eager")
        with torch.no_grad():
            for seed in (1, 2):  # those of the columns
                self.function(*self.inputs(SIZE, seed).values())

    def inputs(self, size: tuple[int, int], seed: int) -> Inputs:
        torch.manual_seed(seed)
        return self.case.inputs(*size)

    def capture(self, tracing_mode: Any) -> GraphModule:
        """Real tensors outside of modules are constants: those that are bound."""
        trace = make_fx(self.function, tracing_mode=tracing_mode, allow_non_fake_inputs=self.is_bound)
        return trace(*self.inputs(SIZE, 1).values())

    @cached_property
    def captured(self) -> GraphModule:
        with torch.no_grad():
            return self.capture("fake")

    @cached_property
    def bound(self) -> Eager | None:
        case = bind_structure(self.case, SIZE)
        return None if case is None else Eager(case, is_bound=True)


def as_function(model: nn.Module, names: list[str], fixed: Inputs) -> Callable[..., dict[str, torch.Tensor]]:
    """The model as a function of tensors alone. It refers to nothing else, as captures look for modules in what it refers to."""

    def run(*tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        return leaves(model(**dict(zip(names, tensors, strict=True)), **fixed))

    return run


Column = Callable[[Eager], str | None]
"""Raises if the column is not right; else says what is to be noted of it."""


def run_steps(case: Case, build: Callable[[], nn.Module]) -> Results:
    """What construction, a forward pass and a training step leave behind, or how they fail."""
    results: Results = {}
    try:
        model = build()
    except Exception as error:
        return dict.fromkeys(("construct", "forward", "train step"), error)
    steps = {
        "construct": state_facts,
        "forward": partial(forward_facts, case),
        "train step": partial(train_facts, case),
    }
    for name, step in steps.items():
        try:
            results[name] = step(model)
        except Exception as error:
            results[name] = error
    return results


def describe(tensor: torch.Tensor) -> str:
    facts = facts_of(tensor)
    return f"{facts.dtype}{list(facts.shape)} strides {facts.stride} {tensor.device.type}"


def state_facts(model: nn.Module) -> Facts:
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: f"{describe(value)} {value.requires_grad}" for name, value in named}


def forward_facts(case: Case, model: nn.Module) -> Facts:
    torch.manual_seed(0)
    with torch.no_grad():
        outputs = leaves(model.eval()(**case.inputs(*SIZE), **case.fixed))
    return {path: describe(value) for path, value in outputs.items()}


def train_facts(case: Case, model: nn.Module) -> Facts:
    """Shapes and dtypes of all gradients of a step, and of the parameters after it."""
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-3)
    outputs = leaves(model(**case.inputs(*SIZE), **case.fixed))
    parts = [
        value.float().mean()
        for value in outputs.values()
        if value.requires_grad and value.is_floating_point()
    ]
    if not parts:
        return {}
    torch.stack(parts).sum().backward()
    optimizer.step()
    facts = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        said = (
            "none" if gradient is None else f"{gradient.dtype}{list(gradient.shape)} {gradient.device.type}"
        )
        facts[name] = f"{said}, {describe(parameter)}"
    return facts


def compare_facts(real: Facts, fake: Facts | Exception) -> None:
    if isinstance(fake, Exception):
        raise fake
    wrong = [name for name in {**real, **fake} if real.get(name) != fake.get(name)]
    if wrong:
        first = wrong[0]
        raise Wrong(
            f"{len(wrong)} of {len(real)} differ: {first}: real {real.get(first)}, fake {fake.get(first)}"
        )


def compare_on_cuda(real: Facts, fake: Facts | Exception) -> None:
    """All but strides: CUDA kernels may lay out results otherwise than those of the CPU, and there is no card to ask."""
    if isinstance(fake, Exception):
        raise fake
    wanted = {name: STRIDES.sub("", said).replace(" cpu", " cuda") for name, said in real.items()}
    compare_facts(wanted, {name: STRIDES.sub("", said) for name, said in fake.items()})


def compare_numbers(real: dict[str, Any], graph: dict[str, Any]) -> None:
    if list(real) != list(graph):
        raise Wrong(f"eager gives {list(real)}, the graph {list(graph)}")
    for path, value in real.items():
        other = graph[path]
        if (value.shape, value.dtype, value.stride()) != (other.shape, other.dtype, other.stride()):
            raise Wrong(f"{path}: real {describe(value)}, graph {describe(other)}")
        if not torch.equal(value, other) and value.numel():
            a, b = (
                torch.nan_to_num(part.to(torch.complex128 if part.is_complex() else torch.float64))
                for part in (value, other)
            )
            difference = float((a - b).abs().max())
            if difference > CLOSE * max(1.0, float(a.abs().max())):
                raise Wrong(f"{path} differs by {difference:.2g}")


# --- the columns -----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=2)
def run_on_stand_ins(eager: Eager, answers: str) -> Results:
    with FakeTensorMode(answers=answers):
        return run_steps(eager.case, eager.case.build)


@lru_cache(maxsize=2)
def run_on_cuda(eager: Eager, answers: str) -> Results:
    """Legacy constructors (`torch.Tensor(3)`) make tensors on the CPU whatever the default device is: hence `to`."""
    with understudy.simulate("h100", answers=answers), torch.device("cuda"):
        return run_steps(eager.case, lambda: eager.case.build().to("cuda"))


def run_step(
    run: Callable[[Eager, str], Results], compare: Callable[[Facts, Facts | Exception], None], step: str
) -> Column:
    """A step on stand-ins; where it reads data, with plausible answers."""

    def column(eager: Eager) -> str:
        result = run(eager, "error")[step]
        has_read = isinstance(result, (DataDependentOutputException, DynamicOutputShapeException))
        compare(eager.facts[step], run(eager, "plausible")[step] if has_read else result)
        return ANSWERED if has_read else ""

    return column


on_stand_ins = partial(run_step, run_on_stand_ins, compare_facts)
on_cuda = partial(run_step, run_on_cuda, compare_on_cuda)


def capture_fake(eager: Eager) -> None:
    with torch.no_grad():
        _compare_runs(eager, eager.captured, SIZE)


def capture_symbolic(eager: Eager) -> str:
    """The graph at another batch and length, or, where its guards fix the length, at another batch. If the structure of the
    batch is bound, they fix both."""
    with torch.no_grad():
        graph = eager.capture("symbolic")
        _compare_runs(eager, graph, SIZE)
        for size, note in OTHER_SIZES.items():
            inputs = list(eager.inputs(size, 2).values())
            if graph.shape_env.evaluate_guards(*inputs):
                _compare_runs(eager, graph, size)
                return note
    if eager.is_bound:
        return ""
    raise Wrong(f"holds for no other batch: {'; '.join(map(str, graph.shape_env.check(*inputs)))}")


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
        graph = copy.deepcopy(eager.captured)
        has_symbols = any(_symbols_in(node) for node in graph.graph.nodes)
        for node in () if has_symbols else graph.graph.nodes:
            node.meta.pop("val", None)
        FakeTensorProp(graph).propagate(*inputs)
        open_nodes = {node.format_node(): node for node in graph.graph.nodes if _symbols_in(node)}
        for node in open_nodes.values():
            del node.meta["val"]
        found = [
            line for line in differences(graph, *inputs) if line.partition(": real ")[0] not in open_nodes
        ]
    if found:
        raise Wrong(f"{len(found)} nodes differ: {found[0]}")


def _symbols_in(node: Node) -> bool:
    parts = tree_leaves(node.meta.get("val"))
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    numbers = [*parts, *(number for tensor in tensors for number in (*tensor.shape, tensor.storage_offset()))]
    return any(isinstance(number, (torch.SymInt, torch.SymBool, torch.SymFloat)) for number in numbers)


def trace(eager: Eager) -> None:
    with torch.no_grad():
        graph = symbolic_trace(eager.model, meta_args=eager.inputs(SIZE, 1), concrete_args=eager.case.fixed)
        names = eager.names
        _compare_runs(eager, lambda *tensors: leaves(graph(**dict(zip(names, tensors, strict=True)))), SIZE)


def or_bound(column: Column) -> Column:
    """A capture; where it needs to know data, with the structure of the batch bound, if there is one."""

    def capture(eager: Eager) -> str | None:
        try:
            return column(eager)
        except (
            DataDependentOutputException,
            DynamicOutputShapeException,
            GuardOnDataDependentSymNode,
            MetaTraceError,
        ):
            if eager.bound is None:
                raise
        column(eager.bound)
        return BOUND

    return capture


COLUMNS: dict[str, Column] = {
    "construct": on_stand_ins("construct"), "forward": on_stand_ins("forward"), "train step": on_stand_ins("train step"),
    "make_fx fake": or_bound(capture_fake), "make_fx symbolic": or_bound(capture_symbolic), "FakeTensorProp": or_bound(propagate),
    "symbolic_trace": or_bound(trace),
    "construct, cuda": on_cuda("construct"), "forward, cuda": on_cuda("forward"), "train step, cuda": on_cuda("train step"),
}  # fmt: skip
