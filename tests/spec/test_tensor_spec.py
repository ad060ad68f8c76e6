"""Specs: text, identity, views and copies, beside the tensors that they describe."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from tests.oracle.real import spec_of
from understudy import FakeTensorMode, ShapeEnv, dims
from understudy.spec import New, Same, Value, normal
from understudy.spec.call import Call, flat, flat_numbers

BASE = torch.zeros(4, 6, dtype=torch.complex64)
TENSORS = {
    "c64[4, 6]@cpu": BASE,
    "c64[6, 4]~(1, 6)@cpu": BASE.T,
    "c64[4, 6].conj@cpu": BASE.conj(),
    "f32[4, 6]~(12, 2)+1.neg@cpu": BASE.conj().imag,
    "c64[3, 6]+6@cpu": BASE[1:],
    "i64[]@cpu": torch.tensor(1),
    "float8_e4m3fn[0]@cpu": torch.empty(0, dtype=torch.float8_e4m3fn),
}


@pytest.mark.parametrize("text", TENSORS)
def test_text_names_everything_that_is_unusual(text: str) -> None:
    spec = spec_of(TENSORS[text])
    assert str(spec) == text and repr(spec) == f"<{text}>"


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_facts_are_those_of_the_tensor(tensor: torch.Tensor) -> None:
    spec = spec_of(tensor)
    assert spec.is_contiguous is tensor.is_contiguous()
    assert (spec.numel, spec.ndim, spec.itemsize) == (tensor.numel(), tensor.dim(), tensor.itemsize)
    assert (spec.is_floating_point, spec.is_complex) == (tensor.is_floating_point(), tensor.is_complex())
    assert spec.is_empty is (tensor.numel() == 0)


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_equal_specs_are_one_object(tensor: torch.Tensor) -> None:
    spec = spec_of(tensor)
    assert copy.copy(spec) is copy.deepcopy(spec) is pickle.loads(pickle.dumps(spec)) is spec
    there = spec.on(torch.device("cuda:0"))
    assert there is not spec and str(there) == str(spec).replace("cpu", "cuda:0")
    assert there.on(torch.device("cpu")) is spec is spec.on(torch.device("cpu"))


def test_symbolic_specs_print_without_guards() -> None:
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    x = mode.from_tensor(torch.zeros(4, 6), source="x", symbolic_context=dims("a", "b"))
    assert str(x._spec) == "f32[a, b]@cpu"
    with mode:
        assert str(x.t()._spec) == "f32[b, a]~(1, b)@cpu"
    assert not env.guards


def test_answers_of_rules_are_normalised() -> None:
    spec = spec_of(BASE)
    assert normal(spec) == New(spec) and normal(Same(0)) == Same(0) and normal(3) == Value(3)
    assert normal((spec, 2)) == (New(spec), Value(2))
    assert normal([spec, None]) == [New(spec), Value(None)]


def test_a_call_on_another_device() -> None:
    spec, there = spec_of(torch.zeros(2)), torch.device("cuda:0")
    call = Call.of(torch.ops.aten.cat.default, ([spec, spec],), {})
    assert call.on(torch.device("cpu")) is call
    moved = call.on(there)
    assert [each.device for each in moved.inputs] == [there, there]
    made = Call.of(torch.ops.aten.zeros.default, ([2],), {"device": torch.device("cpu")})
    assert made.on(there).kwargs == {"device": there}
    assert call.argument_of(7) == "input 7"


def test_everything_of_a_kind_in_nested_arguments() -> None:
    assert flat(int, [1, {"a": [2, {"b": 3}]}], {"c": (4, "d")}) == [1, 2, 3, 4]
    assert flat_numbers([1, [2.5, (True, "no")], None, 2j]) == [1, 2.5, True, 2j]
