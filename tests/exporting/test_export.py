"""export against torch.export.export: the same signatures, and the numbers of the model itself at three sizes."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import ExportedProgram

import understudy
from tests.exporting.models import leaves_of
from tests.exporting.programs import CASES, Case
from understudy.exporting.signature import ExportError

SIZES = ((4, 6), (3, 6), (7, 6))
WRITING = ("CountsCalls", "AssignsBuffer", "BatchNormInTraining", "WritesInput", "KeyValueCache")
"""Whose decomposed signatures are compared with torch's, which takes its time."""
each_case = pytest.mark.parametrize("name", CASES)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def sizes_of(case: Case) -> tuple[tuple[int, int], ...]:
    return SIZES if case.dynamic else SIZES[:1]


def kinds(specs: Any) -> list[Any]:
    return [(spec.kind, spec.target, type(spec.arg)) for spec in specs]


def compare_signatures(ours: ExportedProgram, theirs: ExportedProgram) -> None:
    assert kinds(ours.graph_signature.input_specs) == kinds(theirs.graph_signature.input_specs)
    assert kinds(ours.graph_signature.output_specs) == kinds(theirs.graph_signature.output_specs)
    names = [[spec.arg.name for spec in ep.graph_signature.input_specs] for ep in (ours, theirs)]
    assert names[0] == names[1]
    assert ours.call_spec.in_spec == theirs.call_spec.in_spec
    assert ours.call_spec.out_spec == theirs.call_spec.out_spec
    assert ours.state_dict.keys() == theirs.state_dict.keys()
    assert ours.constants.keys() == theirs.constants.keys()
    assert [entry.fqn for entry in ours.module_call_graph] == [
        entry.fqn for entry in theirs.module_call_graph
    ]


