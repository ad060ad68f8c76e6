"""Names of any kind: what a program calls its tensors and inputs does not become code of the graph."""

from __future__ import annotations

import builtins
import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from understudy import FakeTensorProp, capture_step, make_fx
from understudy.capture.constants import names_of_graph_modules

INJECTED = "injected_by_a_name"
CODE = f"__import__('builtins').__dict__.update({INJECTED}=1)"
INJECTIONS = [
    f'w"), {CODE}, getattr(self, "w',
    f"w'), {CODE}, getattr(self, 'w",
    f"w\n    {CODE}\n    #",
    f"w; {CODE} #",
    f"w = {CODE}",
    f'\\"), {CODE}, ("',
    f"{{{CODE}}}",
    f'"""\n{CODE}\n"""',
]
ODD = ["class", "None", "lambda", "a b", "a-b", "a/b", "a'b", 'a"b', "a\nb", "a\\", "\\", " ", "\t", "#", "%s", "{x}", "ﬁ", "größe",
       "名前", "0", "1a", "²", "self", "torch", "getattr", "print", "__class_", "a_b", "_a"]  # fmt: skip
TAKEN = [
    "graph",
    "code",
    "meta",
    "shape_env",
    "example_state",
    "_graph",
    "_code",
    "print_readable",
    "recompile",
]
GENERATED = [
    "_param_constant0",
    "_tensor_constant0",
    "_param_constant1",
    "optimizer_state",
    "true_graph_0",
    "_generator0",
]
NAMES = [*INJECTIONS, *ODD, *GENERATED]
MODES = ["real", "fake", "symbolic"]


