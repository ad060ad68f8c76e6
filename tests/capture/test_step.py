"""capture_step: the graph of a training step trains as the program does, bit for bit, and capturing touches nothing."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from understudy import FakeTensor, FakeTensorMode, ShapeEnv, capture_step
from understudy.capture.optimizer_steps import LEAST_LAZY_BYTES, lazy_zeros

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "Adam": {"amsgrad": True},
    "SGD": {"momentum": 0.9, "nesterov": True},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "Adagrad": {},
    "Adamax": {},
    "NAdam": {},
    "Adadelta": {},
    "Rprop": {},
}


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 3)
    )


def batch(seed: int, size: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 4, generator=generator), torch.randint(0, 3, (size,), generator=generator)


def eager_step(model: Any, optimizer: Any, x: Any, y: Any) -> torch.Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def same_state(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("tracing_mode", ["fake", "symbolic"])
def test_graph_trains_as_the_program_does(name: str, tracing_mode: str) -> None:
    model, make = make_model(), getattr(torch.optim, name)
    reference = copy.deepcopy(model)
    optimizer = make(model.parameters(), lr=0.01, **OPTIMIZERS[name])
    eager = make(reference.parameters(), lr=0.01, **OPTIMIZERS[name])
    step = capture_step(model, F.cross_entropy, optimizer, *batch(0), tracing_mode=tracing_mode)
    for seed in range(1, 5):
        size = 5 if tracing_mode == "fake" else 4 + seed
        x, y = batch(seed, size)
        assert torch.equal(step(x, y), eager_step(reference, eager, x, y))
        assert same_state(model, reference)


SCHEDULED = {
    "SGD": {"momentum": 0.9, "weight_decay": 0.1},
    "SGD, fused": {"fused": True},
    "Adam": {},
    "AdamW": {"foreach": True},
    "AdamW, fused": {"fused": True},
    "RMSprop": {},
    "NAdam": {},
}


@pytest.mark.parametrize("name", SCHEDULED)
def test_a_learning_rate_that_varies(name: str) -> None:
    model, make = make_model(), getattr(torch.optim, name.partition(",")[0])
    reference = copy.deepcopy(model)
    optimizer = make(model.parameters(), lr=0.01, **SCHEDULED[name])
    eager = make(reference.parameters(), lr=0.01, **SCHEDULED[name])
    step = capture_step(model, F.cross_entropy, optimizer, *batch(0), varying=["lr"])
    for seed in range(1, 5):
        eager.param_groups[0]["lr"] = 0.01 / seed
        step.get_buffer("optimizer_state.group_0.lr").fill_(0.01 / seed)
        assert torch.equal(step(*batch(seed)), eager_step(reference, eager, *batch(seed)))
        assert same_state(model, reference)


def test_a_learning_rate_among_the_inputs() -> None:
    model = make_model()
    groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[3].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.01)
    step = capture_step(model, F.cross_entropy, optimizer, *batch(0), varying=["lr"], parameters="inputs")
    state = step.example_state
    assert [float(state[f"group_{group}.lr"]) for group in (0, 1)] == [0.5, 0.01]
    parameters = {name: value.clone() for name, value in step.example_parameters.items()}
    before = {name: value.clone() for name, value in parameters.items()}
    step(parameters, {**state, "group_0.lr": torch.tensor(0.0, dtype=torch.float64)}, *batch(0))
    changed = [
        name for name, _ in model.named_parameters() if not torch.equal(parameters[name], before[name])
    ]
    assert changed == ["3.weight", "3.bias"]


def test_what_can_vary_is_said() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pytest.raises(
        ValueError, match=r"varying: expected a numeric option of SGD, got 'rate'; choose from .*lr"
    ):
        capture_step(model, F.cross_entropy, optimizer, *batch(0), varying=["rate"])
    with pytest.raises(ValueError, match=r"SGD branches on a number \(one of momentum"):
        capture_step(model, F.cross_entropy, optimizer, *batch(0), varying=["momentum"])


def test_goes_on_with_the_state_that_the_optimizer_has() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, dampening=0.5)
    with pytest.raises(ValueError, match="take one step with the optimizer, then capture"):
        capture_step(model, F.cross_entropy, optimizer, *batch(0))
    eager_step(model, optimizer, *batch(0))
    reference = copy.deepcopy(model)
    eager = torch.optim.SGD(reference.parameters(), lr=0.01, momentum=0.9, dampening=0.5)
    eager.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step = capture_step(model, F.cross_entropy, optimizer, *batch(0))
    for seed in (1, 2):
        assert torch.equal(step(*batch(seed)), eager_step(reference, eager, *batch(seed)))
        assert same_state(model, reference)


def test_capturing_touches_neither_model_nor_optimizer() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    parameters = dict(model.named_parameters())
    values = {name: value.clone() for name, value in model.state_dict().items()}
    capture_step(model, F.cross_entropy, optimizer, *batch(0))
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in parameters.values())
    assert not optimizer.state
    assert all(p is q for p, q in zip(optimizer.param_groups[0]["params"], parameters.values(), strict=True))


def test_an_error_in_the_loss_leaves_nothing_behind() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())

    def broken(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("broken loss")

    with pytest.raises(RuntimeError, match="broken loss"):
        capture_step(model, broken, optimizer, *batch(0))
    assert not any(type(p) is FakeTensor for p in model.parameters())
    assert not optimizer.state


def test_parameters_as_inputs() -> None:
    model = make_model()
    reference = copy.deepcopy(model)
    eager = torch.optim.AdamW(reference.parameters())
    step = capture_step(
        model, F.cross_entropy, torch.optim.AdamW(model.parameters()), *batch(0), parameters="inputs"
    )
    assert not list(step.parameters())
    parameters = {name: value.clone() for name, value in step.example_parameters.items()}
    state = {name: value.clone() for name, value in step.example_state.items()}
    for seed in (1, 2, 3):
        assert torch.equal(step(parameters, state, *batch(seed)), eager_step(reference, eager, *batch(seed)))
    after = reference.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in parameters.items())
    assert same_state(model, make_model()), "the model's own parameters are no inputs of this graph"


def test_which_inputs_are_targets() -> None:
    model = make_model()
    x, y = batch(0)

    def optimizer() -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.0)

    expected = F.cross_entropy(model(x), y).detach()
    assert torch.equal(capture_step(model, torch.nn.CrossEntropyLoss(), optimizer(), x, y)(x, y), expected)
    given = capture_step(model, lambda out, *rest: F.cross_entropy(out, *rest), optimizer(), x, y, targets=1)
    assert torch.equal(given(x, y), expected)
    whole = capture_step(model, lambda model, x, y: F.cross_entropy(model(x), y), optimizer(), x, y)
    assert torch.equal(whole(x, y), expected)
    assert torch.equal(capture_step(model, lambda out: out.sum(), optimizer(), x)(x), model(x).sum().detach())


def test_optimizers_that_decide_by_the_step_counter() -> None:
    model = make_model()
    with pytest.raises(ValueError, match=r"RAdam branches on the value of its step counter.*fixed_step=True"):
        capture_step(model, F.cross_entropy, torch.optim.RAdam(model.parameters()), *batch(0))
    reference = copy.deepcopy(model)
    step = capture_step(
        model, F.cross_entropy, torch.optim.RAdam(model.parameters()), *batch(0), fixed_step=True
    )
    eager = torch.optim.RAdam(reference.parameters())
    assert torch.equal(step(*batch(1)), eager_step(reference, eager, *batch(1)))
    assert same_state(model, reference)
    with pytest.raises(ValueError, match="LBFGS evaluates the loss a data-dependent number of times"):
        capture_step(model, F.cross_entropy, torch.optim.LBFGS(model.parameters()), *batch(0))


def test_wrong_keywords_name_the_right_ones() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ValueError, match="'real', 'fake', 'symbolic'"):
        capture_step(model, F.cross_entropy, optimizer, *batch(0), tracing_mode="fast")
    with pytest.raises(ValueError, match='must be "attributes" or "inputs"'):
        capture_step(model, F.cross_entropy, optimizer, *batch(0), parameters="both")
    with pytest.raises(ValueError, match="parameters that are not the model's"):
        capture_step(model, F.cross_entropy, torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), *batch(0))
    with pytest.raises(ValueError, match="Adafactor branches on the values of parameters and gradients"):
        capture_step(
            model, F.cross_entropy, torch.optim.Adafactor(model.parameters()), *batch(0), fixed_step=True
        )


def test_state_that_a_fused_kernel_makes_in_its_first_step() -> None:
    model = make_model()
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    eager = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9, fused=True)
    step = capture_step(model, F.cross_entropy, optimizer, *batch(0))
    for seed in range(3):
        assert torch.equal(step(*batch(seed)), eager_step(reference, eager, *batch(seed)))
    assert same_state(model, reference)


@pytest.mark.parametrize("parameters", ["attributes", "inputs"])
def test_options_that_are_tensors_are_read_at_each_step(parameters: str) -> None:
    model = make_model()
    reference = copy.deepcopy(model)
    options = [
        {"lr": torch.tensor(0.1), "betas": (torch.tensor(0.9), torch.tensor(0.99)), "foreach": False}
        for _ in range(2)
    ]
    optimizer = torch.optim.Adam(model.parameters(), **options[0])
    eager = torch.optim.Adam(reference.parameters(), **options[1])
    step = capture_step(model, F.cross_entropy, optimizer, *batch(0), parameters=parameters)
    if parameters == "inputs":
        assert set(step.example_state) >= {"group_0.lr", "group_0.betas_1", "group_0.betas_2"}
        return
    for seed in range(3):
        assert torch.equal(step(*batch(seed)), eager_step(reference, eager, *batch(seed)))
        options[0]["lr"].mul_(0.5)
        options[1]["lr"].mul_(0.5)
    assert same_state(model, reference)


def count_calls(count: int) -> int:
    """How many Python functions are called to capture a step of so many layers."""
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(count)))
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.randn(2, 2)
    calls = 0

    def count_one(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count_one)
    try:
        capture_step(model, lambda y: y.sum(), optimizer, x)
    finally:
        sys.setprofile(before)
    return calls


def test_the_work_grows_with_the_parameters_and_not_faster() -> None:
    count_calls(2)
    few, many = count_calls(20), count_calls(40)
    assert many < 2.3 * few


# --- optimizers that people write --------------------------------------------------------------------------------------


class Momentum(torch.optim.Optimizer):
    """Keeps one tensor for each parameter, which `update` changes."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.update(parameter, self.state[parameter], group)

    def update(self, parameter: Any, state: Any, group: Any) -> None:
        state.setdefault("average", torch.zeros_like(parameter)).mul_(0.9).add_(parameter.grad)
        parameter.sub_(0.1 * state["average"])


