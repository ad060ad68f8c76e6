"""Parameters, buffers, and real tensors outside of modules, are constants until the trace writes to them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx as torch_make_fx

from tests.capture.captured import assert_same, captured, targets
from understudy import FakeTensorMode, FakeTensorProp, make_fx, unset_fake_temporarily
from understudy.capture.constant_values import ConstantValues
from understudy.capture.tracer import PythonKeyTracer
from understudy.errors import DataDependentOutputException, GuardOnDataDependentSymNode

ON_STAND_INS = ("fake", "symbolic")


class Padded(nn.Module):
    """Pads by what its buffers hold, as the convolutions of Encodec."""

    def __init__(self, kernel: int, stride: int, persistent: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 2, kernel, stride)
        self.register_buffer("stride", torch.tensor(stride), persistent=persistent)
        self.register_buffer("total", torch.tensor(kernel - stride), persistent=persistent)

    def forward(self, x: torch.Tensor) -> Any:
        right = self.total // 2
        if max(right, self.total - right) >= x.shape[-1]:
            x = nn.functional.pad(x, (0, 1))
        return self.conv(nn.functional.pad(x, (self.total - right, right)))


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("mode", ON_STAND_INS)
def test_a_program_may_decide_by_what_it_computes_from_a_buffer(mode: str, persistent: bool) -> None:
    model = Padded(5, 2, persistent)
    graph = captured(model, torch.randn(2, 2, 9), mode=mode)
    assert_same(model, graph, torch.randn(2, 2, 9))
    assert not any("local_scalar" in target for target in targets(graph))
    if mode == "symbolic":
        assert_same(model, graph, torch.randn(3, 2, 12))


class State(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 5.0))
        self.gain = nn.Parameter(torch.tensor([3.0]))
        self.register_buffer("scale", torch.tensor([0.5, 2.0]))
        self.norm = nn.BatchNorm1d(2)


READS: dict[str, Any] = {
    "item of a parameter": lambda m, x: x * m.gain.item(),
    "decision by a parameter": lambda m, x: x if m.gain else -x,
    "tolist of a parameter": lambda m, x: x * sum(m.weight.tolist()),
    "tolist of a buffer": lambda m, x: x * m.scale.tolist()[1],
    "comparison": lambda m, x: x if torch.equal(m.scale, m.norm.running_var) else x * 2,
    "comparison of floats": lambda m, x: x if torch.allclose(m.norm.running_mean, m.norm.bias) else x * 2,
    "after its use": lambda m, x: (x * m.gain) * m.gain.item(),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("mode", ["real", *ON_STAND_INS])
def test_a_value_that_is_read_is_a_number_of_the_graph_as_in_torch(mode: str, read: str) -> None:
    model = State()
    graphs = [
        make(lambda x: READS[read](model, x), tracing_mode=mode, _allow_non_fake_inputs=True)(
            torch.ones(2, 2)
        )
        for make in (make_fx, torch_make_fx)
    ]
    assert targets(graphs[0]) == targets(graphs[1])
    assert_same(lambda x: READS[read](model, x), graphs[0], torch.randn(2, 2))


@pytest.mark.parametrize("mode", ["real", *ON_STAND_INS])
def test_a_branch_reads_a_parameter(mode: str) -> None:
    model = State()

    def program(x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda x: x * model.gain.item(), lambda x: x + 1, (x,))

    graph = captured(program, torch.randn(2, 2), mode=mode)
    for x in (torch.ones(2, 2), -torch.ones(2, 2)):
        assert torch.equal(graph(x), x * 3 if x.sum() > 0 else x + 1)


WRITES_TO_STATE: dict[str, tuple[str, Any]] = {
    "an alias past autograd": ("parameter 'gain'", lambda m, x: (m.gain.item(), m.gain.data.mul_(2))),
    "a view": ("parameter 'weight'", lambda m, x: (m.weight.tolist(), m.weight.detach()[1:].add_(1))),
    "other data": ("parameter 'gain'", lambda m, x: (m.gain.item(), setattr(m.gain, "data", x[0, :1]))),
    "an assignment": ("buffer 'scale'", lambda m, x: (m.scale.tolist(), setattr(m, "scale", m.scale * 2))),
    "a batch norm": ("buffer 'norm.running_mean'", lambda m, x: (m.norm.running_mean.tolist(), m.norm(x))),
}


@pytest.mark.parametrize("write", WRITES_TO_STATE)
@pytest.mark.parametrize("mode", ON_STAND_INS)
def test_state_that_is_read_and_then_written_to_is_refused_by_name(mode: str, write: str) -> None:
    name, program = WRITES_TO_STATE[write]
    model = State()
    model.forward = lambda x: (program(model, x), x + 1)[1]
    with pytest.raises(
        DataDependentOutputException, match=f"the value of the {name} was read at .*, and the"
    ):
        captured(model, torch.randn(3, 2), mode=mode)
    assert model.gain == 3 and model.norm.running_mean.tolist() == [0, 0]


@pytest.mark.parametrize("mode", ON_STAND_INS)
def test_running_statistics_are_unknown_after_a_batch_norm(mode: str) -> None:
    model = State()
    model.forward = lambda x: model.norm(x) * sum(model.norm.running_mean.tolist())
    other = copy.deepcopy(model)
    other.forward = lambda x: other.norm(x) * sum(other.norm.running_mean.tolist())
    graph = captured(model, torch.randn(3, 2), mode=mode)
    for _ in range(2):
        x = torch.randn(3, 2)
        torch.testing.assert_close(graph(x), other(x))


def test_state_that_is_read_and_then_written_to_in_real_mode() -> None:
    model = State()
    model.forward = lambda x: (x * model.gain.item(), model.gain.data.mul_(2))[0]
    with pytest.raises(DataDependentOutputException, match="the value of the parameter 'gain' was read at"):
        make_fx(model)(torch.randn(2))
    assert model.gain == 3


@pytest.mark.parametrize("mode", ON_STAND_INS)
def test_layers_that_differ_by_such_a_value(mode: str) -> None:
    class Shift(nn.Module):
        def __init__(self, by: int) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("by", torch.tensor(by), persistent=False)

        def forward(self, x: torch.Tensor) -> Any:
            return self.linear(x.roll(int(self.by), -1) if self.by > 0 else -x)

    model = nn.Sequential(*(Shift(by) for by in (0, 1, 2, 0, 3)))
    assert_same(model, captured(model, torch.randn(2, 4), mode=mode), torch.randn(2, 4))


class Counting(nn.Module):
    """`place` is where the next row goes, and is read before it is written to, or after."""

    def __init__(self, in_place: bool, reads_first: bool) -> None:
        super().__init__()
        self.in_place, self.reads_first = in_place, reads_first
        self.register_buffer("place", torch.tensor(1), persistent=False)
        self.register_buffer("rows", torch.zeros(5, 3), persistent=False)

    def count(self) -> None:
        if self.in_place:
            self.place += 1
        else:
            self.place = self.place + 1

    def forward(self, x: torch.Tensor) -> Any:
        if not self.reads_first:
            self.count()
        place = self.place.item()
        torch._check(place >= 0)
        torch._check(place < 5)
        rows = self.rows.index_copy(0, torch.full((1,), place), x)
        if self.reads_first:
            self.count()
        return rows


@pytest.mark.parametrize("mode", ON_STAND_INS)
def test_a_buffer_that_is_written_to_before_it_is_read_is_state(mode: str) -> None:
    model = Counting(in_place=True, reads_first=False)
    graph = captured(model, torch.randn(1, 3), mode=mode)
    assert model.place == 1
    for place in (2, 3):
        x = torch.randn(1, 3)
        expected = torch.zeros(5, 3)
        expected[place] = x
        assert torch.equal(graph(x), expected)
        assert graph.place == place


@pytest.mark.parametrize(("in_place", "reads_first"), [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize("mode", ON_STAND_INS)
def test_a_buffer_that_is_read_and_then_written_to_is_refused_by_name(
    mode: str, in_place: bool, reads_first: bool
) -> None:
    model = nn.Sequential(Counting(in_place, reads_first))
    with pytest.raises(DataDependentOutputException) as error:
        captured(model, torch.randn(1, 3), mode=mode)
    text = str(error.value)
    assert text.startswith("the value of the buffer '0.place' was read at ")
    assert (
        "test_constant_values.py" in text
        and "place = self.place.item(), and the program also writes to it" in text
    )
    assert "the graph would keep the value of this run" in text
    assert "to do:   pass it as an input, or read its value before the trace" in text
    assert model[0].place == 1


def test_the_values_are_known_to_the_trace_alone() -> None:
    model = Padded(5, 2)
    with FakeTensorMode() as mode:
        x = torch.randn(2, 2, 9)
    make_fx(model, tracing_mode="fake")(x)
    assert mode.from_tensor(model.total)._determined is None


# --- outside of modules --------------------------------------------------------------------------------------------------


def split_by(grid: torch.Tensor) -> Any:
    def program(x: torch.Tensor) -> Any:
        lengths = torch.repeat_interleave(grid[:, 1] * grid[:, 2], grid[:, 0])
        ends = nn.functional.pad(lengths.cumsum(0), (1, 0))
        rows = x.split((ends[1:] - ends[:-1]).tolist())
        return [row * height for row, (_, height, _) in zip(rows, grid.tolist(), strict=True)]

    return program


GRID = torch.tensor([[1, 2, 2], [1, 3, 2]])


@pytest.mark.parametrize("mode", ON_STAND_INS)
@pytest.mark.parametrize("grid", [GRID, torch.cat([GRID, GRID], 1)[:, 3:]], ids=["whole", "view"])
def test_a_closure_over_a_grid(mode: str, grid: torch.Tensor) -> None:
    program = split_by(grid)
    graph = captured(program, torch.randn(10, 3), mode=mode, allow_non_fake_inputs=True)
    assert_same(program, graph, torch.randn(10, 3))
    if mode == "symbolic":
        assert not graph.shape_env.evaluate_guards(torch.randn(11, 3))
        assert_same(program, graph, torch.randn(10, 5))


def test_many_numbers_are_not_read() -> None:
    grid = torch.ones(5000, 3, dtype=torch.int64)
    with pytest.raises(GuardOnDataDependentSymNode):
        captured(split_by(grid), torch.randn(5000, 3), mode="fake", allow_non_fake_inputs=True)


@pytest.mark.parametrize("mode", ON_STAND_INS)
def test_tolist_of_a_real_tensor_that_has_a_stand_in(mode: str) -> None:
    model = nn.Module()
    model.register_buffer("numbers", torch.tensor([2, 3]))
    numbers = model.numbers

    def program(x: torch.Tensor) -> Any:
        return x * sum(numbers.tolist()) + model.numbers.sum()

    graph = captured(program, torch.randn(10, 3), mode=mode)
    assert targets(graph) == ["mul.Tensor", "sum.default", "add.Tensor"]
    assert_same(program, graph, torch.randn(10, 3))


WRITES: dict[str, Any] = {
    "in place": lambda number: number.add_(1),
    "of a list": lambda number: torch._foreach_add_([number], 1),
    "past autograd": lambda number: number.data.add_(1),
    "by a view": lambda number: number.view(-1)[0].add_(1),
    "by another on its memory": lambda number: number.same_memory.add_(1),
}


def make_counting(dtype: torch.dtype, write: str, reads: str) -> tuple[torch.Tensor, Any]:
    number, is_on = torch.tensor(3, dtype=dtype), torch.tensor(True)
    number.same_memory = number.detach()

    def program(x: torch.Tensor) -> Any:
        if not is_on:  # a constant
            return x
        before = number * 2
        read = number.item() if reads == "before" else None
        WRITES[write](number)
        if reads == "later":
            read = before.item()
        return x * (number.item() if read is None else read)

    return number, program


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
@pytest.mark.parametrize("mode", ON_STAND_INS)
def test_a_number_that_is_written_to_before_it_is_read_is_state(mode: str, dtype: Any, write: str) -> None:
    (number, program), (other, eager) = (make_counting(dtype, write, "after") for _ in range(2))
    graph = captured(program, torch.randn(2), mode=mode, allow_non_fake_inputs=True)
    assert number == 3
    for _ in range(3):
        x = torch.randn(2)
        assert torch.equal(graph(x), eager(x))
        assert number == other


@pytest.mark.parametrize("reads", ["before", "later"])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
@pytest.mark.parametrize("mode", ON_STAND_INS)
def test_a_number_that_is_read_and_written_to_is_refused_by_name(
    mode: str, dtype: Any, write: str, reads: str
) -> None:
    number, program = make_counting(dtype, write, reads)
    expected = r"the value of the tensor '\w+', \S+ was read at .*, and the program also writes to it"
    with pytest.raises(DataDependentOutputException, match=expected):
        captured(program, torch.randn(2), mode=mode, allow_non_fake_inputs=True)
    assert number == 3


@pytest.mark.parametrize("mode", ["real", *ON_STAND_INS])
def test_a_number_of_the_program_is_a_constant_as_in_torch(mode: str) -> None:
    """Also where real tensors are not converted (`_allow_non_fake_inputs=False`): torch's graphs have the number."""
    scale, exponent = torch.tensor(2.5), torch.tensor(3)

    def program(x: torch.Tensor) -> torch.Tensor:
        return (x * scale.item()) ** int(exponent) if bool(exponent) else x

    graphs = [make(program, tracing_mode=mode)(torch.randn(4)) for make in (make_fx, torch_make_fx)]
    assert [node.args[1:] for node in graphs[0].graph.nodes] == [
        node.args[1:] for node in graphs[1].graph.nodes
    ]
    assert targets(graphs[0]) == targets(graphs[1])


