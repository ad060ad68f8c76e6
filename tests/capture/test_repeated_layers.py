"""Repeated blocks: the graph of a model with many layers alike is the graph that running all of them records."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from examples.llama import Llama, LlamaSize
from understudy import FakeTensor, make_fx, run_every_layer
from understudy.capture.repeated_layers import layers
from understudy.capture.repeated_layers.replay import LayerPlan


class Layer(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.act = nn.ReLU()
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x + self.down(self.act(self.up(self.norm(x.contiguous())))) * scale


class Stack(nn.Module):
    def __init__(self, make: Any = Layer, count: int = 7) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(make() for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """How often a block was written down without being run."""
    seen: list[Any] = []
    original = LayerPlan._results

    def counted(plan: Any, *given: Any) -> Any:
        seen.append(plan)
        return original(plan, *given)

    monkeypatch.setattr(LayerPlan, "_results", counted)
    return seen


def capture(f: Any, *inputs: Any, mode: str = "fake", grad: bool = False) -> torch.fx.GraphModule:
    with torch.set_grad_enabled(grad):
        return make_fx(f, tracing_mode=mode)(*inputs)


def facts(gm: torch.fx.GraphModule) -> list[Any]:
    """All that a graph says, with storages numbered in the order in which they turn up."""
    storages: dict[int, int] = {}

    def described(val: Any) -> Any:
        if type(val) is FakeTensor:
            return str(val._spec), storages.setdefault(val.untyped_storage()._cdata, len(storages))
        return [described(part) for part in val] if isinstance(val, (list, tuple)) else str(val)

    return [
        (
            node.name, node.op, str(node.target), str(node.args), str(node.kwargs), described(node.meta.get("val")),
            node.meta.get("torch_fn"), node.meta.get("stack_trace"), str(node.meta.get("tensor_meta")),
        )
        for node in gm.graph.nodes
    ]  # fmt: skip


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_the_graph_is_the_same_to_the_last_mark(
    mode: str, replays: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = Stack(), torch.randn(3, 8)
    repeated = facts(capture(model, x, mode=mode))
    assert len(replays) >= 4
    monkeypatch.setattr(layers, "LEAST_SIBLINGS", 1000)
    assert repeated == facts(capture(model, x, mode=mode))


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_each_block_has_its_own_parameters(mode: str, replays: list[Any]) -> None:
    model, x = Stack(), torch.randn(3, 8)
    gm = capture(model, x, mode=mode)
    assert replays
    assert torch.equal(gm(x), model(x))
    assert gm.get_parameter("layers.5.up.weight") is model.layers[5].up.weight
    if mode == "symbolic":
        other = torch.randn(6, 8)
        assert torch.equal(gm(other), model(other))


def test_lines_around_a_block_are_its_own(replays: list[Any]) -> None:
    model = nn.Sequential(*(Layer() for _ in range(6)))

    def program(x: torch.Tensor) -> torch.Tensor:
        x = model[3](model[2](model[1](model[0](x))))
        x = model[4](x)
        return model[5](x)

    gm = capture(program, torch.randn(3, 8))
    assert len(replays) == 5
    lines = [
        node.meta["stack_trace"].splitlines()[0] for node in gm.graph.nodes if node.name.startswith("relu")
    ]
    first = program.__code__.co_firstlineno
    assert [line.split(", line ")[1].split(",")[0] for line in lines] == [
        str(first + 1)] * 4 + [str(first + 2), str(first + 3)]  # fmt: skip


def test_inputs_of_other_specs_are_run(replays: list[Any]) -> None:
    class Growing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x, x.relu()])

    model, x = Stack(Growing, 5), torch.randn(2, 2)
    assert torch.equal(capture(model, x)(x), model(x))
    assert not replays


def test_attributes_that_differ_are_read(replays: list[Any]) -> None:
    class Scaled(nn.Module):
        made = 0

        def __init__(self) -> None:
            super().__init__()
            Scaled.made += 1
            self.scale = Scaled.made

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    model, x = Stack(Scaled), torch.randn(2, 2)
    assert torch.equal(capture(model, x)(x), model(x))
    assert not replays


def test_tensors_that_somebody_keeps() -> None:
    kept: list[torch.Tensor] = []

    class Keeping(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inner = x + 1
            kept.append(inner)
            return inner * 2

    model, x = Stack(Keeping), torch.randn(2)

    def program(x: torch.Tensor) -> list[torch.Tensor]:
        kept.clear()
        return [model(x), *kept]

    assert len(capture(program, x)(x)) == 8


def test_state_that_changes() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x + self.calls

    layer = Counting()
    model, x = Stack(lambda: layer, 6), torch.zeros(2)
    assert torch.equal(capture(model, x)(x), torch.full((2,), 21.0))
    assert layer.calls == 0


def test_random_decisions() -> None:
    class Dropped(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1 if random.random() < 0.5 else x

    model, x = Stack(Dropped, 40), torch.zeros(2)
    random.seed(1)
    expected = model(x)
    random.seed(1)
    assert torch.equal(capture(model, x)(x), expected)


def test_writes_in_place(replays: list[Any]) -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.add_(x)
            return x * 2

    model, x = Stack(Writing), torch.ones(2)
    gm = capture(model, x)
    assert not replays
    gm(x)
    assert [float(layer.seen[0]) for layer in model.layers] == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]


def test_hooks_are_called() -> None:
    model, x = Stack(), torch.randn(3, 8)
    model.layers[5].register_forward_hook(lambda module, args, output: output * 100)
    assert torch.equal(capture(model, x)(x), model(x))
    model.layers[4].up.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    assert torch.equal(capture(model, x)(x), model(x))


def test_gradients_are_recorded(replays: list[Any]) -> None:
    model, x = Stack(), torch.randn(3, 8)

    def gradient(x: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(model(x).sum(), model.layers[6].up.weight)[0]

    gm = capture(gradient, x, grad=True)
    assert not replays
    torch.testing.assert_close(gm(x), gradient(x))

    frozen = Stack().requires_grad_(False)

    def by_input(x: torch.Tensor) -> torch.Tensor:
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(frozen(leaf).sum(), leaf)[0]

    torch.testing.assert_close(capture(by_input, x, grad=True)(x), by_input(x))


def test_results_are_structures_and_inputs_pass_through(replays: list[Any]) -> None:
    class Pair(nn.Module):
        def forward(self, pair: Any, note: str = "n") -> Any:
            x, y = pair
            return [y, (x + y, x[:1])][1][0], y

    model = nn.ModuleList(Pair() for _ in range(6))

    def program(x: torch.Tensor, y: torch.Tensor) -> Any:
        pair: Any = (x, y)
        for layer in model:
            pair = layer(pair, note="m")
        return pair

    x, y = torch.randn(3), torch.randn(3)
    gm = capture(program, x, y)
    assert replays
    assert all(map(torch.equal, gm(x, y), program(x, y)))
    assert gm(x, y)[1] is y


def test_other_listeners_hear_every_operator(replays: list[Any]) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Heard(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Heard.count += func is torch.ops.aten.relu.default
            return func(*args, **(kwargs or {}))

    model = Stack()

    def program(x: torch.Tensor) -> torch.Tensor:
        with Heard():
            return model(x)

    capture(program, torch.randn(3, 8))
    assert Heard.count == 7
    assert not replays


def test_the_module_is_as_it_was() -> None:
    model = Stack()
    before = [dict(vars(part)) for part in model.modules()]
    capture(model, torch.randn(3, 8))
    assert before == [dict(vars(part)) for part in model.modules()]
    assert all("forward" not in vars(part) for part in model.modules())


# --- attributes in which layers differ ---------------------------------------------------------------------------------


class Numbered(Layer):
    """As the layers of transformers: each knows its number, and looks at it now and then."""

    def __init__(self, number: int, reads: str = "") -> None:
        super().__init__()
        self.number = number
        self.reads = reads

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        if self.reads == "always":
            scale = scale * (10.0 if self.number == 5 else 1.0)
        elif self.reads == "hasattr":
            scale = scale * (2.0 if hasattr(self, "number") else 1.0)
        elif self.reads == "set":
            self.number += 1
            scale = scale * self.number
        elif self.reads == "deleted":
            del self.number
        return super().forward(x, scale)


def numbered(reads: str = "", count: int = 9) -> Stack:
    model = Stack(count=0)
    model.layers.extend(Numbered(i, reads) for i in range(count))
    return model


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_a_number_that_nobody_reads_makes_no_difference(mode: str, replays: list[Any]) -> None:
    model, x = numbered(), torch.randn(3, 8)
    gm = capture(model, x, mode=mode)
    assert len(replays) == 8
    assert torch.equal(gm(x), model(x))
    assert [layer.number for layer in model.layers] == list(range(9))


@pytest.mark.parametrize("reads", ["always", "hasattr", "set", "deleted"])
def test_a_number_that_is_read_does(reads: str, replays: list[Any]) -> None:
    model, x = numbered(reads), torch.randn(3, 8)
    gm = capture(model, x)
    assert not replays
    assert [layer.number for layer in model.layers] == list(range(9))
    assert torch.equal(gm(x), model(x))


def test_numbers_are_put_back_after_an_error() -> None:
    model = numbered()

    def program(x: torch.Tensor) -> torch.Tensor:
        model(x)
        raise KeyError("late")

    with pytest.raises(KeyError):
        capture(program, torch.randn(3, 8))
    assert [layer.number for layer in model.layers] == list(range(9))
    assert all(type(part._parameters) is dict for part in model.modules())


# --- what code refers to besides its module ----------------------------------------------------------------------------

COUNTS = {"calls": 0}
calls = 0


def counted() -> float:
    global calls
    calls += 1
    return float(calls)


class InGlobals(Layer):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        COUNTS["calls"] += 1
        return super().forward(x, 10.0 if COUNTS["calls"] == 5 else 1.0)


class InAFunction(Layer):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return super().forward(x, 10.0 if counted() == 5 else 1.0)


def in_a_closure() -> nn.Module:
    class InAClosure(Layer):
        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            seen.append(1)
            return Layer.forward(self, x, 10.0 if len(seen) == 5 else 1.0)

    return InAClosure()


seen: list[int] = []


class Shared:
    calls = 0


class InAnObject(Layer):
    shared = Shared()

    def __init__(self) -> None:
        super().__init__()
        self.state = self.shared

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        self.state.calls += 1
        return super().forward(x, 10.0 if self.state.calls == 5 else 1.0)


@pytest.mark.parametrize("make", [InGlobals, InAFunction, in_a_closure, InAnObject])
def test_counters_outside_of_a_layer(make: Any, replays: list[Any]) -> None:
    def reset() -> None:
        global calls
        calls = COUNTS["calls"] = InAnObject.shared.calls = 0
        seen.clear()

    model, x = Stack(make), torch.randn(3, 8)
    reset()
    expected = model(x)
    reset()
    assert torch.equal(capture(model, x)(x), expected)
    assert not replays


class Context:
    class Inner:
        bias: Any = None

    def __init__(self) -> None:
        self.inner = Context.Inner()


def test_tensors_that_are_handed_over_behind_the_scenes() -> None:
    context = Context()

    class Biased(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.context = context

        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return super().forward(x) + self.context.inner.bias

    model, x = Stack(Biased), torch.randn(3, 8)

    def program(x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(model.layers):
            context.inner.bias = x * i
            x = layer(x)
        context.inner.bias = None
        return x

    assert torch.equal(capture(program, x)(x), program(x))


def test_attributes_that_are_set_from_outside_during_the_run() -> None:
    class Gained(Layer):
        gain = 1.0

        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return super().forward(x, self.gain)

    model, x = Stack(Gained), torch.randn(3, 8)

    def program(x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(model.layers):
            layer.gain = 3.0 if i == 4 else 1.0
            x = layer(x)
        return x

    assert torch.equal(capture(program, x)(x), program(x))


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_writes_to_what_a_layer_has_made_itself(mode: str, replays: list[Any]) -> None:
    class Adding(Layer):
        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            y = self.up(x)
            y[:, :2].mul_(3.0)
            y += 1.0
            return self.down(self.act(y)).add_(x)

    model, x = Stack(Adding), torch.randn(3, 8)
    gm = capture(model, x, mode=mode)
    assert len(replays) >= 5
    assert torch.equal(gm(x), model(x))


def test_blocks_in_blocks(replays: list[Any]) -> None:
    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    model, x = Stack(Stage, 4), torch.randn(3, 8)
    gm = capture(model, x)
    assert len(replays) == 2 + 3  # layers of the first stage, and the other stages
    assert torch.equal(gm(x), model(x))


def test_it_can_be_switched_off(replays: list[Any]) -> None:
    model, x = Stack(), torch.randn(3, 8)
    with run_every_layer():
        capture(model, x)
    assert not replays
    capture(model, x)
    assert replays


def test_hooks_of_all_modules_are_called(replays: list[Any]) -> None:
    called: list[str] = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, output: called.append(type(module).__name__)
    )
    try:
        capture(Stack(), torch.randn(3, 8))
    finally:
        handle.remove()
    assert called.count("LayerNorm") == 7
    assert not replays


def test_other_function_modes_hear_every_call(replays: list[Any]) -> None:
    from torch.overrides import TorchFunctionMode

    class Heard(TorchFunctionMode):
        count = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Heard.count += func is nn.functional.layer_norm
            return func(*args, **(kwargs or {}))

    model = Stack()

    def program(x: torch.Tensor) -> torch.Tensor:
        with Heard():
            return model(x)

    with torch.no_grad():
        make_fx(program, tracing_mode="fake", _disable_torch_fn_metadata_mode=True)(torch.randn(3, 8))
    assert Heard.count == 7
    assert not replays


class IndexesItself(nn.Module):
    """A tensor is an argument, and inside of a list among the arguments of the same call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.act = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = self.first(x).argsort(0)[:, 0]
        return self.act(self.third(self.second(x)[order[order]]))


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_a_tensor_that_indexes_itself(mode: str, replays: list[Any]) -> None:
    model, x = Stack(IndexesItself), torch.randn(5, 8)
    gm = capture(model, x, mode=mode)
    assert replays
    with run_every_layer():
        assert facts(gm) == facts(capture(model, x, mode=mode))
    assert torch.equal(gm(x), model(x))


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_settings_in_a_frozen_dataclass(mode: str, replays: list[Any]) -> None:
    model = Llama(LlamaSize(layers=6, width=16, heads=2, kv_heads=2, hidden=32, vocabulary=50)).eval()
    capture(model, torch.arange(10).reshape(2, 5), mode=mode)
    assert len(replays) >= 4


