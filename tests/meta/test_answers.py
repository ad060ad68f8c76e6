"""What a program asks of its values, answered while it is traced as it is answered when it runs.

Each program returns its answers next to a tensor. An answer that is another one while tracing is seen in two ways: in the
list of answers of the traced run, and in the numbers, where the program took the other branch.
"""

from __future__ import annotations

import collections
import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.meta.reality import assert_same
from understudy import MetaTracer, symbolic_trace

x = torch.randn(4, 6)


class Program(nn.Module):
    """A function as the forward of a module with leaves of several kinds."""

    def __init__(self, function: Callable[[Program, Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.identity = nn.Identity()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.lstm = nn.LSTM(6, 3, batch_first=True)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("count", torch.zeros(()))
        self.answers: list[Any] = []

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)

    def ask(self, x: Tensor, *answers: Any) -> Tensor:
        """The tensor, changed by what was answered."""
        self.answers.append(answers)
        return x + sum(2**place for place, answer in enumerate(answers) if answer)


def check(function: Callable[[Program, Tensor], Any], **options: Any) -> torch.fx.GraphModule:
    """The same answers, and the same numbers."""
    program = Program(function).eval()
    with torch.no_grad():
        state = {name: value.clone() for name, value in program.state_dict().items()}
        real = program(x.clone())
        after = {name: value.clone() for name, value in program.state_dict().items()}
        program.load_state_dict(state)
        expected, program.answers = program.answers, []
        traced = symbolic_trace(program, {"x": x.clone()}, **options)
        assert program.answers == expected
        assert_same(real, traced(x.clone()))
        for name, value in traced.state_dict().items():
            assert torch.equal(value, after[name]), name
    return traced


# --- what is no tensor ---------------------------------------------------------------------------------------------


class Color(enum.Enum):
    RED = 1


class Pair(NamedTuple):
    first: Any
    second: Any


PLAIN = [None, True, False, 0, 3, 2.5, 1j, "text", b"bytes", torch.float16, Color.RED, (), (1, None), [2, "a"],
         {"a": None, "b": 2}, {1, 2}, torch.Size([2, 3]), range(3), int, Pair(1, None)]  # fmt: skip


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("value", PLAIN, ids=str)
def test_a_leaf_that_gives_no_tensor(value: Any, symbolic: bool) -> None:
    def program(self: Program, x: Tensor) -> Tensor:
        given = self.identity(value)
        return self.ask(
            x, given is None, given == value, isinstance(given, type(value)), bool(given) == bool(value)
        )

    check(program, symbolic=symbolic)


class Results(nn.Module):
    """A leaf that gives structures of tensors and other things."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(x)


class LeafTracer(MetaTracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, Results) or super().is_leaf_module(m, module_qualified_name)


STRUCTURES: list[Callable[[Tensor], Any]] = [
    lambda x: (x + 1, None),
    lambda x: [x + 1, 2, "text"],
    lambda x: {"a": x + 1, "b": None, "c": (x * 2, 3)},
    lambda x: collections.OrderedDict(a=x + 1, b=None),
    lambda x: Pair(x + 1, None),
    lambda x: Pair(None, Pair(x + 1, x * 2)),
    lambda x: torch.max(x, 1),
    lambda x: (x.shape[0], x.shape, x.dtype, x + 1),
    lambda x: ((), [x * 3, [x, None]], True),
]


def shape_of(value: Any) -> Any:
    """A structure with the places of tensors marked."""
    if isinstance(value, Tensor):
        return "tensor"
    if isinstance(value, dict):
        return type(value), {key: shape_of(part) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value), [shape_of(part) for part in value]
    return value


@pytest.mark.parametrize("make", STRUCTURES)
def test_a_leaf_that_gives_a_structure(make: Callable[[Tensor], Any]) -> None:
    def program(self: Program, x: Tensor) -> Any:
        given = self.results(x)
        self.answers.append(shape_of(given))
        return given, given[0] if isinstance(given, (tuple, list)) else given["a"]

    class WithResults(Program):
        def __init__(self, function: Any) -> None:
            super().__init__(function)
            self.results = Results(make)

    model = WithResults(program)
    real = model(x)
    traced = symbolic_trace(model, {"x": x}, tracer=LeafTracer())
    assert model.answers[0] == model.answers[1]
    assert_same(real, traced(x))


def test_attention_without_weights() -> None:
    def program(self: Program, x: Tensor) -> Any:
        inner = x.view(2, 2, 6)
        out, weights = self.attention(inner, inner, inner, need_weights=False)
        both = self.attention(inner, inner, inner)
        return self.ask(out, weights is None, both[1] is None, isinstance(both, tuple), len(both) == 2)

    check(program)


def test_a_tuple_passed_on_is_the_node_that_gave_it() -> None:
    def program(self: Program, x: Tensor) -> Any:
        parts = x.split(2)
        out, state = self.lstm(x.view(2, 2, 6))
        return torch.cat(parts), self.lstm(out.repeat(1, 1, 2), state)[0], isinstance(parts, tuple)

    traced = check(program)
    assert not any(node.target == "getitem" and not node.users for node in traced.graph.nodes)
    cat = next(node for node in traced.graph.nodes if node.target is torch.cat)
    assert cat.args[0].target == "split"


def test_a_module_without_result_stays_in_the_graph() -> None:
    calls: list[int] = []

    class Remembers(nn.Module):
        def forward(self, x: Tensor) -> None:
            calls.append(x.shape[0])

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.results = Remembers()

        def forward(self, x: Tensor) -> Tensor:
            return x + 1 if self.results(x) is None else x - 1

    class Tracer(MetaTracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return isinstance(m, Remembers)

    traced = symbolic_trace(Model(), {"x": x}, tracer=Tracer())
    calls.clear()
    assert torch.equal(traced(x), x + 1)
    assert calls == [4]


# --- what Python asks ------------------------------------------------------------------------------------------------

QUESTIONS: dict[str, Callable[[Any], bool]] = {
    "callable": callable,
    "is a Callable": lambda x: isinstance(x, collections.abc.Callable),
    "is a Mapping": lambda x: isinstance(x, collections.abc.Mapping),
    "is a Tensor": lambda x: isinstance(x, Tensor),
    "is a Parameter": lambda x: isinstance(x, nn.Parameter),
    "is a number": lambda x: isinstance(x, (int, float, complex)),
    "is a sequence": lambda x: isinstance(x, (list, tuple, dict, str)),
    "hash": lambda x: hash(x) == hash(x),
}
NAMES = (
    "keys items get append shape view __call__ __len__ __iter__ __getitem__ nonsense _private __array__ to names config "
    "forward rebuild update"
).split()


@pytest.mark.parametrize("name", NAMES)
def test_attributes_that_tensors_have_or_not(name: str) -> None:
    def program(self: Program, x: Tensor) -> Tensor:
        return self.ask(
            x, hasattr(x, name), hasattr(x + 1, name), hasattr(x.T, name), hasattr(x.split(2)[0], name)
        )

    check(program)
    check(program, symbolic=True)


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
def test_questions_about_tensors(question: Callable[[Any], bool]) -> None:
    def program(self: Program, x: Tensor) -> Tensor:
        return self.ask(
            x, question(x), question(x + 1), question(x.T), question(x[0]), question(x.split(2)[0])
        )

    check(program)
    check(program, symbolic=True)


SAME: dict[str, Callable[[Tensor], Any]] = {
    "contiguous": lambda x: x.contiguous(),
    "float": lambda x: x.float(),
    "double": lambda x: x.double(),
    "to dtype": lambda x: x.to(torch.float32),
    "to other dtype": lambda x: x.to(torch.float16),
    "to device": lambda x: x.to("cpu"),
    "to device of": lambda x: x.to(x.device),
    "to copy": lambda x: x.to(torch.float32, copy=True),
    "to another": lambda x: x.to(x),
    "type": lambda x: x.type(torch.float32),
    "type_as": lambda x: x.type_as(x),
    "cpu": lambda x: x.cpu(),
    "add_": lambda x: x.add_(0),
    "iadd": lambda x: x.__iadd__(2),
    "relu_": lambda x: torch.relu_(x),
    "relu in place": lambda x: nn.functional.relu(x, inplace=True),
    "out": lambda x: torch.add(x, 1, out=x),
    "zero_": lambda x: x.zero_(),
    "copy_": lambda x: x.copy_(torch.ones(4, 6)),
    "requires_grad_": lambda x: x.requires_grad_(False),
    "detach_": lambda x: x.detach_(),
    "detach": lambda x: x.detach(),
    "clone": lambda x: x.clone(),
    "view": lambda x: x.view(4, 6),
    "reshape": lambda x: x.reshape(4, 6),
    "expand": lambda x: x.expand(4, 6),
    "squeeze_": lambda x: x.squeeze_(0),
    "t_": lambda x: x.t_(),
    "dropout": lambda x: nn.functional.dropout(x, training=False),
    "resolve_conj": lambda x: x.resolve_conj(),
    "alias of attribute": lambda x: x.real,
    "T": lambda x: x.T.T,
}  # fmt: skip


@pytest.mark.parametrize("change", SAME.values(), ids=SAME)
def test_what_gives_the_tensor_itself(change: Callable[[Tensor], Any]) -> None:
    def program(self: Program, x: Tensor) -> Any:
        y = x * 1
        other = change(y)
        view = y[0]
        return self.ask(y, other is y), other * 2, change(x) is x, view

    check(program)
    check(program, symbolic=True)


def test_a_write_to_an_attribute() -> None:
    def program(self: Program, x: Tensor) -> Any:
        turned = x.T
        before = turned[0]
        same = turned.mul_(2)
        return self.ask(x, same is turned), before, turned + 1

    check(program)


def test_a_buffer_that_is_written_to() -> None:
    def program(self: Program, x: Tensor) -> Any:
        same = self.count.add_(1)
        self.count += 1
        return self.ask(x, same is self.count, self.count.float() is self.count), self.count * x

    check(program)


def test_what_is_written_to_survives_the_removal_of_dead_code() -> None:
    def program(x: Tensor) -> Tensor:
        y = x * 2
        y.add_(1)
        y.clamp_(max=2)
        return y

    traced = symbolic_trace(program, {"x": x})
    traced.graph.eliminate_dead_code()
    traced.recompile()
    assert torch.equal(traced(x), program(x))


def test_a_leaf_may_give_something_else_when_it_is_run() -> None:
    """In evaluation, `nn.Dropout` gives what it is given; the graph may be trained later."""
    model = Program(lambda self, x: self.dropout(x) + x).eval()
    traced = symbolic_trace(model, {"x": x}).train()
    torch.manual_seed(0)
    expected = model.train()(x)
    torch.manual_seed(0)
    assert torch.equal(traced(x), expected)


def test_whoever_asks_for_a_proxy_of_fx() -> None:
    seen: list[bool] = []

    def program(x: Tensor) -> Tensor:
        seen.append(isinstance(x, torch.fx.Proxy))
        return x + 1

    symbolic_trace(program, {"x": x})
    symbolic_trace(program)
    program(x)
    assert seen == [False, True, False]  # a stand-in, a proxy of a value without example, a tensor


# --- defaults ---------------------------------------------------------------------------------------------------------


def with_dict(x: Tensor, opts: dict[str, Any] = {}) -> Tensor:  # noqa: B006
    return x + opts.get("a", 1)


def with_list(x: Tensor, sizes: list[int] = [2, 3]) -> Tensor:  # noqa: B006
    return x + len(sizes)


def with_set(x: Tensor, names: Any = {"a"}) -> Tensor:  # noqa: B006
    return x + ("a" in names)


def with_nested(x: Tensor, opts: Any = ({"a": [1]}, None)) -> Tensor:
    return x + opts[0]["a"][0]


def with_enum(x: Tensor, color: Color = Color.RED) -> Tensor:
    return x + color.value


def with_tensor(x: Tensor, bias: Tensor = torch.ones(6)) -> Tensor:  # noqa: B008
    return x + bias


def with_module(x: Tensor, *, layer: nn.Module = nn.Identity()) -> Tensor:  # noqa: B008
    return x + 1 if layer is not None else x


@pytest.mark.parametrize(
    "function", [with_dict, with_list, with_set, with_nested, with_enum, with_tensor, with_module]
)
def test_defaults_of_any_kind(function: Callable[..., Tensor]) -> None:
    traced = symbolic_trace(function, {"x": x})
    assert torch.equal(traced(x), function(x))


def test_another_value_in_the_place_of_a_default_is_refused() -> None:
    with pytest.raises(ValueError, match="opts"):
        symbolic_trace(with_dict, {"x": x})(x, {"a": 3})
    with pytest.raises(ValueError, match="sizes"):
        symbolic_trace(with_list, {"x": x})(x, [1])