def test_a_number_that_is_read_and_written_to_in_real_mode() -> None:
    number, other = torch.tensor(3.0), torch.tensor(1.0)

    def program(x: torch.Tensor, writes: bool) -> torch.Tensor:
        y = x * number.item()
        return y.add_(number) if not writes else y + number.view(1).add_(other)

    graph = make_fx(lambda x: program(x, False))(torch.ones(2))
    assert torch.equal(graph(torch.ones(2)), torch.full((2,), 6.0))
    expected = r"the value of a tensor \(1,\) was read at .*, and the program also writes to it"
    with pytest.raises(DataDependentOutputException, match=expected):
        make_fx(lambda x: program(x, True))(torch.ones(2))
    assert number == 3


@pytest.mark.parametrize("mode", ON_STAND_INS)
def test_an_optimizer_that_has_made_steps(mode: str) -> None:
    def training() -> tuple[nn.Linear, Any]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        step(torch.ones(1, 3))
        optimizer.zero_grad()
        return model, step

    (model, step), (other, eager) = training(), training()
    graph = captured(step, torch.randn(4, 3), mode=mode, allow_non_fake_inputs=True)
    for _ in range(3):
        x = torch.randn(4, 3)
        with torch.no_grad():
            loss = graph(x)
        assert torch.equal(loss, eager(x)) and torch.equal(model.weight, other.weight)