class Replacing(Momentum):
    def update(self, parameter: Any, state: Any, group: Any) -> None:
        if not state:
            state.update(average=torch.full_like(parameter, 0.5))
        state["average"] = 0.9 * state["average"] + parameter.grad
        parameter.sub_(0.1 * state["average"])


class InAVariable(Momentum):
    def update(self, parameter: Any, state: Any, group: Any) -> None:
        if not state:
            average = torch.empty_like(parameter).fill_(0.25)
            self.state[parameter] = {"average": average}
        else:
            average = state["average"]
        average.mul_(0.9).add_(parameter.grad)
        parameter.sub_(0.1 * average)


class Counting(Momentum):
    def update(self, parameter: Any, state: Any, group: Any) -> None:
        state["count"] = state.get("count", 0) + 1
        parameter.sub_(parameter.grad / state["count"])


class CountingInAnAttribute(Momentum):
    count = 0

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.count = 0

    def update(self, parameter: Any, state: Any, group: Any) -> None:
        self.count += 1
        parameter.sub_(parameter.grad / self.count)


class CountingInTheGroup(Momentum):
    def update(self, parameter: Any, state: Any, group: Any) -> None:
        group["lr"] = group["lr"] * 0.5
        parameter.sub_(parameter.grad * group["lr"])


