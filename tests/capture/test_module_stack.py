"""`record_module_stack`: the modules that a node comes from, each by its path."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx as torch_make_fx

from understudy import get_isolated_graphmodule, make_fx

MODES = ("real", "fake", "symbolic")
each_mode = pytest.mark.parametrize("mode", MODES)
HERE = __name__


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x).relu()


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = Inner()
        self.b = nn.Sequential(Inner(), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(self.a(x))) + 1


class Shared(nn.Module):
    """One module by many names."""

    def __init__(self) -> None:
        super().__init__()
        self.x = Inner()
        self.y = self.x
        self.sequence = nn.Sequential(self.x, nn.Tanh())
        self.list = nn.ModuleList([self.x, nn.Linear(4, 4)])
        self.dict = nn.ModuleDict({"key": self.x})
        self.scale = nn.Buffer(torch.full((4,), 2.0))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        a, b = self.x, self.y
        x = b(a(x)).sin()
        x = self.sequence(x).cos()
        for part in self.list:
            x = part(x)
        x = self.dict["key"](x.exp())
        for part in self.list[1:]:
            x = part(x.tan())
        return self.y.lin(x.sigmoid()) * self.scale


def wrapped(module: nn.Module) -> Any:
    def f(*args: Any) -> Any:
        return module(*args)

    f._orig_mod = module  # type: ignore[attr-defined]
    return f


def traced(module: nn.Module, *args: Any, mode: str = "real") -> Any:
    return make_fx(wrapped(module), tracing_mode=mode, record_module_stack=True)(*args)


def stack_of(gm: Any, name: str) -> Any:
    (node,) = (node for node in gm.graph.nodes if node.name == name)
    return node.meta["nn_module_stack"]


def paths(gm: Any) -> list[tuple[str, str]]:
    """Each call with the innermost path."""
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    return [(node.name, list(node.meta["nn_module_stack"].values())[-1][0]) for node in calls]


# --- the format ---------------------------------------------------------------------------------------------------------


@each_mode
def test_what_is_written(mode: str) -> None:
    gm = traced(Plain(), torch.randn(2, 4), mode=mode)
    stack = stack_of(gm, "addmm_2")
    assert isinstance(stack, OrderedDict)
    assert list(stack.items()) == [
        ("", ("", f"{HERE}.Plain")),
        ("b", ("b", "torch.nn.modules.container.Sequential")),
        ("b.0", ("b.0", f"{HERE}.Inner")),
        ("b.0.lin", ("b.0.lin", "torch.nn.modules.linear.Linear")),
    ]
    assert list(stack_of(gm, "addmm_1").items())[1:] == [  # the second call
        ("a@1", ("a", f"{HERE}.Inner")),
        ("a.lin@1", ("a.lin", "torch.nn.modules.linear.Linear")),
    ]
    assert list(stack_of(gm, "add")) == [""]


def test_the_same_as_torch_writes() -> None:
    module = Plain()
    ours = traced(module, torch.randn(2, 4))
    theirs = torch_make_fx(wrapped(module), record_module_stack=True)(torch.randn(2, 4))
    expected = {
        node.name: node.meta["nn_module_stack"] for node in theirs.graph.nodes if node.op == "call_function"
    }
    for node in ours.graph.nodes:
        if node.op == "call_function":
            assert node.meta["nn_module_stack"] == expected[node.name], node.name


@each_mode
def test_parameters_keep_their_names_and_the_graph_its_numbers(mode: str) -> None:
    for module in (Plain(), Shared()):
        gm = traced(module, torch.randn(2, 4), mode=mode)
        names = {node.target for node in gm.graph.nodes if node.op == "get_attr"}
        assert names <= {name for name, _ in [*module.named_parameters(), *module.named_buffers()]}
        x = torch.randn(2, 4)
        assert torch.equal(gm(x), module(x))


@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: m.forward], ids=["itself", "its method"])
def test_a_module_itself(wrap: Any) -> None:
    gm = make_fx(wrap(Plain()), record_module_stack=True)(torch.randn(2, 4))
    assert list(stack_of(gm, "addmm_2"))[-1] == "b.0.lin"


def test_not_without_being_asked() -> None:
    gm = make_fx(wrapped(Plain()))(torch.randn(2, 4))
    assert not any("nn_module_stack" in node.meta for node in gm.graph.nodes)


def test_a_function_without_a_module() -> None:
    gm = make_fx(lambda x: x + 1, record_module_stack=True)(torch.randn(2))
    assert not any("nn_module_stack" in node.meta for node in gm.graph.nodes)


# --- modules with several paths -------------------------------------------------------------------------------------------------


@each_mode
def test_a_module_by_many_names(mode: str) -> None:
    """The first path inside of the module that is being called."""
    module = Shared()
    gm = traced(module, torch.randn(2, 4), mode=mode)
    assert [path for name, path in paths(gm) if name.startswith("addmm")] == [
        "x.lin", "x.lin", "sequence.0.lin", "x.lin", "list.1", "x.lin", "list.1", "x.lin",
    ]  # fmt: skip
    assert [path for name, path in paths(gm) if name.startswith("relu")] == ["x", "x", "sequence.0", "x", "x"]
    assert dict(paths(gm))["tanh"] == "sequence.1"
    assert {dict(paths(gm))[name] for name in ("sin", "cos", "exp", "tan", "sigmoid", "mul")} == {""}
    assert stack_of(gm, "relu_1")["x@1"] == ("x", f"{HERE}.Inner")


def test_under_two_parents() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = Inner(), Inner()
            self.right.lin = self.left.lin

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.right(self.left(x))

    gm = traced(Two(), torch.randn(2, 4))
    addmms = [path for name, path in paths(gm) if name.startswith("addmm")]
    assert addmms == ["left.lin", "right.lin"]


def test_modules_reached_by_other_ways() -> None:
    """In a plain list, in a closure: by the one path there is. A stranger is no entry."""
    stranger = nn.Linear(4, 4)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
            self.plain = [self.one, self.two]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.plain:
                x = part(x)
            return stranger(x)

    gm = traced(Model(), torch.randn(2, 4))
    assert [path for name, path in paths(gm) if name.startswith("addmm")] == ["one", "two", ""]


# --- nothing is changed -------------------------------------------------------------------------------------------------------


def state_of(module: nn.Module) -> Any:
    return [
        (
            name,
            part,
            type(part),
            part.__class__,
            {key: value for key, value in vars(part).items() if key != "calls"},
        )
        for name, part in module.named_modules(remove_duplicate=False)
    ]


@each_mode
def test_the_module_is_untouched(mode: str) -> None:
    module = Shared()
    before, call = state_of(module), nn.Module.__call__
    copies = copy.deepcopy(module.state_dict())
    traced(module, torch.randn(2, 4), mode=mode)
    after = state_of(module)
    assert [entry[:4] for entry in after] == [entry[:4] for entry in before]
    assert all(
        type(part) in (Shared, Inner, nn.Linear, nn.Sequential, nn.Tanh, nn.ModuleList, nn.ModuleDict)
        for part in module.modules()
    )
    assert nn.Module.__call__ is call
    assert module.x is module.y is module.list[0]
    assert all(torch.equal(value, copies[name]) for name, value in module.state_dict().items())
    assert "_modules" in vars(module) and type(vars(module)["_modules"]) is dict


def test_what_the_program_writes_to_itself_is_written() -> None:
    """To numbers; in a real trace."""
    module = Shared()
    traced(module, torch.randn(2, 4))
    assert module.calls in (0, 1)  # as without a module stack
    plain = Shared()
    make_fx(wrapped(plain))(torch.randn(2, 4))
    assert module.calls == plain.calls


def test_a_module_that_is_put_elsewhere_is_the_module_itself() -> None:
    class Moves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)
            self.b = self.a

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.c = self.b
            self._modules["d"] = self.a
            assert isinstance(self.c, nn.Linear) and self.c.__class__ is nn.Linear
            return self.c(x) + self.d(x)

    module = Moves()
    linear = module.a
    gm = traced(module, torch.randn(2, 4))
    assert [path for name, path in paths(gm) if name.startswith("addmm")] == ["a", "a"]
    for part in module.modules():
        assert type(part) in (Moves, nn.Linear)
    assert module.a is module.b is linear


@each_mode
def test_after_an_error(mode: str) -> None:
    class Broken(Shared):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.x(self.y(x))
            raise ValueError("in the middle")

    module = Broken()
    before, call = state_of(module), nn.Module.__call__
    with pytest.raises(ValueError, match="in the middle"):
        traced(module, torch.randn(2, 4), mode=mode)
    assert [entry[:4] for entry in state_of(module)] == [entry[:4] for entry in before]
    assert nn.Module.__call__ is call


def test_an_error_that_the_program_catches() -> None:
    class Catches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bad = nn.Linear(3, 3)
            self.good = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                return self.bad(x)
            except RuntimeError:
                return self.good(x.sin())

    gm = traced(Catches(), torch.randn(2, 4))
    assert dict(paths(gm))["sin"] == "" and dict(paths(gm))["addmm"] == "good"


def test_nothing_keeps_the_module_alive() -> None:
    module = Shared()
    gm = traced(module, torch.randn(2, 4))
    alive = weakref.ref(module)
    del module
    gc.collect()
    assert alive() is None
    assert gm(torch.randn(2, 4)).shape == (2, 4)


# --- threads and traces inside ---------------------------------------------------------------------------------------------------


def test_threads_trace_the_same_module() -> None:
    module = Shared()
    expected = paths(traced(module, torch.randn(2, 4)))
    start = threading.Barrier(4)
    found: list[Any] = []

    def work() -> None:
        start.wait()
        found.append(paths(traced(module, torch.randn(2, 4))))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 4
    assert type(module) is Shared


def test_other_threads_are_not_followed() -> None:
    other = Plain()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            results: list[Any] = []
            thread = threading.Thread(target=lambda: results.append(other(torch.randn(2, 4))))
            thread.start()
            thread.join()
            assert results
            return self.lin(x)

    gm = traced(Model(), torch.randn(2, 4))
    assert paths(gm) == [("t", "lin"), ("addmm", "lin")]


def test_a_trace_of_another_module_inside() -> None:
    inside: list[Any] = []
    other = Plain()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inside.append(get_isolated_graphmodule(other, (x,), {}))
            return self.lin(x)

    gm = traced(Model(), torch.randn(2, 4))
    assert paths(gm) == [("t", "lin"), ("addmm", "lin")]
    assert not any("nn_module_stack" in node.meta for node in inside[0].graph.nodes)


def test_above_autograd() -> None:
    gm = make_fx(wrapped(Shared()), pre_dispatch=True, record_module_stack=True)(torch.randn(2, 4))
    assert [path for name, path in paths(gm) if name.startswith("linear")][:2] == ["x.lin", "x.lin"]


@pytest.mark.parametrize("mode", ["real", "fake"])
def test_inside_of_branches(mode: str) -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, self.inner, lambda x: x.cos(), (x,))

    module = Branches()
    gm = traced(module, torch.randn(2, 4), mode=mode)
    assert dict(paths(gm.true_graph_0))["relu"] == "inner"
    with torch.no_grad():
        torch.testing.assert_close(gm(torch.ones(2, 4)), module(torch.ones(2, 4)))


def test_threads_give_back_what_they_borrowed() -> None:
    """Stand-ins take the place of a module's tensors while it is traced: one trace after the other."""
    module = Shared()
    before = dict(module.named_parameters())
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda: found.append(paths(traced(module, torch.randn(2, 4), mode="fake"))))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and all(entry == found[0] for entry in found)
    assert all(module.get_parameter(name) is parameter for name, parameter in before.items())
    assert type(module) is Shared