def test_constants_of_a_mode_of_the_user_are_known_to_each_trace() -> None:
    number = torch.tensor(2)
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.randn(3)
    for _ in range(2):
        graph = make_fx(lambda x: x * number.item(), tracing_mode="fake", _allow_non_fake_inputs=True)(x)
        assert targets(graph) == ["mul.Tensor"]


def test_a_real_tensor_of_the_program_that_is_read_and_written_to_is_refused_by_name() -> None:
    def program(x: torch.Tensor) -> Any:
        with unset_fake_temporarily():
            counts = torch.tensor([1, 2, 3])
        if counts.sum().item() == 6:
            counts.add_(1)
        return x + counts

    with pytest.raises(
        DataDependentOutputException, match=r"the value of the tensor 'counts', i64\[3\]@cpu was read"
    ):
        captured(program, torch.randn(3), mode="fake", allow_non_fake_inputs=True)


def test_traces_that_overlap_leave_nothing_in_the_mode_of_the_user() -> None:
    """Two threads may trace with one mode; the first that begins may be the first that ends."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    first, second = (ConstantValues(mode, PythonKeyTracer().constants) for _ in range(2))
    first.forget()
    second.forget()
    assert not mode.constant_listeners


def test_propagation_knows_the_constants_of_a_graph() -> None:
    def program(x: torch.Tensor) -> Any:
        return x[torch.repeat_interleave(GRID[0])]

    graph = captured(program, torch.randn(10, 3), mode="fake", allow_non_fake_inputs=True)
    for node in graph.graph.nodes:
        node.meta.clear()
    assert FakeTensorProp(graph).propagate(torch.randn(10, 3)).shape == (5, 3)