class FirstStepDiffers(Momentum):
    def update(self, parameter: Any, state: Any, group: Any) -> None:
        if not state:
            state["average"] = torch.zeros_like(parameter)
        else:
            parameter.add_(1)
        state["average"].add_(parameter.grad)
        parameter.sub_(state["average"])


@pytest.mark.parametrize("kind", [Momentum, Replacing, InAVariable])
@pytest.mark.parametrize("steps_before", [0, 1])
def test_optimizers_written_by_hand_train_as_in_eager(kind: Any, steps_before: int) -> None:
    model = make_model()
    reference = copy.deepcopy(model)
    optimizer, eager = kind(model.parameters()), kind(reference.parameters())
    for seed in range(steps_before):
        eager_step(model, optimizer, *batch(seed))
        eager_step(reference, eager, *batch(seed))
    step = capture_step(model, F.cross_entropy, optimizer, *batch(0))
    for seed in range(1, 5):
        assert torch.equal(step(*batch(seed)), eager_step(reference, eager, *batch(seed)))
        assert same_state(model, reference)


@pytest.mark.parametrize("kind, what", [
    (Counting, "the entry 'count' of its state"), (CountingInAnAttribute, "the attribute 'count'"),
    (CountingInTheGroup, "the option 'lr' of group 0"),
])  # fmt: skip
def test_a_number_that_changes_at_each_step_is_refused(kind: Any, what: str) -> None:
    model = make_model()
    with pytest.raises(ValueError, match=f"{kind.__name__} changes {what}, a plain number, at each step"):
        capture_step(model, F.cross_entropy, kind(model.parameters()), *batch(0))
    assert capture_step(
        model, F.cross_entropy, kind(model.parameters()), *batch(0), fixed_step=True
    ).graph.nodes


