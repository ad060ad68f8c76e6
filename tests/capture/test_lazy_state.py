"""What is made when it is read: values of nodes, and stand-ins for the parameters of layers that are not run."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from tests.capture.test_repeated_layers import Layer, Stack, capture, facts
from understudy import FakeTensor, run_every_layer
from understudy.capture.lazy_state import LazyMeta, LazyParameter, Pending


class Counting:
    """Makes what is pending, and notes that it has."""

    def __init__(self, made: list[int]) -> None:
        self._made = made

    def make(self, pending: Pending) -> str:
        self._made.append(pending.number)
        return f"value {pending.number}"


def late(made: list[int] | None = None) -> LazyMeta:
    meta = LazyMeta({"val": Pending("val", 7), "custom": 1})
    meta.source = Counting([] if made is None else made)
    return meta


WAYS: dict[str, Callable[[LazyMeta], Any]] = {
    "item": lambda meta: meta["val"],
    "get": lambda meta: meta.get("val"),
    "items": lambda meta: dict(meta.items())["val"],
    "values": lambda meta: next(iter(meta.values())),
    "dict": lambda meta: dict(meta)["val"],
    "stars": lambda meta: {**meta}["val"],
    "keywords": lambda meta: dict(**meta)["val"],
    "update": lambda meta: _updated(meta)["val"],
    "or": lambda meta: (meta | {})["val"],
    "or, right": lambda meta: ({} | meta)["val"],
    "copy": lambda meta: copy.copy(meta)["val"],
    "copy method": lambda meta: meta.copy()["val"],
    "deepcopy": lambda meta: copy.deepcopy(meta)["val"],
    "pickle": lambda meta: pickle.loads(pickle.dumps(meta))["val"],
    "pop": lambda meta: meta.pop("val"),
    "popitem": lambda meta: dict([meta.popitem(), meta.popitem()])["val"],
    "setdefault": lambda meta: meta.setdefault("val", 3),
}


def _updated(meta: LazyMeta) -> dict[str, Any]:
    other: dict[str, Any] = {}
    other.update(meta)
    return other


@pytest.mark.parametrize("way", WAYS)
def test_nobody_gets_anything_but_the_value(way: str) -> None:
    made: list[int] = []
    assert WAYS[way](late(made)) == "value 7"
    assert made == [7]


def test_what_does_not_ask_for_the_value_does_not_make_it() -> None:
    made: list[int] = []
    meta = late(made)
    assert "val" in meta and list(meta) == ["val", "custom"] and len(meta) == 2 and meta["custom"] == 1
    other = copy.copy(meta)
    meta["val"] = "another"
    del other["custom"]
    assert made == [] and meta["val"] == "another" and list(other) == ["val"]


def test_it_is_the_dict_that_it_looks_like() -> None:
    assert late() == {"val": "value 7", "custom": 1} and late() != {"custom": 1}
    assert repr(late()) == "{'val': 'value 7', 'custom': 1}"
    assert late().pop("other", 3) == 3 and late().get("other", 4) == 4
    with pytest.raises(KeyError):
        late().pop("other")
    assert type(copy.deepcopy(late())) is dict


class Views(nn.Module):
    """Values that share memory, in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.one = Layer()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = (x @ self.weight.t()).chunk(2, dim=-1)
        return x + self.one(torch.cat([right.relu_(), left], dim=-1).view(-1, 8)).view(x.shape)


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("seed", range(3))
def test_the_order_in_which_values_are_read_does_not_matter(mode: str, seed: int) -> None:
    model, x = Stack(Views), torch.randn(3, 8)
    in_order = facts(capture(model, x, mode=mode))
    gm = capture(model, x, mode=mode)
    assert sum(type(node.meta) is LazyMeta for node in gm.graph.nodes) > 30
    nodes = list(gm.graph.nodes)
    random.Random(seed).shuffle(nodes)
    assert all(node.meta.get("val") is node.meta.get("val") for node in nodes)
    assert facts(gm) == in_order


def test_values_of_a_copied_graph_are_the_same_objects() -> None:
    gm = capture(Stack(), torch.randn(3, 8))
    other = copy.deepcopy(gm)
    for mine, theirs in zip(gm.graph.nodes, other.graph.nodes, strict=True):
        assert mine.meta.get("val") is theirs.meta.get("val")


def test_what_a_parameter_was_is_said_although_it_is_another_one_by_now() -> None:
    model = Stack()
    gm = capture(model, torch.randn(3, 8))
    model.half()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data.new_empty(1)
    vals = [node.meta["val"] for node in gm.graph.find_nodes(op="get_attr")]
    assert {val.dtype for val in vals} == {torch.float32}
    assert {tuple(val.shape) for val in vals} == {(8,), (16, 8), (16,), (8, 16)}
    assert all(type(val) is FakeTensor and not val.requires_grad for val in vals)