def test_hashes_that_are_read(replays: list[Any]) -> None:
    class Hashing(Layer):
        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return super().forward(x, scale + hash(self) % 7)

    model, x = Stack(Hashing), torch.randn(3, 8)
    gm = capture(model, x)
    assert not replays
    assert torch.equal(gm(x), model(x))


class Described(Layer):
    """With a number that differs from layer to layer, and a text of all attributes."""

    def __repr__(self) -> str:
        return "Described({number})".format(**self.__dict__)


def with_numbers(kind: type[Layer]) -> Stack:
    model = Stack(kind)
    for number, layer in enumerate(model.layers):
        layer.number = number
    return model


def test_a_text_that_nobody_asks_for_makes_no_difference(replays: list[Any]) -> None:
    model, x = with_numbers(Described), torch.randn(3, 8)
    assert torch.equal(capture(model, x)(x), model(x))
    assert len(replays) >= 4
    assert "__repr__" in vars(Described) and repr(model.layers[3]) == "Described(3)"


@pytest.mark.parametrize("text", [repr, str, "{}".format, lambda layer: type(layer).__repr__(layer)])
def test_a_text_that_is_read_does(text: Any, replays: list[Any]) -> None:
    class Reading(Described):
        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return super().forward(x, float(text(self)[-2]))

    model, x = with_numbers(Reading), torch.randn(3, 8)
    assert torch.equal(capture(model, x)(x), model(x))
    assert not replays