def test_a_first_step_that_computes_something_else_is_refused() -> None:
    model = make_model()
    optimizer = FirstStepDiffers(model.parameters())
    with pytest.raises(
        ValueError,
        match=r"the first step of FirstStepDiffers differs from later steps \(it runs other operators",
    ):
        capture_step(model, F.cross_entropy, optimizer, *batch(0))
    reference = copy.deepcopy(model)
    eager = FirstStepDiffers(reference.parameters())
    eager_step(model, optimizer, *batch(0))
    eager_step(reference, eager, *batch(0))
    step = capture_step(model, F.cross_entropy, optimizer, *batch(0))  # as the message says
    for seed in range(1, 4):
        assert torch.equal(step(*batch(seed)), eager_step(reference, eager, *batch(seed)))


# --- several parameters of one shape ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*OPTIMIZERS, "Muon"])
@pytest.mark.parametrize("steps_before", [0, 1])
def test_each_parameter_has_its_own_state(name: str, steps_before: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(4)], torch.nn.Linear(4, 3))
    reference = copy.deepcopy(model)

    def make(model: torch.nn.Module) -> Any:
        parameters = [p for p in model.parameters() if p.ndim == 2] if name == "Muon" else model.parameters()
        return getattr(torch.optim, name)(parameters, **OPTIMIZERS.get(name, {}))

    optimizer, eager = make(model), make(reference)
    for seed in range(steps_before):
        eager_step(model, optimizer, *batch(seed))
        eager_step(reference, eager, *batch(seed))
    step = capture_step(model, F.cross_entropy, optimizer, *batch(0))
    counters = [node for node in step.graph.nodes if "unbacked_bindings" in node.meta]
    assert len({str(node.meta["val"]) for node in counters}) == len(counters)
    assert all(len(node.meta["unbacked_bindings"]) == 1 for node in counters)
    for seed in range(3):
        assert torch.equal(step(*batch(seed)), eager_step(reference, eager, *batch(seed)))
        assert same_state(model, reference)