class ByKey(nn.Module):
    """Parameters, buffers, attributes and modules of one name each."""

    def __init__(self, names: list[str], taken: list[str]) -> None:
        super().__init__()
        torch.manual_seed(0)
        names = [name for name in names if "." not in name]
        self.weights = nn.ParameterDict({name: nn.Parameter(torch.rand(3) + 0.5) for name in names})
        self.parts = nn.ModuleDict(
            {name: nn.Linear(3, 3) for name in names if not hasattr(nn.ModuleDict, name)}
        )
        self.own = [name for name in [*names, *taken] if not hasattr(self, name)]
        for number, name in enumerate(self.own):
            if number % 3 == 0:
                self.register_parameter(name, nn.Parameter(torch.rand(3) + 0.5))
            elif number % 3 == 1:
                self.register_buffer(name, torch.rand(3) + 0.5)
            else:
                self.add_module(name, nn.Linear(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.weights:
            x = x * self.weights[name]
        for part in self.parts.values():
            x = part(x)
        for name in self.own:
            value = getattr(self, name)
            x = value(x) if isinstance(value, nn.Module) else x * value
        return x * torch.tensor([1.0, 2.0, 3.0])


@pytest.fixture(autouse=True)
def nothing_injected() -> Any:
    yield
    assert not hasattr(builtins, INJECTED)


def paths(gm: torch.fx.GraphModule) -> set[str]:
    reads = gm.graph.find_nodes(op="get_attr")
    return {str(node.meta.get("original_path", node.target)) for node in reads}


def expected_paths(model: nn.Module) -> set[str]:
    return {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_names_of_tensors(mode: str, grad: bool) -> None:
    model, x = ByKey(NAMES, TAKEN), torch.randn(2, 3)
    with torch.set_grad_enabled(grad):
        gm = make_fx(model, tracing_mode=mode)(x)
        assert torch.equal(gm(x), model(x))
        assert torch.equal(copy.deepcopy(gm)(x), model(x))
        assert torch.equal(pickle.loads(pickle.dumps(gm))(x), model(x))
    assert expected_paths(model) <= paths(gm)
    assert len(list(gm.parameters())) == len(list(model.parameters()))
    gm.graph.lint()


@pytest.mark.parametrize("name", [*NAMES, *TAKEN, "default", "weight", "forward_", "train_"])
@pytest.mark.parametrize("mode", MODES)
def test_each_name_alone(name: str, mode: str) -> None:
    model, x = ByKey([name], []), torch.randn(2, 3)
    gm = make_fx(model, tracing_mode=mode)(x)
    assert torch.equal(gm(x), model(x))
    assert expected_paths(model) <= paths(gm)


def test_every_name_of_a_graph_module() -> None:
    names = [
        name
        for name in names_of_graph_modules()
        if not hasattr(nn.ParameterDict, name) and name != "training"
    ]
    for name in names:
        model = nn.Module()
        if hasattr(model, name):
            continue
        model.add_module(name, nn.Linear(3, 3))
        x = torch.randn(2, 3)
        gm = make_fx(lambda x, model=model, name=name: getattr(model, name)(x), tracing_mode="fake")(x)
        assert torch.equal(gm(x), getattr(model, name)(x))


@pytest.mark.parametrize("name", TAKEN)
def test_submodules_with_names_of_graph_modules(name: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module(name, nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))

        def forward(self, x: torch.Tensor) -> Any:
            return getattr(self, name)(x)

    model, x = Model(), torch.randn(2, 3)
    for mode in MODES:
        gm = make_fx(model, tracing_mode=mode)(x)
        assert torch.equal(gm(x), model(x))
        assert paths(gm) == expected_paths(model)
        assert isinstance(gm.graph, torch.fx.Graph)
        if mode == "symbolic":
            assert torch.equal(gm(torch.ones(5, 3)), model(torch.ones(5, 3)))
            assert gm.shape_env is not None


def test_plain_names_stay() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(3, 3)])
            self.größe = nn.Parameter(torch.rand(3))
            self.inner = nn.Module()
            self.inner.graph = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> Any:
            return self.inner.graph(self.layers[0](x)) * self.größe

    gm = make_fx(Model(), tracing_mode="fake")(torch.randn(2, 3))
    reads = gm.graph.find_nodes(op="get_attr")
    assert {node.target for node in reads} == expected_paths(gm)
    assert expected_paths(gm) == {
        "layers.0.weight", "layers.0.bias", "größe", "inner.graph.weight", "inner.graph.bias"
    }  # fmt: skip
    assert not any("original_path" in node.meta for node in reads)


def test_names_that_become_the_same() -> None:
    model, x = ByKey(["a b", "a_b", "a-b", "a_b_", "a/b"], []), torch.randn(2, 3)
    for mode in MODES:
        gm = make_fx(model, tracing_mode=mode)(x)
        assert torch.equal(gm(x), model(x))
        assert expected_paths(model) <= paths(gm)


@pytest.mark.parametrize("mode", MODES)
def test_propagation(mode: str) -> None:
    model, x = ByKey(NAMES, TAKEN), torch.randn(2, 3)
    gm = make_fx(model, tracing_mode=mode)(x)
    assert FakeTensorProp(gm).propagate(x).shape == (2, 3)


@pytest.mark.parametrize("parameters", ["attributes", "inputs"])
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_steps(parameters: str, mode: str) -> None:
    model, twin, x = ByKey(NAMES, TAKEN), ByKey(NAMES, TAKEN), torch.randn(2, 3)
    step = capture_step(
        model, lambda y: y.sum(), AdamW(model.parameters()), x, parameters=parameters, tracing_mode=mode
    )
    given = (step.example_parameters, step.example_state) if parameters == "inputs" else ()
    if given:
        assert set(given[0]) == expected_paths(model)
    optimizer = AdamW(twin.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        loss = twin(x).sum()
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(step(*given, x), loss.detach())


def test_states_of_parameters_whose_names_become_the_same() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Module()
        model.a, model.a_b = nn.Module(), nn.Module()
        model.a.b_c, model.a_b.c = nn.Parameter(torch.rand(3)), nn.Parameter(torch.rand(3))
        return model

    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = (x * model.a.b_c + (x * model.a_b.c) ** 3).sum()
        return result

    model, twin = make(), make()
    step, optimizer = (
        capture_step(model, loss, AdamW(model.parameters()), torch.ones(3)),
        AdamW(twin.parameters()),
    )
    for _ in range(3):
        optimizer.zero_grad()
        loss(twin, torch.ones(3)).backward()
        optimizer.step()
        step(torch.ones(3))
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other)


# --- inputs -------------------------------------------------------------------------------------------------------------------


def flat(self: Any, torch: Any, getattr: Any, fx_pytree: Any, inf: Any) -> Any:
    return self + torch * getattr - fx_pytree / inf


def structured(self: Any, torch: Any, getattr: Any, fx_pytree: Any, inf: Any) -> Any:
    return self["x"] + torch[0] * getattr - fx_pytree["class"] / inf


def twice(pytree: Any, pytree_: Any) -> Any:
    return pytree[0] + pytree_


WEIGHT = torch.randn(3)


def with_constant(self: Any, torch: Any) -> Any:
    return self[0] * WEIGHT[:1] + torch


ROW = torch.rand(3) + 1
INPUTS = [
    (flat, (ROW, ROW, ROW, ROW, ROW)),
    (structured, ({"x": ROW}, [ROW], ROW, {"class": ROW, CODE: ROW}, ROW)),
    (twice, ([ROW], ROW)),
    (with_constant, ([ROW], ROW)),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("program", "args"), INPUTS)
def test_names_of_inputs(program: Any, args: Any, mode: str) -> None:
    gm = make_fx(program, tracing_mode=mode, _allow_non_fake_inputs=True)(*args)
    assert torch.equal(gm(*args), program(*args))
    leaves = torch.utils._pytree.tree_leaves(args)
    assert FakeTensorProp(gm).propagate(*leaves).shape == (3,)


def test_the_name_of_an_input_is_in_the_metadata() -> None:
    gm = make_fx(structured, tracing_mode="fake")(*INPUTS[1][1])
    names = [node.meta.get("original_path") for node in gm.graph.find_nodes(op="placeholder")]
    assert names == ["self", "torch", "getattr", "fx_pytree", "fx_pytree", "inf"]


@pytest.mark.parametrize("mode", MODES)
def test_names_of_outputs(mode: str) -> None:
    gm = make_fx(lambda x: {name: x + i for i, name in enumerate(NAMES)}, tracing_mode=mode)(ROW)
    assert list(gm(ROW)) == NAMES
