"""The `val` and `tensor_meta` of nodes: structures of stand-ins and numbers, and torch's own metadata for real tensors."""

from __future__ import annotations

import operator
from collections import namedtuple
from typing import Any

import pytest
import torch
import torch.fx.traceback
from torch.fx.passes.shape_prop import _extract_tensor_metadata

from understudy import FakeTensor, FakeTensorMode, ShapeEnv, dims, make_fx
from understudy.graph.node_values import (
    convert_to_fakes,
    has_equal_metadata,
    is_complete,
    make_val,
    needs_dispatch,
    spec_of_val,
    storages_of,
    tensor_meta_of,
    tensor_meta_of_numbers,
    val_of,
)

LAYOUTS = {
    "contiguous": torch.zeros(2, 3),
    "transposed": torch.zeros(3, 2).t(),
    "image": torch.zeros(2, 3, 4, 5),
    "channels last": torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "volume": torch.zeros(2, 3, 4, 5, 6),
    "channels last, volume": torch.zeros(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
    "permuted image": torch.zeros(2, 3, 4, 5).permute(0, 2, 1, 3),
    "expanded": torch.zeros(3, 1).expand(3, 4),
    "number": torch.zeros(()),
}


@pytest.mark.parametrize("real", LAYOUTS.values(), ids=LAYOUTS)
def test_metadata_of_a_stand_in_is_that_of_the_tensor(real: torch.Tensor) -> None:
    real = real.requires_grad_()
    wanted = _extract_tensor_metadata(real)
    assert tensor_meta_of(FakeTensorMode().from_tensor(real)) == wanted
    assert tensor_meta_of([real, 3])[0] == wanted
    assert tensor_meta_of_numbers(FakeTensorMode().from_tensor(real)._spec, True) == wanted


def test_a_real_tensor_without_strides_is_its_own_val() -> None:
    real = torch.eye(3).to_sparse().requires_grad_()
    val = make_val(real)
    assert type(val) is torch.Tensor and val.layout is torch.sparse_coo
    assert torch.equal(val.to_dense(), torch.eye(3)) and not val.requires_grad


@pytest.mark.parametrize(
    "name", ["contiguous", "transposed", "image", "channels last", "channels last, volume"]
)
def test_metadata_of_symbolic_sizes_adds_no_guard(name: str) -> None:
    env = ShapeEnv()
    real = LAYOUTS[name]
    fake = FakeTensorMode(shape_env=env).from_tensor(real, source="x")
    before = len(env.guards)
    found = tensor_meta_of(fake)
    assert len(env.guards) == before
    assert found.memory_format == _extract_tensor_metadata(real).memory_format
    assert [int(size) for size in found.shape] == list(real.shape)


Pair = namedtuple("Pair", "a b")


def test_structures_keep_tensors_and_numbers() -> None:
    x, y = torch.zeros(2), torch.zeros(3)
    assert val_of((x, [y, 3], {"a": "text", "b": None}), lambda t: t.shape) == (
        (2,), [(3,), 3], {"a": None, "b": None},
    )  # fmt: skip
    assert val_of(Pair(x, 1.5), tuple) == Pair((0.0, 0.0), 1.5)
    assert val_of(["text", None], lambda t: t) is None


def test_conversion_of_real_tensors() -> None:
    mode = FakeTensorMode()
    real = torch.zeros(2)
    fake = mode.from_tensor(real)
    for value in (fake, 3, 2.5, (fake, "a"), [1, {"k": fake}]):
        assert convert_to_fakes(mode, value) is value
    found = convert_to_fakes(mode, [real, {"k": (real, 4)}])
    assert type(found[0]) is FakeTensor and found[0] is found[1]["k"][0] and found[1]["k"][1] == 4
    assert convert_to_fakes(mode, real) is fake


def test_complete_values_hold_stand_ins_of_one_mode() -> None:
    mode, other = FakeTensorMode(), FakeTensorMode()
    fake, foreign = mode.from_tensor(torch.zeros(2)), other.from_tensor(torch.zeros(2))
    assert is_complete(mode, (fake, [1, {"k": fake}]))
    for value in (foreign, torch.zeros(2), None, (fake, None), [fake, foreign], {"k": "text"}):
        assert not is_complete(mode, value)
    assert needs_dispatch(mode, fake) == (False, False)
    assert needs_dispatch(mode, [fake, foreign]) == (False, True)
    assert needs_dispatch(mode, torch.zeros(2)) == (True, True)
    with mode:
        leaf, conjugate = torch.zeros(2, requires_grad=True), torch.zeros(2, dtype=torch.complex64).conj()
    assert needs_dispatch(mode, (fake, leaf)) == (True, False)
    assert needs_dispatch(mode, conjugate) == (False, True)
    assert needs_dispatch(mode, 3) == (False, False)


def test_equal_metadata_means_equal_results() -> None:
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    x = mode.from_tensor(torch.zeros(4, 4), source="x", symbolic_context=dims("a", "b"))
    with mode:
        a, b, other = torch.rand(2, 3), torch.rand(2, 3), torch.rand(3, 2)
        leaf = torch.rand(2, 3, requires_grad=True)
        known = torch.tensor([1.0, 2.0])
        size, same = x.shape[0], x.shape[0] + 0
    for old, new in (
        (a, b),
        ([a, 1], [b, 1]),
        ({"k": a}, {"k": b}),
        (size, same),
        (torch.float32, torch.float32),
    ):
        assert has_equal_metadata(old, new)
    different: list[tuple[Any, Any]] = [
        (a, other), (a, leaf), (known, known), ([a], [a, a]), ((a,), [a]), ({"k": a}, {"j": a}), (size, x.shape[1]),
        (1, 1.0), (1, 2), (torch.float32, torch.float64), (object(), object()),
    ]  # fmt: skip
    for old, new in different:
        assert not has_equal_metadata(old, new)


def test_storages_and_specs_of_values() -> None:
    with FakeTensorMode():
        x, y = torch.zeros(4), torch.zeros(2)
        view = x[1:]
    first, second, third = storages_of([x, y, view])
    assert first == third != second
    assert storages_of({"k": [x], "j": {"i": y}}) == [first, second]
    assert storages_of(x) == [first] and storages_of(3) == []
    assert spec_of_val((x, [3, view])) == (x._spec, [3, view._spec])


def test_origins_of_nodes() -> None:
    """Every node has the operator that it was, also parts of a result."""

    def program(x: torch.Tensor) -> torch.Tensor:
        values, _ = torch.max(x.relu(), 1)
        (gradient,) = torch.autograd.grad(values.sum(), x)
        return gradient

    with torch.fx.traceback.preserve_node_meta():
        graph = make_fx(program, tracing_mode="fake")(torch.randn(3, 4, requires_grad=True))
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        source = node.args[0] if node.target is operator.getitem else node
        assert node.meta["original_aten"] is source.target
        assert isinstance(node.meta["seq_nr"], int)


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_a_node_that_writes_its_input_has_the_snapshot_of_before(mode: Any) -> None:
    """Unless what is known of the tensor has changed since: its memory, its layout, the range of its values."""

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = x.sin().mul_(2).add_(1)
        z.data = y.cos()
        z.mul_(3)
        z.t_()
        return z.add_(4)

    graph = make_fx(f, tracing_mode=mode)(torch.randn(2, 3), torch.randn(2, 3)).graph
    vals = {node.name: node.meta["val"] for node in graph.nodes if node.op == "call_function"}
    storages = {name: storages_of(val) for name, val in vals.items()}
    assert vals["sin"] is vals["mul_"] is vals["add_"]
    assert storages["mul__1"] == storages["cos"] != storages["add_"]
    assert tuple(vals["mul__1"].shape) == (2, 3) and tuple(vals["add__1"].shape) == (3, 2)
    assert storages["add__1"] == storages["cos"]


def test_removed_nodes_are_not_kept() -> None:
    graph = make_fx(lambda x: (x.sin(), x + 1)[1], tracing_mode="fake")(torch.randn(3)).graph
    assert [node.name for node in graph.nodes] == ["x_1", "add", "output"]
    assert len(graph.nodes) == 3 and not graph.find_nodes(
        op="call_function", target=torch.ops.aten.sin.default
    )
    assert all(node in graph.nodes for node in graph._graph_namespace._obj_to_name)
    (x,) = graph.find_nodes(op="placeholder")
    assert [user.name for user in x.users] == ["add"]
    graph.lint()