def vals_of(gm: torch.fx.GraphModule) -> list[torch.Tensor]:
    vals = [node.meta.get("val") for node in gm.graph.nodes]
    return [val for val in pytree.tree_leaves(vals) if isinstance(val, torch.Tensor)]


def test_values_read_in_another_mode_are_what_they_are() -> None:
    model, x = Stack(), torch.randn(3, 8)
    gm, expected = capture(model, x), facts(capture(model, x))
    with torch.inference_mode():
        assert not any(val.is_inference() for val in vals_of(gm))
    with torch.inference_mode():
        recorded = capture(model, x)
        with run_every_layer():
            run = capture(model, x)
    kinds = [val.is_inference() for val in vals_of(recorded)]
    assert kinds == [val.is_inference() for val in vals_of(run)] and True in kinds
    assert facts(gm) == expected


# --- parameters ---------------------------------------------------------------------------------------------------------


def lent_tables(model: nn.Module) -> int:
    return sum(type(value) is LazyParameter for part in model.modules() for value in dict.values(part._parameters))


def test_parameters_of_layers_that_are_not_run_have_no_stand_ins() -> None:
    model, seen = Stack(), []

    def program(x: torch.Tensor) -> torch.Tensor:
        x = model(x)
        seen.append(lent_tables(model))
        return x

    tables = [part._parameters for part in model.modules()]
    capture(program, torch.randn(3, 8))
    assert seen == [6 * 5]
    assert all(part._parameters is table for part, table in zip(model.modules(), tables, strict=True))
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


READERS: dict[str, Callable[[Stack], torch.Tensor]] = {
    "attribute": lambda model: model.layers[4].up.weight,
    "parameters": lambda model: list(model.parameters())[-1],
    "named": lambda model: dict(model.named_parameters())["layers.4.up.weight"],
    "state dict": lambda model: model.state_dict()["layers.4.up.weight"],
    "table": lambda model: model.layers[4].up._parameters["weight"],
    "get_parameter": lambda model: model.get_parameter("layers.4.up.weight"),
    "copied module": lambda model: copy.copy(model.layers[4].up).weight,
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_who_asks_for_a_parameter_gets_its_stand_in(reader: str, when: str) -> None:
    model, x = Stack(), torch.randn(3, 8)

    def program(x: torch.Tensor) -> torch.Tensor:
        if when == "after":
            x = model(x)
        parameter = READERS[reader](model)
        assert type(parameter) is FakeTensor
        x = x + parameter.sum()
        return model(x) if when == "before" else x

    gm = capture(program, x)
    assert torch.equal(gm(x), program_on_reals(program, x))
    with run_every_layer():
        assert facts(gm) == facts(capture(program, x))


def program_on_reals(program: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    """The result of a program that insists on stand-ins."""
    code = compile("type = lambda value: FakeTensor", "<tests>", "exec")
    names = {**program.__globals__, "FakeTensor": FakeTensor}  # type: ignore[attr-defined]
    exec(code, names)
    real = type(program)(program.__code__, names, closure=program.__closure__)  # type: ignore[attr-defined]
    with torch.no_grad():
        result: torch.Tensor = real(x)
    return result


def test_parameters_that_share_memory_do_so_as_stand_ins() -> None:
    model, x = Stack(), torch.randn(3, 8)
    model.layers[5].up.weight = model.layers[2].up.weight
    model.layers[4].up.weight = nn.Parameter(model.layers[3].up.weight.data)
    model.layers[6].norm.weight = nn.Parameter(model.layers[1].up.weight.data[0])
    gm = capture(model, x)
    with run_every_layer():
        assert facts(gm) == facts(capture(model, x))
    vals = {str(node.target): node.meta["val"] for node in gm.graph.find_nodes(op="get_attr")}
    storages = {name: val.untyped_storage()._cdata for name, val in vals.items()}
    assert storages["layers.3.up.weight"] == storages["layers.4.up.weight"]
    assert storages["layers.1.up.weight"] == storages["layers.6.norm.weight"]
    assert "layers.5.up.weight" not in storages
    assert torch.equal(gm(x), model(x))


def test_gradients_reach_all_parameters() -> None:
    model, x = Stack(), torch.randn(3, 8)

    def program(x: torch.Tensor) -> Any:
        return torch.autograd.grad(model(x).sum(), list(model.parameters()))

    expected = program(x)
    for result, wanted in zip(capture(program, x, grad=True)(x), expected, strict=True):
        torch.testing.assert_close(result, wanted)


def test_values_that_nobody_has_read_keep_nothing_of_the_program() -> None:
    model = Stack()
    gm = capture(model, torch.randn(3, 8))
    parameters = [weakref.ref(parameter) for parameter in model.parameters()]
    graph = gm.graph
    graph.owning_module = None
    for part in gm.modules():
        part._parameters.clear()
    del model, gm, part
    gc.collect()
    assert not any(reference() is not None for reference in parameters)
    assert [node.meta["val"].shape for node in graph.find_nodes(op="get_attr")][-1] == (8, 16)