@each_case
def test_training_dialect(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    model = case.make()
    ours = understudy.export(model, case.inputs(*SIZES[0]), dynamic_shapes=case.dynamic)
    ours.validate()
    compare_signatures(ours, torch.export.export(model, case.inputs(*SIZES[0]), dynamic_shapes=case.dynamic))
    fresh = copy.deepcopy(model)
    for size in sizes_of(case):
        program, inputs = understudy.export(
            copy.deepcopy(fresh), case.inputs(*SIZES[0]), dynamic_shapes=case.dynamic
        ).module(), case.inputs(*size)  # fmt: skip
        eager = copy.deepcopy(fresh)
        for _ in range(2):
            given, wanted = copy.deepcopy(inputs), copy.deepcopy(inputs)
            torch.testing.assert_close(leaves_of(program(*given)), leaves_of(eager(*wanted)), atol=0, rtol=0)
            torch.testing.assert_close(leaves_of(given), leaves_of(wanted), atol=0, rtol=0)


@each_case
def test_decomposed_dialect(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    model = case.make()
    table = torch.export.default_decompositions()
    example = case.inputs(*SIZES[0])
    direct = understudy.export(model, example, dynamic_shapes=case.dynamic, decompositions=table)
    again = understudy.export(model, example, dynamic_shapes=case.dynamic).run_decompositions()
    theirs = None
    if name in WRITING:
        theirs = torch.export.export(model, example, dynamic_shapes=case.dynamic).run_decompositions()
    for ours in (direct, again):
        ours.validate()
        for node in ours.graph.nodes:
            assert not (isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable), (
                node
            )
        if theirs is not None:
            assert kinds(ours.graph_signature.output_specs) == kinds(theirs.graph_signature.output_specs)
            assert kinds(ours.graph_signature.input_specs) == kinds(theirs.graph_signature.input_specs)
    for size in sizes_of(case):
        eager, inputs = copy.deepcopy(model), case.inputs(*size)
        programs = [copy.deepcopy(ep.module()) for ep in (direct, again)]
        for _ in range(2):
            wanted = copy.deepcopy(inputs)
            expected = eager(*wanted)
            for program in programs:
                given = copy.deepcopy(inputs)
                torch.testing.assert_close(
                    leaves_of(program(*given)), leaves_of(expected), atol=1e-5, rtol=1e-5
                )
                torch.testing.assert_close(leaves_of(given), leaves_of(wanted), atol=1e-5, rtol=1e-5)


@each_case
def test_saved_and_loaded(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    model = case.make()
    ours = understudy.export(model, case.inputs(*SIZES[0]), dynamic_shapes=case.dynamic)
    file = io.BytesIO()
    torch.export.save(ours, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    inputs = case.inputs(*sizes_of(case)[-1])
    given, wanted = copy.deepcopy(inputs), copy.deepcopy(inputs)
    torch.testing.assert_close(
        leaves_of(loaded(*given)), leaves_of(copy.deepcopy(model)(*wanted)), atol=0, rtol=0
    )


class WritesCache(torch.nn.Module):
    """A cache that is written with results of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(1, 32, 8))
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        keys = self.keys.index_copy_(1, places, self.linear(x))
        return x @ keys.transpose(1, 2)


def test_a_program_is_copied_with_what_was_written() -> None:
    model, inputs = WritesCache(), (torch.randn(1, 5, 8), torch.arange(5))
    program = understudy.export(model, inputs, dynamic_shapes={"x": {1: "seq"}, "places": {0: "seq"}})
    copied = copy.deepcopy(program)
    other = (torch.randn(1, 7, 8), torch.arange(7))
    for made in (copied.module(), copy.deepcopy(copied).run_decompositions().module()):
        torch.testing.assert_close(made(*other), copy.deepcopy(model)(*other))


def test_a_program_is_not_pickled() -> None:
    """One of torch's can't be read again."""
    program = understudy.export(torch.nn.Linear(3, 2), (torch.randn(4, 3),), dynamic_shapes=({0: "rows"},))
    with pytest.raises(pickle.PicklingError, match=r"use torch.export.save"):
        pickle.dumps(program)


class Resampled(torch.nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.interpolate(x, **self.options)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic"])
@pytest.mark.parametrize("scale", [2, 1.5])
def test_numbers_that_are_computed_from_sizes_stay_symbols(mode: str, scale: float) -> None:
    """In a decomposed dialect the scale is a float in the graph: its value for torch's tools must fix no size."""
    model, varying = Resampled(scale_factor=scale, mode=mode), torch.export.Dim.DYNAMIC
    program = understudy.export(
        model, (torch.randn(2, 3, 8, 10),), dynamic_shapes={"x": {2: varying, 3: varying}},
        decompositions=torch.export.default_decompositions(),
    )  # fmt: skip
    program.validate()
    for shape in ((2, 3, 8, 10), (2, 3, 6, 20), (2, 3, 11, 4)):
        x = torch.randn(shape)
        torch.testing.assert_close(program.module()(x), model(x), atol=1e-5, rtol=1e-5)


class Named(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.add_module(name, nn.Linear(3, 3))

    def forward(self, x: Any) -> Any:
        return next(self.children())(x)


@pytest.mark.parametrize(
    "name", ["class", "None", 'q"); print("', "a\\b", "two\nlines", "graph", "code", "meta"]
)
def test_paths_that_code_can_not_have_are_refused(name: str) -> None:
    with pytest.raises(ExportError, match="can't be the path of a parameter"):
        understudy.export(Named(name), (torch.randn(2, 3),))


@pytest.mark.parametrize("name", ["a-b", "with space", "1", "self", "é", "x_"])
def test_unusual_paths_that_code_can_have(name: str) -> None:
    x, model = torch.randn(2, 3), Named(name)
    assert torch.equal(understudy.export(model, (x,)).module()(x), model(x))


def test_a_marked_region_is_part_of_the_program() -> None:
    @torch.compiler.nested_compile_region
    def region(x: Any, y: Any) -> Any:
        return x.sin() + y

    class Marked(nn.Module):
        def forward(self, x: Any, y: Any) -> Any:
            return region(region(x, y), y)

    inputs = torch.randn(3), torch.randn(3)
    program = understudy.export(Marked(), inputs)
    assert torch.equal(program.module()(*inputs), Marked()(*inputs))


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            self.mean.add_(x.mean(0))
        return self.linear(x) + self.mean


def test_inference_mode_is_no_region_of_a_program() -> None:
    """As in torch.export: a program that some other tool reads has plain operators there."""
    model, x = Counted(), torch.randn(2, 3)
    programs = understudy.export(model, (x,)), torch.export.export(model, (x,))
    ours, theirs = (
        [node.target for node in program.graph.nodes if node.op == "call_function"] for program in programs
    )
    assert ours == theirs


def test_branches_belong_to_the_model_itself() -> None:
    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.ReLU())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inner(x)
            return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))

    graph = understudy.export(Chooses(), (torch.randn(3),)).graph
    stacks = [
        [path for path, _ in node.meta["nn_module_stack"].values()]
        for node in graph.find_nodes(op="get_attr")
    ]
    assert stacks == [[""], [""]]
