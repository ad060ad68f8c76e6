"""Real tensors and modules that a traced program reaches on ways of their own: right graphs, and nothing left behind."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from understudy import FakeTensor, FakeTensorMode, make_fx

Program = Callable[[torch.Tensor], Any]
GLOBAL_NET = nn.Linear(3, 2)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def grad_of_a_list(model: nn.Module) -> Program:
    parameters = list(model.parameters())
    return lambda x: torch.autograd.grad(model(x).sum(), parameters)


def grads_read_off_a_list(model: nn.Module) -> Program:
    parameters = list(model.parameters())

    def program(x: torch.Tensor) -> Any:
        model(x).sum().backward()
        return [parameter.grad for parameter in parameters]

    return program


def backward_to_a_list(model: nn.Module) -> Program:
    parameters = list(model.parameters())[:2]

    def program(x: torch.Tensor) -> Any:
        model(x).sum().backward(inputs=parameters)
        return [parameter.grad for parameter in parameters]

    return program


def step_by_hand(model: nn.Module) -> Program:
    parameters = list(model.parameters())

    def program(x: torch.Tensor) -> Any:
        gradients = torch.autograd.grad(model(x).sum(), parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.sub_(0.1 * gradient)
        return [parameter * 1 for parameter in parameters]

    return program


class Trainer:
    def __init__(self, model: nn.Module, kind: Any = torch.optim.Adam) -> None:
        self.model = model
        self.optimizer = kind(model.parameters(), lr=0.1)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.model(x).sum()
        loss.backward()
        self.optimizer.step()
        return loss


class Deep:
    def __init__(self, model: nn.Module) -> None:
        self.models = {"inner": [model]}

    def gradients(self, x: torch.Tensor) -> Any:
        model = self.models["inner"][0]
        model(x).sum().backward()
        return [parameter.grad for parameter in model.parameters()]


PROGRAMS = [
    grad_of_a_list, grads_read_off_a_list, backward_to_a_list, step_by_hand, Trainer,
    lambda model: Trainer(model, torch.optim.SGD), lambda model: Trainer(model).__call__,
    lambda model: Deep(model).gradients,
]  # fmt: skip


def tensors_of(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("make", PROGRAMS, ids=range(len(PROGRAMS)))
def test_the_graph_does_what_the_program_does(make: Any, mode: str) -> None:
    x = torch.randn(5, 3)
    traced, run = net(), net()
    gm = make_fx(make(traced), tracing_mode=mode)(x)
    for mine, other in zip(traced.parameters(), run.parameters(), strict=True):
        assert type(mine) is nn.Parameter
        assert mine.grad is None
        assert torch.equal(mine, other)
    expected = tensors_of(make(run)(x))
    with torch.no_grad():
        found = tensors_of(gm(x))
    assert len(found) == len(expected)
    for pair in zip([*found, *traced.parameters()], [*expected, *run.parameters()], strict=True):
        torch.testing.assert_close(*pair)


def test_an_optimizer_has_the_state_that_it_had() -> None:
    trainer = Trainer(net())
    make_fx(trainer, tracing_mode="fake")(torch.randn(5, 3))
    assert not trainer.optimizer.state
    trainer(torch.randn(5, 3))
    before = {id(entry) for entries in trainer.optimizer.state.values() for entry in entries.values()}
    make_fx(trainer, tracing_mode="fake", _allow_non_fake_inputs=True)(torch.randn(5, 3))
    after = {id(entry) for entries in trainer.optimizer.state.values() for entry in entries.values()}
    assert before == after
    assert trainer.optimizer.param_groups[0]["lr"] == 0.1


def test_an_optimizer_has_the_groups_that_it_had() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def train(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], "lr": 0.3})
        optimizer.load_state_dict(optimizer.state_dict())
        return loss

    state, (group,) = optimizer.state, optimizer.param_groups
    make_fx(train, tracing_mode="fake")(torch.randn(5, 3))
    assert optimizer.state is state and not state
    assert optimizer.param_groups[0] is group and len(optimizer.param_groups) == 1


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_a_later_step_of_an_optimizer_counts_on(mode: str) -> None:
    x = torch.randn(5, 3)
    traced, run = Trainer(net()), Trainer(net())
    for trainer in (traced, run):
        trainer(x)
    gm = make_fx(traced, tracing_mode=mode, _allow_non_fake_inputs=True)(x)
    run(x)
    with torch.no_grad():
        gm(x)
    for pair in zip(traced.model.parameters(), run.model.parameters(), strict=True):
        torch.testing.assert_close(*pair)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * 2


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("through", [torch.mul, lambda w, _: Twice.apply(w)], ids=["operator", "function"])
def test_gradients_of_a_tensor_in_a_closure(through: Any, mode: str) -> None:
    w = torch.randn(3, 2, requires_grad=True)

    def asked(x: torch.Tensor) -> Any:
        return torch.autograd.grad((x @ through(w, 2)).sum(), w)[0]

    def left(x: torch.Tensor) -> Any:
        (x @ through(w, 2)).sum().backward()
        return w.grad

    x = torch.randn(5, 3)
    for program in (asked, left):
        gm = make_fx(program, tracing_mode=mode, _allow_non_fake_inputs=True)(x)
        assert w.grad is None
        torch.testing.assert_close(gm(x), program(x))
        w.grad = None


def test_sizes_of_a_constant_stay_numbers() -> None:
    weight = torch.randn(3, 7)

    def program(x: torch.Tensor) -> torch.Tensor:
        return (x @ weight).view(-1) + weight.expand(2, -1, -1).sum() * (weight * 1).shape[1]

    gm = make_fx(program, tracing_mode="symbolic", _allow_non_fake_inputs=True)(torch.randn(5, 3))
    x = torch.randn(4, 3)
    assert torch.equal(gm(x), program(x))


def test_what_was_written_to_a_real_tensor_is_read_afterwards() -> None:
    count = torch.tensor(1.0)

    def program(x: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        return x * count.item()

    gm = make_fx(program, tracing_mode="fake", _allow_non_fake_inputs=True)(torch.randn(3))
    assert count.item() == 1
    x = torch.randn(3)
    assert torch.equal(gm(x), x * 2)
    count.fill_(1)
    with FakeTensorMode(allow_non_fake_inputs=True):
        count.add_(1)
        assert count.item() == 2


class Keeps(nn.Module):
    """Its forward leaves a tensor behind."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)
        self.last: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = self.inner(x)
        return self.last * 2


