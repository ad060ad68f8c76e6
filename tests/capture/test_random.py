"""Random programs: in all three modes, the graph does what the program does, and elsewhere where the guards admit it."""

from __future__ import annotations

import warnings
from itertools import islice

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch.fx import GraphModule

from tests.capture.captured import MODES, assert_same, captured
from tests.capture.random_programs import ON_DATA, Program, programs
from tests.oracle.fx_run import SymbolicGraph
from understudy.errors import DataDependentOutputException, GuardOnDataDependentSymNode

pytestmark = pytest.mark.filterwarnings("ignore")

Case = tuple[Program, int, list[torch.Tensor]]
OTHER_SIZES = 3
EVERYTHING = settings(deadline=None, suppress_health_check=list(HealthCheck))


def check_program(program: Program, number: int, inputs: list[torch.Tensor]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for mode in MODES:
            graph = captured(program, number, *inputs, mode=mode)
            graph.graph.lint()
            assert_same(program, graph, number, *inputs)
        check_elsewhere(program, graph, number, inputs)


def check_program_on_data(program: Program, number: int, inputs: list[torch.Tensor]) -> None:
    """As above; a mode may say that it can't decide, and the graph that data are not what it assumes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for mode in MODES:
            try:
                graph = captured(program, number, *inputs, mode=mode)
            except (DataDependentOutputException, GuardOnDataDependentSymNode):
                continue
            graph.graph.lint()
            try:
                assert_same(program, graph, number, *inputs)
            except RuntimeError as error:
                if "which this graph assumes" not in str(error):
                    raise


def check_elsewhere(program: Program, graph: GraphModule, number: int, inputs: list[torch.Tensor]) -> None:
    if len({tensor.untyped_storage()._cdata for tensor in inputs}) < len(inputs):
        return  # how tensors of other sizes would share memory is not said
    run = SymbolicGraph(graph, [number, *inputs])
    for sizes in islice(run.admitted(), OTHER_SIZES):
        assert_same(program, graph, *run.arguments_at(sizes))


@settings(EVERYTHING, max_examples=60)
@given(programs())
def test_random_programs(case: Case) -> None:
    check_program(*case)


@settings(EVERYTHING, max_examples=40)
@given(programs(ON_DATA))
def test_random_programs_on_data(case: Case) -> None:
    check_program_on_data(*case)


@pytest.mark.conformance
@settings(EVERYTHING, max_examples=3000)
@given(programs())
def test_many_random_programs(case: Case) -> None:
    check_program(*case)


@pytest.mark.conformance
@settings(EVERYTHING, max_examples=1000)
@given(programs(ON_DATA))
def test_many_random_programs_on_data(case: Case) -> None:
    check_program_on_data(*case)