def test_views_and_storages_of_written_parameters() -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(3)])
    step = capture_step(
        model, F.mse_loss, torch.optim.AdamW(model.parameters()), torch.randn(2, 4), torch.randn(2, 4)
    )
    writes = step.graph.find_nodes(op="call_function", target=torch.ops.aten.addcdiv_.default)
    storages = [node.meta["val"].untyped_storage()._cdata for node in writes]
    assert len(set(storages)) == len(writes) == 6
    for node in writes:
        origin = node
        while origin.op != "get_attr":
            origin = origin.args[0]
        assert origin.meta["val"].untyped_storage()._cdata == node.meta["val"].untyped_storage()._cdata
    numbers = [int(node.meta["torch_fn"][0].rpartition("_")[2]) for node in writes]
    assert numbers == list(range(1, 7))


def test_hooks_of_an_optimizer_are_called_once() -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(3)])
    optimizer = torch.optim.AdamW(model.parameters())
    calls = []
    optimizer.register_step_post_hook(lambda *arguments: calls.append(arguments[0]))
    capture_step(model, F.mse_loss, optimizer, torch.randn(2, 4), torch.randn(2, 4))
    assert len(calls) == 1


def test_a_model_of_stand_ins_has_state_of_stand_ins() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        model = torch.nn.Sequential(torch.nn.Linear(60_000, 60_000), torch.nn.Linear(60_000, 60_000))
        x = torch.randn(2, 60_000)
    step = capture_step(model, F.mse_loss, torch.optim.AdamW(model.parameters()), x, x)
    assert all(type(buffer) is FakeTensor for buffer in step.buffers())
    with mode:
        assert step(x, x).shape == ()


def test_large_state_is_zero_and_takes_memory_when_it_is_written_to() -> None:
    weight = torch.empty_strided((512, 1024), (1, 512))  # 2 MiB, in column order
    model = torch.nn.ParameterList([torch.nn.Parameter(weight.fill_(0.5))])
    step = capture_step(model, lambda model: model[0].sum(), torch.optim.AdamW(model.parameters()))
    average = step.get_buffer("optimizer_state.0.exp_avg")
    assert (average.shape, average.stride(), average.dtype) == (weight.shape, weight.stride(), weight.dtype)
    assert not average.any() and not average._is_view()
    step()
    assert average.allclose(torch.tensor(0.1))


def test_no_assertions_about_step_counters_are_left_to_the_graph() -> None:
    """The counters of torch's optimizers only grow: `1 - beta ** step` is not negative."""
    model = make_model()
    step = capture_step(model, F.cross_entropy, torch.optim.AdamW(model.parameters()), *batch(0))
    assert not step.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_scalar.default)


# --- around the optimizer ------------------------------------------------------------------------------------------------------


def test_an_optimizer_with_a_scheduler() -> None:
    """Schedulers replace the method `step` of the object, by one that takes the step of the original."""
    model = make_model()
    reference = copy.deepcopy(model)
    optimizer, eager = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(reference.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    step = capture_step(model, F.cross_entropy, optimizer, *batch(0))
    for seed in range(1, 4):
        assert torch.equal(step(*batch(seed)), eager_step(reference, eager, *batch(seed)))
        assert same_state(model, reference)
    assert not optimizer.state and scheduler.get_last_lr() == [1e-3]


def test_a_step_that_was_replaced_is_refused() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign, assignment]
    with pytest.raises(ValueError, match=r"expected the step method of AdamW, got .* assigned to the object"):
        capture_step(model, F.cross_entropy, optimizer, *batch(0))


@pytest.mark.parametrize(
    "shape", [(1, LEAST_LAZY_BYTES), (LEAST_LAZY_BYTES, 1, 1), (3, LEAST_LAZY_BYTES), (0, 7), (2, 3)]
)
def test_large_zeros_are_zeros(shape: tuple[int, ...]) -> None:
    for dtype in (torch.int8, torch.float16):
        zeros = lazy_zeros(torch.empty(shape, dtype=dtype))
        assert (zeros.shape, zeros.dtype, zeros.is_contiguous()) == (shape, dtype, True)
        assert not zeros.any()
        assert torch.equal(zeros.add_(1), torch.ones(shape, dtype=dtype))