def through_a_helper(x: torch.Tensor) -> torch.Tensor:
    return helper(x)


def helper(x: torch.Tensor) -> torch.Tensor:
    return GLOBAL_NET(x)


def test_modules_are_found_where_programs_keep_them() -> None:
    x = torch.randn(5, 3)
    assert torch.equal(make_fx(through_a_helper, tracing_mode="fake")(x)(x), GLOBAL_NET(x))
    kept = Keeps()
    holder = Deep(kept)
    gm = make_fx(lambda x: holder.models["inner"][0](x), tracing_mode="fake")(x)
    assert kept.last is None
    assert torch.equal(gm(x), kept(x))
    assert not isinstance(kept.last, FakeTensor)


class Slotted:
    __slots__ = ("model",)

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, x: torch.Tensor) -> Any:
        return self.model(x)


GLOBAL_FORWARD = GLOBAL_NET.forward


@functools.lru_cache
def the_model() -> nn.Module:
    return GLOBAL_NET


def in_a_function_of_its_own(x: torch.Tensor) -> Any:
    def called(y: torch.Tensor) -> Any:
        return GLOBAL_NET(y)

    return called(x)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: torch.stack([GLOBAL_NET(row) for row in x.unbind(0)]),
        in_a_function_of_its_own,
        lambda x: GLOBAL_FORWARD(x),
        lambda x: the_model()(x),
        Slotted(GLOBAL_NET),
    ],
)
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_modules_are_found_further_inside(f: Any, mode: str) -> None:
    x = torch.randn(5, 3)
    assert torch.equal(make_fx(f, tracing_mode=mode)(x)(x), f(x))


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_wrappers_of_transforms_are_left_alone(mode: str) -> None:
    weight = torch.randn(3)

    def program(x: torch.Tensor) -> Any:
        return torch.func.vmap(torch.func.grad(lambda w, row: (w * row).sin().sum()), (None, 0))(weight, x)

    x = torch.randn(5, 3)
    gm = make_fx(program, tracing_mode=mode, _allow_non_fake_inputs=True)(x)
    torch.testing.assert_close(gm(x), program(x))


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_copies_inside_of_a_trace(mode: str) -> None:
    model = net()

    def program(x: torch.Tensor) -> Any:
        twin, y = copy.deepcopy(model), copy.deepcopy(x)
        with torch.no_grad():
            twin[0].weight.mul_(2)
        return twin(y.add_(1)), model(x)

    x = torch.randn(5, 3)
    gm = make_fx(program, tracing_mode=mode)(x)
    with torch.no_grad():
        for pair in zip(gm(x), program(x), strict=True):
            torch.testing.assert_close(*pair)


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.counted = nn.Linear(4, 4), nn.LayerNorm(4), nn.BatchNorm1d(4)
        self.register_buffer("table", torch.arange(12.0).view(3, 4)[1:])
        self.part = nn.Parameter(torch.linspace(0, 1, 8).view(2, 4).t()[::2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.counted(self.norm(self.first(x))).relu() * self.table[0] + (self.part.sum() * x).sin()


@functools.cache
def hidden_model() -> nn.Module:
    """No module that `make_fx` finds: its parameters become stand-ins when they are used, below a transform."""
    torch.manual_seed(0)
    return Norms()


def call_hidden_model(x: torch.Tensor) -> Any:
    return hidden_model()(x)


def total(x: torch.Tensor) -> Any:
    return hidden_model()(x).pow(2).sum()


func = torch.func
AROUND_HIDDEN_MODEL: dict[str, Callable[[torch.Tensor], Any]] = {
    "grad": func.grad(total),
    "grad of grad": func.grad(lambda x: func.grad(total)(x).sum()),
    "vjp": lambda x: func.vjp(call_hidden_model, x)[1](torch.ones_like(x)),
    "jvp": lambda x: func.jvp(call_hidden_model, (x,), (torch.ones_like(x),)),
    "vmap": lambda x: torch.vmap(call_hidden_model)(torch.stack([x, 2 * x])),
    "vmap of grad": lambda x: torch.vmap(func.grad(total))(torch.stack([x, 2 * x])),
    "jacrev": func.jacrev(call_hidden_model),
    "jacfwd": func.jacfwd(call_hidden_model),
    "hessian": func.hessian(total),
    "functionalize": func.functionalize(call_hidden_model),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("name", AROUND_HIDDEN_MODEL)
def test_tensors_that_a_transformed_function_finds_by_itself(name: str, mode: str) -> None:
    hidden_model().eval()
    program, x = AROUND_HIDDEN_MODEL[name], torch.randn(3, 4)
    graph: Any = make_fx(program, tracing_mode=mode, allow_non_fake_inputs=True)(x)
    torch.testing.assert_close(graph(x), program(x))


@pytest.mark.parametrize("name", ["grad", "vjp", "jvp", "vmap", "jacrev", "jacfwd"])
def test_a_write_that_a_transform_refuses(name: str) -> None:
    hidden_model().train()
    program, x = AROUND_HIDDEN_MODEL[name], torch.randn(3, 4)
    with pytest.raises(RuntimeError) as real:
        program(x)
    with pytest.raises(RuntimeError) as ours:
        make_fx(program, tracing_mode="fake", allow_non_fake_inputs=True)(x)
    assert str(ours.value).startswith(str(real.value)[:100])


@pytest.mark.parametrize("transform", [func.grad, func.jacrev, func.jacfwd, lambda f: torch.vmap(f)])
def test_conversion_is_not_part_of_what_is_transformed(transform: Any) -> None:
    mode = FakeTensorMode()
    leaf = torch.randn(4, 3, requires_grad=True)
    reals = [
        leaf,
        nn.Parameter(torch.randn(3)),
        leaf[1:],
        (leaf * 2)[::2],
        torch.randn(4).expand(2, 4),
        torch.randn(3, 2).t(),
    ]

    def program(x: torch.Tensor) -> torch.Tensor:
        for real in reals:
            fake = mode.from_tensor(real)
            assert type(fake) is FakeTensor
            assert (fake.requires_grad, fake.is_leaf, fake._is_view()) == (
                real.requires_grad,
                real.is_leaf,
                real._is_view(),
            )
        return (x * x).sum()

    assert type(transform(program)(mode.from_tensor(torch.randn(3)))) is FakeTensor


def make_layer(x: torch.Tensor) -> Any:
    return nn.Linear(4, 4)(x)


def make_parameter(x: torch.Tensor) -> Any:
    parameter = nn.Parameter(torch.full((4,), 2.0))
    with torch.no_grad():
        parameter.mul_(3)
    return (x * parameter).sin()


MAKING: dict[str, Callable[[Any], Callable[[torch.Tensor], Any]]] = {
    "grad": lambda f: func.grad(lambda x: f(x).sum()),
    "vjp": lambda f: lambda x: func.vjp(f, x)[1](torch.ones_like(x)),
    "jvp": lambda f: lambda x: func.jvp(f, (x,), (torch.ones_like(x),)),
    "jacrev": func.jacrev,
    "jacfwd": lambda f: func.jacfwd(f, randomness="same"),
    "functionalize": func.functionalize,
    "grad of grad": lambda f: func.grad(lambda x: func.grad(lambda y: f(y).pow(2).sum())(x).sum()),
}


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("make", [make_layer, make_parameter])
@pytest.mark.parametrize("name", MAKING)
def test_parameters_that_a_transformed_function_makes(name: str, make: Any, mode: str) -> None:
    program, x = MAKING[name](make), torch.randn(3, 4)
    graph: Any = make_fx(program, tracing_mode=mode)(x)
    for _ in range(2):
        torch.manual_seed(0)
        wanted = program(x)
        torch.manual_seed(0)
        torch.testing.assert_close(graph(x), wanted)
