"""symbolic_trace with examples: what Python code may ask of values, what becomes a node, and what does not."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import gc
import math
import operator
import pickle
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.meta.reality import assert_same, wrong_nodes
from understudy import FakeTensorMode, MetaTraceError, MetaTracer, ShapeEnv, dims, symbolic_trace

x24 = torch.randn(2, 4)


def targets(module: torch.fx.GraphModule) -> list[Any]:
    return [n.target for n in module.graph.nodes if n.op not in ("placeholder", "output", "get_attr")]


def val(module: torch.fx.GraphModule, name: str) -> Any:
    return next(node.meta["val"] for node in module.graph.nodes if node.name == name)


def traced_like(function: Any, **inputs: Any) -> torch.fx.GraphModule:
    """The trace, after it was compared with the program: numbers, and metadata of every node."""
    traced = symbolic_trace(function, meta_args=inputs)
    assert_same(function(**copy.deepcopy(inputs)), traced(**copy.deepcopy(inputs)))
    assert wrong_nodes(traced, copy.deepcopy(inputs)) == []
    return traced


# --- what is answered -----------------------------------------------------------------------------------------------


def test_facts_are_answered_and_not_recorded() -> None:
    seen: list[Any] = []

    def program(x: Tensor) -> Tensor:
        seen.extend([x.shape, x.size(), x.size(0), x.size(-1), x.dim(), x.ndim, x.dtype, len(x), x.numel()])
        seen.extend(
            [x.is_floating_point(), x.stride(), x.stride(0), x.is_contiguous(), x.requires_grad, x.is_cuda]
        )
        seen.extend(
            [torch.is_floating_point(x), torch.numel(x), x.element_size(), x.layout, x.nelement(), x.grad]
        )
        return x + 1

    traced = traced_like(program, x=x24)
    assert targets(traced) == [operator.add]
    half = len(seen) // 2
    assert seen[:half] == [
        (2, 4), (2, 4), 2, 4, 2, 2, torch.float32, 2, 8, True, (4, 1), 4, True, False, False, True, 8, 4, torch.strided, 8, None,
    ]  # fmt: skip
    assert seen[:half] == seen[half:]
    assert isinstance(seen[0], torch.Size)


def test_size_of_the_first_dimension() -> None:
    """A test for truth where one for None was meant gives the whole size."""
    assert targets(traced_like(lambda x: x.view(x.size(0), -1), x=x24)) == ["view"]


def test_decisions_and_loops_over_known_lengths() -> None:
    def program(x: Tensor) -> Tensor:
        if x.shape[0] > 1 and x.dtype is torch.float32:
            x = x * 2
        rows = [row.sum() for row in x]
        first, second = x
        return torch.stack(rows) + first[:2] + second[0] + len(rows)

    assert targets(traced_like(program, x=x24)).count(operator.getitem) == 6


def test_it_is_a_tensor() -> None:
    def program(x: Tensor) -> Tensor:
        assert isinstance(x, Tensor) and torch.is_tensor(x)
        assert not isinstance(x, nn.Parameter) and not isinstance(x.shape, Tensor)
        assert (
            isinstance(x.device, torch.device) and x.device == torch.device("cpu") and x.device.type == "cpu"
        )
        assert hasattr(x, "view") and not hasattr(x, "no_such_thing")
        return x

    traced_like(program, x=x24)


def test_values_that_follow_from_the_program() -> None:
    def program(x: Tensor) -> Tensor:
        return x + 1 if torch.tensor([1, 2]).sum() == 3 and int(torch.arange(3)[2]) == 2 else x - 1

    assert targets(traced_like(program, x=x24))[-1] is operator.add


def test_device_is_that_of_the_value() -> None:
    def program(x: Tensor) -> Tensor:
        y = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)
        return (
            x + y.to(x.device) + torch.zeros_like(x, device=x.device) + torch.tensor(1.0).to(device=x.device)
        )

    traced = traced_like(program, x=x24)
    assert "torch.arange(4, device = getattr_1, dtype = torch.float32)" in traced.code
    assert "cpu" not in traced.code
    fake = FakeTensorMode()
    with fake:
        elsewhere = torch.empty(2, 4, device="cuda:1")
    traced = symbolic_trace(program, {"x": elsewhere})
    assert val(traced, "arange").device == torch.device("cuda:1")


def test_device_of_a_parameter() -> None:
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            return x.to(self.weight.device) + torch.ones(4, device=self.weight.device) * self.weight.mean()

    assert "cpu" not in traced_like(Shift(), x=x24).code


def test_a_meta_example_is_where_the_root_is() -> None:
    model = nn.Linear(4, 3)
    traced = symbolic_trace(nn.Sequential(model), {"input": torch.empty(2, 4, device="meta")})
    assert val(traced, "_0").device.type == "cpu"
    assert torch.equal(traced(x24), model(x24))


# --- attributes --------------------------------------------------------------------------------------------------------


def test_an_attribute_is_a_node_only_if_it_is_used() -> None:
    def program(x: Tensor) -> Tensor:
        x.T
        view = x.view
        return view(4, 2) + x.T + x.mT.contiguous()

    traced = traced_like(program, x=x24)
    assert targets(traced) == ["view", getattr, operator.add, getattr, "contiguous", operator.add]


def test_an_attribute_is_read_where_it_stands() -> None:
    def program(x: Tensor) -> Tensor:
        y = x * 1
        before = y.T
        y += 1
        return before + 0

    traced = traced_like(program, x=x24)
    assert targets(traced) == [operator.mul, getattr, operator.iadd, operator.add]


def test_attributes_of_results() -> None:
    def program(x: Tensor) -> Any:
        top = torch.max(x, 1)
        q, r = torch.linalg.qr(x)
        return top.values, top[1], x.topk(2).indices, q @ r, x.T.T.real

    traced_like(program, x=x24)


def test_an_attribute_that_is_set() -> None:
    def program(x: Tensor) -> Tensor:
        y = x * 2
        y.data = x.data * 3
        return y

    assert setattr in targets(traced_like(program, x=x24))


# --- factories, constants, writes ------------------------------------------------------------------------------------------


FACTORIES = {
    "zeros": lambda x: torch.zeros(x.shape[0], 3),
    "ones": lambda x: torch.ones((x.size(1),), dtype=torch.int64),
    "empty": lambda x: torch.empty(x.shape).fill_(1),
    "full": lambda x: torch.full((2, x.shape[1]), 7.0),
    "full_like": lambda x: torch.full_like(x, 3),
    "zeros_like": lambda x: torch.zeros_like(x),
    "new_ones": lambda x: x.new_ones(x.shape[1]),
    "arange": lambda x: torch.arange(x.numel()),
    "linspace": lambda x: torch.linspace(0, 1, x.shape[1]),
    "logspace": lambda x: torch.logspace(0, 1, x.shape[1]),
    "eye": lambda x: torch.eye(x.shape[1]),
    "tril_indices": lambda x: torch.tril_indices(x.shape[0], x.shape[1]),
    "rand": lambda x: torch.rand(x.shape),
    "randn": lambda x: torch.randn(x.shape[0], 2),
    "randint": lambda x: torch.randint(0, 9, (x.shape[1],)),
    "randperm": lambda x: torch.randperm(x.shape[1]),
    "normal": lambda x: torch.normal(0.0, 1.0, (x.shape[0],)),
    "hann_window": lambda x: torch.hann_window(x.shape[1]),
    "tensor": lambda x: torch.tensor([x.shape[0], 5.0]),
    "complex": lambda x: torch.complex(x, x),
    "empty_strided": lambda x: torch.empty_strided(x.shape, (1, 2)).fill_(0),
    "scalar_tensor": lambda x: torch.scalar_tensor(x.shape[0]),
    "fft.fftfreq": lambda x: torch.fft.fftfreq(x.shape[1]),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_factories_are_nodes(name: str) -> None:
    def program(x: Tensor) -> Any:
        torch.manual_seed(3)
        return x.sum() * 0 + FACTORIES[name](x)

    traced = symbolic_trace(program, {"x": x24})
    assert not [n for n in traced.graph.nodes if n.op == "get_attr"], "a constant"
    torch.manual_seed(3)
    given = traced(x24)
    assert torch.equal(given, program(x24))
    assert wrong_nodes(traced, {"x": x24}) == []


def test_a_factory_gives_something_new_each_time() -> None:
    traced = symbolic_trace(lambda x: x + torch.rand(4), {"x": x24})
    assert not torch.equal(traced(x24), traced(x24))


def test_writes_into_values() -> None:
    def program(x: Tensor) -> Tensor:
        y = torch.zeros(2, 4)
        y[0] = x[0]
        y[:, 1:] += 2
        y[x > 0] = 5.0
        y.mul_(2)
        z = y.view(-1)
        z *= 3
        y[..., None][0, 0] = 1.0
        return y

    traced_like(program, x=x24)


def test_a_view_of_the_input_is_written_through() -> None:
    def program(x: Tensor) -> Tensor:
        x.t()[0].fill_(1)
        x[1] -= 3
        return x.sum()

    traced = symbolic_trace(program, {"x": x24})
    ours, real = x24.clone(), x24.clone()
    traced(ours), program(real)
    assert torch.equal(ours, real)


def test_constants_stay_out_of_the_root() -> None:
    scale = torch.tensor([1.0, 2, 3, 4])

    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * scale + scale.sum()

    model = Scaled()
    traced = traced_like(model, x=x24)
    assert list(vars(model)) == list(vars(Scaled()))
    assert [n.target for n in traced.graph.nodes if n.op == "get_attr"] == [
        "_tensor_constant0",
        "_tensor_constant1",
    ]


def test_tensors_of_the_root_are_read_from_it() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))
            self.register_buffer("seen", torch.zeros(()))
            self.extra = torch.ones(4)

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            assert isinstance(self.weight, nn.Parameter) and self.weight.shape == (4, 4)
            return x @ (self.weight.t() * 2) + self.extra * self.seen + self.weight[0] + float(self.extra[0])

    model = Shifted()
    traced = symbolic_trace(model, {"x": x24})
    assert model.seen == 0, "tracing changes nothing"
    assert {n.target for n in traced.graph.nodes if n.op == "get_attr"} == {"weight", "seen", "extra"}
    assert torch.equal(copy.deepcopy(traced)(x24), copy.deepcopy(model)(x24))
    model.seen.fill_(5)
    assert torch.equal(traced(x24), (model.seen.sub_(1), model(x24))[1])


def test_what_a_program_assigns_to_itself() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))
            self.last: Any = None

        def forward(self, x: Tensor) -> Tensor:
            self.count = self.count + 1
            self.last = {"x": x}
            return x * self.count

    model, real = Counting(), Counting()
    traced = symbolic_trace(model, {"x": x24})
    assert type(model.count) is Tensor and model.count == 0 and model.last is None
    assert all(torch.equal(traced(x24), real(x24)) for _ in range(3))
    assert traced.count == real.count == 3


def test_a_buffer_that_decides() -> None:
    class Flagged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("flag", torch.tensor(1))
            self.register_buffer("big", torch.ones(100))

        def forward(self, x: Tensor) -> Tensor:
            if self.flag == 1 and self.big[0].shape == ():
                self.flag.add_(1)
            return x * 2 if self.flag > 1 else x

    model = Flagged()
    traced = symbolic_trace(model, {"x": x24})
    assert torch.equal(traced(x24), x24 * 2) and model.flag == 2


def test_batch_norm_in_training_is_left_alone() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout())
    before = copy.deepcopy(model.state_dict())
    traced = symbolic_trace(model, {"input": x24})
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    traced(x24)
    assert model[0].num_batches_tracked == 1


# --- derivation: what was wrong in torch ------------------------------------------------------------------------------------


def test_embedding_in_bf16() -> None:
    model = nn.Sequential(nn.Embedding(10, 4, dtype=torch.bfloat16))
    traced = symbolic_trace(model, {"input": torch.tensor([[1, 2]])})
    assert str(val(traced, "_0").spec) == "bf16[1, 2, 4]@cpu"


@pytest.mark.parametrize("function", [torch.relu, F.relu, torch.abs, nn.LayerNorm(4), nn.ReLU()])
def test_a_new_result_aliases_nothing(function: Any) -> None:
    class Program(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.function = function

        def forward(self, x: Tensor) -> Tensor:
            y = x + 0
            z = self.function(y)
            z.unsqueeze_(0)
            assert y.shape == (2, 4) and z.shape == (1, 2, 4)
            return z

    traced = traced_like(Program(), x=x24)
    nodes = list(traced.graph.nodes)
    added = next(n for n in nodes if n.name == "add")
    result = added.next
    assert result.meta["val"].untyped_storage()._cdata != added.meta["val"].untyped_storage()._cdata


def test_where_has_the_dtype_of_its_values() -> None:
    ints = torch.arange(8).view(2, 4)

    def program(x: Tensor, n: Tensor) -> Any:
        return (
            torch.where(x > 0, n, n + 1),
            torch.where(x > 0, 1, 2),
            torch.where(x > 0, n, 0.5),
            x.where(n > 1, 0),
        )

    traced_like(program, x=x24, n=ints)


def test_a_module_runs_its_own_forward() -> None:
    torch.manual_seed(0)
    model = nn.LSTM(4, 3, num_layers=2, batch_first=True)

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.attention = model, nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: Tensor) -> Any:
            out, (hidden, cell) = self.lstm(x)
            attended, weights = self.attention(x, x, x)
            assert out.shape == (2, 5, 3) and hidden.shape == (2, 2, 3) and weights.shape == (2, 5, 5)
            return out[:, -1], hidden.sum(0), cell, attended

    with torch.no_grad():
        traced_like(Last().eval(), x=torch.randn(2, 5, 4))


# --- structures --------------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Box:
    inside: Any
    label: str = "box"


class Bag:
    def __init__(self, things: list[Any]) -> None:
        self.things = things
        self.size = len(things)


def test_structures_go_in_and_out() -> None:
    def program(batch: dict[str, Any], rest: list[Any]) -> Any:
        assert set(batch) == {"x", "pair"} and isinstance(batch["pair"], Pair) and len(rest) == 2
        y = batch["x"] + batch["pair"].left + rest[0] * rest[1]
        ordered = collections.OrderedDict(y=y, n=1)
        return {
            "y": y,
            "pair": Pair(y, None),
            "box": Box(y),
            "list": [y, (y, "text")],
            "ordered": ordered,
            "bag": Bag([y]),
        }

    inputs = {"batch": {"x": x24, "pair": Pair(x24, None)}, "rest": [x24, 3]}
    traced = symbolic_trace(program, inputs)
    given, real = traced(**inputs), program(**inputs)
    assert_same(real, given)
    assert isinstance(given["pair"], Pair) and isinstance(given["box"], Box) and isinstance(given["bag"], Bag)
    assert (
        isinstance(given["ordered"], collections.OrderedDict)
        and given["bag"].size == 1
        and given["box"].label == "box"
    )


def test_an_object_comes_in() -> None:
    def program(bag: Bag, x: Tensor) -> Tensor:
        assert isinstance(bag, Bag) and bag.size == 2
        return x + bag.things[0] * bag.things[1]["deep"]

    inputs = {"bag": Bag([x24, {"deep": x24}]), "x": x24}
    traced = symbolic_trace(program, inputs)
    assert torch.equal(traced(**inputs), program(**inputs))


def test_a_class_that_nobody_can_import() -> None:
    class Local:
        def __init__(self, x: Any) -> None:
            self.x = x

    with pytest.raises(TypeError, match="Local with traced values in it, whose class can't be imported"):
        symbolic_trace(lambda x: Local(x), {"x": x24})


def test_results_of_leaf_modules_are_structures() -> None:
    class Leaf(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {"y": x * 2, "parts": [x[0], Box(x[1])]}

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.leaf = Leaf()

        def forward(self, x: Tensor) -> Any:
            out = self.leaf(x)
            assert "y" in out and list(out.keys()) == ["y", "parts"] and len(out["parts"]) == 2
            assert out["y"].shape == (2, 4) and out["parts"][1].inside.shape == (4,)
            return (
                out.get("y")
                + dict(**out)["parts"][1].inside
                + sum(v.sum() for k, v in out.items() if k == "y")
            )

    class Whole(MetaTracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return isinstance(m, Leaf)

    traced = symbolic_trace(Around(), {"x": x24}, tracer=Whole())
    assert traced.graph.find_nodes(op="call_module", target="leaf")
    assert torch.equal(traced(x24), Around()(x24))


# --- signatures -----------------------------------------------------------------------------------------------------------------


def checked(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        kwargs.setdefault("scale", 2.0)
        return function(*args, **kwargs)

    return wrapper


class Decorated(nn.Module):
    @checked
    def forward(self, x: Tensor, bias: Tensor | None = None, *, scale: float = 1.0, **more: Any) -> Tensor:
        y = x * scale if bias is None else x * scale + bias
        return y + more["shift"] if "shift" in more else y


def test_a_signature_behind_a_decorator() -> None:
    traced = symbolic_trace(Decorated(), {"x": x24})
    assert torch.equal(traced(x=x24), Decorated()(x24))
    assert torch.equal(traced(x24, bias=None), Decorated()(x24))
    assert "def forward(self, x, bias = None, scale = 1.0):\n" in traced.code


def test_keyword_arguments_and_more_of_them() -> None:
    traced = symbolic_trace(Decorated(), {"x": x24, "bias": x24[0], "shift": x24[1]}, {"scale": 3.0})
    given = {"x": x24, "bias": x24[0], "shift": x24[1]}
    assert torch.equal(traced(**given), Decorated()(**given, scale=3.0))
    assert torch.equal(traced(**given, scale=3.0), traced(**given))
    with pytest.raises(ValueError, match=r"scale was 3\.0 when this graph was traced, and is 4\.0 now"):
        traced(**given, scale=4.0)
    with pytest.raises(TypeError, match="was traced with shift; pass it as a keyword argument"):
        traced(x24, x24[0])


def test_a_fixed_argument_is_checked() -> None:
    traced = symbolic_trace(Decorated(), {"x": x24})
    with pytest.raises(ValueError, match="bias was None when this graph was traced, and is tensor"):
        traced(x24, x24[0])
    traced.graph.eliminate_dead_code()
    traced.recompile()
    with pytest.raises(ValueError, match="bias was None"):
        traced(x24, bias=x24[0])


def test_positional_arguments() -> None:
    def program(a: Tensor, /, b: Tensor, *rest: Tensor, last: Tensor) -> Tensor:
        assert len(rest) == 2
        return a + b * rest[0] - rest[1] * last

    traced = symbolic_trace(program, {"a": x24, "b": x24, "rest": (x24, x24), "last": x24})
    assert len(targets(traced)) == 7  # and one that there are two more


def test_a_name_that_is_no_argument() -> None:
    with pytest.raises(TypeError, match="the program has no argument 'y'; it has x"):
        symbolic_trace(lambda x: x, {"y": x24})
    with pytest.raises(
        TypeError, match="meta_args: expected a dict from names of arguments to examples, got a list"
    ):
        symbolic_trace(lambda x: x, [x24])  # type: ignore[arg-type]


def test_without_examples_it_is_a_plain_trace() -> None:
    def program(x: Tensor, y: Any = 2) -> Tensor:
        a, b = x.chunk(2)
        return (
            torch.zeros(x.shape[0], 2)
            + torch.ones(a.size(0), device=x.device).sum()
            + math.sqrt(x.shape[1]) * y
            + b.T.sum()
        )

    traced = symbolic_trace(program)
    assert torch.equal(traced(x24), program(x24)) and torch.equal(traced(x24, 5), program(x24, 5))
    wide = torch.randn(4, 9)
    assert torch.equal(traced(wide), program(wide))
    assert not any("val" in node.meta for node in traced.graph.nodes if node.op != "get_attr")


def test_an_argument_without_example_is_an_ordinary_value() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        return (x + y).view(x.shape[0], -1) * torch.full((y.shape[1],), 2.0)

    traced = symbolic_trace(program, {"x": x24})
    assert torch.equal(traced(x24, x24), program(x24, x24))


def test_an_open_place_in_a_concrete_structure() -> None:
    traced = symbolic_trace(
        lambda x: sum(x.values()), concrete_args={"x": {"a": torch.fx.PH, "b": torch.fx.PH, "c": 4}}
    )
    assert traced({"a": 1, "b": 2, "c": 4}) == 7


# --- functions kept whole, modules made on the fly --------------------------------------------------------------------------------


@torch.fx.wrap
def kept_whole(x: Tensor, n: int) -> Tensor:
    return x * n if x.sum() > -1e9 else x


def test_a_wrapped_function_is_a_node() -> None:
    with pytest.warns(
        UserWarning, match="Could not compute metadata for call_function target kept_whole"
    ) as said:
        traced = symbolic_trace(lambda x: kept_whole(x + 1, 3) * 2, {"x": x24})
    assert kept_whole in targets(traced) and kept_whole.__name__ == "kept_whole"
    assert torch.equal(traced(x24), (x24 + 1) * 6)
    text = str(said[0].message)
    assert "called:  kept_whole(f32[2, 4]@cpu, 3)" in text
    assert "test_tracer.py:" in text and "kept_whole(x + 1, 3) * 2" in text
    assert said[0].filename == __file__


def test_modules_made_on_the_fly() -> None:
    class OnTheFly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.relu_0 = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return nn.ReLU()(nn.Flatten()(x[None])) + nn.ReLU()(x).sum()

    model = OnTheFly()
    traced = symbolic_trace(model, {"x": x24})
    assert [t for t in targets(traced) if isinstance(t, str)] == ["flatten_0", "relu_1", "relu_2", "sum"]
    assert isinstance(model.relu_1, nn.ReLU) and isinstance(traced.relu_2, nn.ReLU)
    assert torch.equal(traced(x24), OnTheFly()(x24))

    class Strict(MetaTracer):
        allow_insert_stateless_mods = False

    with pytest.raises(RuntimeError, match="Flatten is not part of the traced module, and allow_insert"):
        Strict().trace(OnTheFly(), {"x": x24})


def test_a_module_with_parameters_has_to_be_registered() -> None:
    def made_inside(x: Tensor) -> Tensor:
        return nn.Linear(4, 2)(x)

    outside = nn.Linear(4, 2)

    def made_outside(x: Tensor) -> Tensor:
        return outside(x)

    for program, reason, line in (
        (made_inside, "the program makes a parameter while it is traced", "return nn.Linear(4, 2)(x)"),
        (
            made_outside,
            "Linear has parameters or buffers, and is not part of the traced module",
            "return outside(x)",
        ),
    ):
        with pytest.raises(MetaTraceError) as said:
            symbolic_trace(program, {"x": x24})
        text = str(said.value)
        assert text.startswith(reason) and line in text
        assert (
            "to do:   register it: make it in __init__, and assign it to an attribute of the traced module"
            in text
        )


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, n: int) -> Tensor:
        return x * n

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * 100, None


@torch.jit.script
def in_torchscript(x: Tensor, n: int) -> Tensor:
    return x * x.size(-1) + n


def test_autograd_functions_and_torchscript_stay_whole() -> None:
    traced = symbolic_trace(lambda x: Doubled.apply(x, 2) + in_torchscript(x, 3), {"x": x24})
    x = x24.clone().requires_grad_()
    out = traced(x)
    assert torch.equal(out, x24 * 2 + (x24 * 4 + 3))
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(grad, torch.full_like(x, 104.0))
    assert val(traced, "apply_function").shape == (2, 4)


def test_vmap_is_one_node_with_a_body() -> None:
    class Mapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor, y: Tensor) -> Any:
            rows = torch.vmap(lambda row: row * self.weight + y.shape[0])(x)
            pairs = torch.vmap(torch.vmap(lambda a, b: a * b + y[0], (None, 0)), (0, None))(x[:, 0], y[:, 0])
            both = torch.vmap(lambda a: {"p": a + 1, "q": (a.sum(), y)}, in_dims=1, out_dims=0)(x)
            together = torch.vmap(lambda a, b: a[0] * b["c"] + b["d"])((x,), {"c": x + 1, "d": x[:, 0]})
            nothing = torch.vmap(lambda a: a * 2, in_dims=1, out_dims=1)(x[:, :0])
            return rows, pairs, both, together, nothing

    with torch.no_grad():
        traced = traced_like(Mapped(), x=x24, y=torch.randn(3, 4))
    assert "weight" in dict(traced.named_parameters()) and len(list(traced.parameters())) == 1


# --- regions -------------------------------------------------------------------------------------------------------------------------------


def test_regions_of_autocast() -> None:
    def program(x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low = x @ x.T
            with torch.autocast("cpu", enabled=False):
                high = x @ x.T
        return low, high, x @ x.T

    traced = traced_like(program, x=x24)
    assert [v.dtype for v in traced(x24)] == [torch.bfloat16, torch.float32, torch.float32]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(program(x24), traced(x24))
    assert not torch.is_autocast_enabled("cpu")


def test_regions_without_gradients() -> None:
    def program(x: Tensor) -> Tensor:
        with torch.no_grad():
            weights = torch.softmax(x, -1)
            with torch.enable_grad():
                scale = (x * x).sum()
        with torch.no_grad():
            pass
        return weights * x * scale

    for is_on in (True, False):
        with torch.set_grad_enabled(is_on):
            traced = symbolic_trace(program, {"x": x24})
        assert len(targets(traced)) == 9, "a region in which nothing happens is not in the graph"
        x = x24.clone().requires_grad_()
        (expected,) = torch.autograd.grad(program(x).sum(), x)
        (given,) = torch.autograd.grad(traced(x).sum(), x)
        assert torch.equal(given, expected)
        with torch.no_grad():
            traced(x)
            assert not torch.is_grad_enabled()
        assert torch.is_grad_enabled()
        traced.graph.eliminate_dead_code()
        assert len(targets(traced)) == 9


def test_a_root_made_of_stand_ins() -> None:
    with FakeTensorMode():
        model = nn.Sequential(nn.Linear(100_000, 50_000, device="cuda"), nn.ReLU())
        x = torch.empty(8, 100_000, device="cuda")
        traced = symbolic_trace(model, {"input": x})
    assert str(val(traced, "_1").spec) == "f32[8, 50000]@cuda:0"
    assert symbolic_trace(model, {"input": x}).code == traced.code
    assert traced(x).shape == (8, 50_000)


# --- the graph as an object ------------------------------------------------------------------------------------------------------------


def test_a_trace_can_be_repeated() -> None:
    meta_args = {"x": x24}
    tracer = MetaTracer()
    graph = tracer.trace(nn.Sequential(nn.Linear(4, 4)), {"input": x24})
    assert graph._tracer_extras["meta_args"] == {"input": x24}
    traced = symbolic_trace(lambda x: x.view(x.size(1), -1) * 2, meta_args)
    assert traced.graph._tracer_extras["meta_args"] is meta_args
    again = symbolic_trace(traced, traced.graph._tracer_extras["meta_args"])
    assert again.code == traced.code


def test_copies_and_files() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    traced = symbolic_trace(model, {"input": x24})
    for other in (copy.deepcopy(traced), pickle.loads(pickle.dumps(traced))):
        assert torch.equal(other(x24), model(x24))


def test_nodes_know_their_line_and_their_module() -> None:
    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.relu()

    traced = symbolic_trace(nn.Sequential(Inner()), {"input": x24})
    node = next(n for n in traced.graph.nodes if n.target == "relu")
    assert node.stack_trace.splitlines()[-1].strip() == "return x.relu()"
    assert list(node.meta["nn_module_stack"].values())[-1] == ("0", Inner)
    shared = Inner()
    calls = symbolic_trace(nn.Sequential(shared, shared), {"input": x24}).graph.find_nodes(
        op="call_method", target="relu"
    )
    assert [list(node.meta["nn_module_stack"])[-1] for node in calls] == ["0", "0@1"]


# --- symbolic sizes -----------------------------------------------------------------------------------------------------------------------


def test_sizes_are_calls() -> None:
    def program(x: Tensor) -> Tensor:
        b, n = x.shape
        half = torch.zeros(b, n // 2, device=x.device)
        return torch.cat([x, half], 1).view(b, -1)[:, : n + 1] * b

    traced = symbolic_trace(program, {"x": torch.randn(3, 8)}, symbolic=True)
    assert "x.size(0)" in traced.code and "x.size(1)" in traced.code
    for shape in ((3, 8), (5, 2), (2, 40)):
        x = torch.randn(shape)
        assert torch.equal(traced(x), program(x))
    assert str(val(traced, "view").spec) == "f32[x_0, x_1 + x_1//2]@cpu"


def test_guards_are_recorded() -> None:
    def program(x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] > 4 else x

    env = symbolic_trace(program, {"x": torch.randn(8, 3)}, symbolic={"x": dims("batch", "n")}).shape_env
    assert isinstance(env, ShapeEnv)
    (guard,) = env.guards
    assert str(guard).startswith("batch >= 5    because ") and "x * 2 if x.shape[0] > 4" in str(guard)
    assert env.check(torch.randn(2, 3)) and not env.check(torch.randn(9, 3))


def test_sizes_that_depend_on_data() -> None:
    def program(x: Tensor) -> Any:
        found = x.nonzero()
        n = x.abs().sum().ceil().int().item()
        return found.reshape(-1), torch.zeros(found.shape[0] + 2, n) + found.size(0)

    for symbolic in (False, True):
        traced = symbolic_trace(program, {"x": x24}, symbolic=symbolic)
        for x in (x24, torch.tensor([[0.0, 1, 2, 0], [0, 0, 0, 7]])):
            assert_same(program(x), traced(x))


def test_examples_may_be_stand_ins_with_symbols() -> None:
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    x = mode.from_tensor(torch.randn(6, 3), source="x", symbolic_context=dims("batch", "n"))
    traced = symbolic_trace(lambda x: x.view(-1), {"x": x}, symbolic=True)
    assert traced.shape_env is env
    assert str(val(traced, "view").spec) == "f32[batch*n]@cpu"


def test_parts_of_a_model_stay_in_their_modes() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout().eval())
    traced = symbolic_trace(model, {"input": torch.randn(2, 3)})
    assert traced.training and model[0].training and not model[1].training
    assert not symbolic_trace(model.eval(), {"input": torch.randn(2, 3)}).training


def test_an_encoder_with_padding() -> None:
    """It makes rows of several lengths of a batch, which stand-ins can't be."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2).eval()

        def forward(self, x: Tensor, padding: Tensor) -> Any:
            return self.encoder(x, src_key_padding_mask=padding)

    args = torch.randn(3, 5, 8), torch.arange(5).expand(3, 5) > 3
    model = Model().eval()
    with torch.no_grad():
        traced = symbolic_trace(model, dict(zip(("x", "padding"), args, strict=True)))
        assert torch.equal(traced(*args), model(*args))


@pytest.mark.parametrize("symbolic", [False, True])
def test_traces_leave_nothing_behind(symbolic: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            left, right = self.linear(x).chunk(2, -1)
            return torch.cat([left, right], -1).relu_() + x.T.mean()

    def count_objects() -> int:
        gc.collect()
        return len(gc.get_objects())

    model = Model()
    counts = []
    for _ in range(3):
        for _ in range(60):
            symbolic_trace(model, {"x": x24}, symbolic=symbolic)
        counts.append(count_objects())
    assert counts[2] - counts[1] < 60
