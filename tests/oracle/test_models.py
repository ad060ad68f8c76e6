"""Whole models: what a run with stand-ins leaves behind has the metadata of the real run's."""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten

from tests.oracle.compare import Account, differences, observe
from tests.oracle.engines import UNDER_TEST, new_mode
from tests.oracle.models import PROGRAMS, Program, Trained

pytestmark = pytest.mark.filterwarnings("ignore")

programs = pytest.mark.parametrize("program", PROGRAMS.values(), ids=list(PROGRAMS))


def account_of(result: Any) -> Account:
    return observe(_plain(result), [], [])


def _plain(result: Any) -> Any:
    """Dataclasses (and the outputs of transformers, which are both) as dictionaries without what is absent."""
    if isinstance(result, Trained):
        return {name: _plain(value) for name, value in vars(result).items()}
    if hasattr(result, "to_tuple"):
        return tuple(_plain(value) for value in result.to_tuple())
    if hasattr(result, "layers") and not isinstance(result, torch.nn.Module):
        return [_plain(vars(layer)) for layer in result.layers]  # a cache of keys and values
    if is_dataclass(result) and not isinstance(result, type):
        return _plain(vars(result))
    if isinstance(result, dict):
        return {key: _plain(value) for key, value in result.items()}
    return result


def assert_same(real: Any, fake: Any) -> None:
    left, right = account_of(real), account_of(fake)
    assert any(isinstance(leaf, torch.Tensor) for leaf in tree_flatten(_plain(real))[0])
    found = differences(left, right)
    assert not found, "\n".join(str(difference) for difference in found[:10])


@programs
def test_training_leaves_the_same_metadata(program: Program) -> None:
    real = program.train()
    with new_mode(UNDER_TEST):
        fake = program.train()
    assert_same(real, fake)
    for name in real.parameters:
        assert isinstance(fake.parameters[name], torch.nn.Parameter), name


@programs
def test_inference_gives_the_same_metadata(program: Program) -> None:
    real = program.infer()
    with new_mode(UNDER_TEST):
        fake = program.infer()
    assert_same(real, fake)


@programs
def test_a_converted_model_gives_the_same_metadata(program: Program) -> None:
    """The other way in: a real model whose parameters and inputs are replaced by stand-ins."""
    real = program.infer()
    torch.manual_seed(0)
    model, inputs = program.build().eval(), program.inputs()
    mode = new_mode(UNDER_TEST)
    state = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    stand_ins = {name: mode.from_tensor(tensor) for name, tensor in state.items()}
    given = {name: mode.from_tensor(value) for name, value in inputs.items()}
    with mode, torch.no_grad():
        fake = torch.func.functional_call(model, stand_ins, kwargs=given, tie_weights=False)
    assert_same(real, fake)
