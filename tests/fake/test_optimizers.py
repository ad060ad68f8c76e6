"""Optimizers, schedulers and the clipping of gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import swa_utils
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fake.sides import assert_like_eager, on_each_device, run_fake, with_index
from understudy import DataDependentOutputException, FakeTensorMode

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "ASGD": lambda p, **o: torch.optim.ASGD(p, **o),
    "Adadelta": lambda p, **o: torch.optim.Adadelta(p, weight_decay=0.1, **o),
    "Adagrad": lambda p, **o: torch.optim.Adagrad(p, lr_decay=0.1, **o),
    "Adam": lambda p, **o: torch.optim.Adam(p, **o),
    "Adam, amsgrad": lambda p, **o: torch.optim.Adam(p, amsgrad=True, weight_decay=0.1, maximize=True, **o),
    "AdamW": lambda p, **o: torch.optim.AdamW(p, **o),
    "Adamax": lambda p, **o: torch.optim.Adamax(p, **o),
    "NAdam": lambda p, **o: torch.optim.NAdam(p, decoupled_weight_decay=True, **o),
    "RAdam": lambda p, **o: torch.optim.RAdam(p, **o),
    "RMSprop": lambda p, **o: torch.optim.RMSprop(p, momentum=0.9, centered=True, **o),
    "Rprop": lambda p, **o: torch.optim.Rprop(p, **o),
    "SGD": lambda p, **o: torch.optim.SGD(p, lr=0.1, **o),
    "SGD, momentum": lambda p, **o: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, **o
    ),
}
FUSED = ("Adagrad", "Adam", "Adam, amsgrad", "AdamW", "SGD", "SGD, momentum")
WAYS = ("single", "foreach", "fused")


class Stream(TorchDispatchMode):
    """The operators that were called, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def training(
    make: Callable[..., torch.optim.Optimizer], steps: int = 2, **options: Any
) -> Callable[[str], Any]:
    def program(device: str) -> Any:
        model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).to(device)
        optimizer = make(model.parameters(), **options)
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(5, 4, device=device)).square().mean().backward()
            optimizer.step()
        parameters = list(model.parameters())
        state = [dict(optimizer.state[p]) for p in parameters]
        if not options.get("fused") and not options.get("capturable"):
            # Counters stay on the CPU, and their values are known.
            state = [
                {k: v.item() if getattr(v, "ndim", 1) == 0 else v for k, v in entry.items()}
                for entry in state
            ]
        return parameters, [p.grad for p in parameters], state, [p._version for p in parameters]

    return program


@on_each_device
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer(name: str, way: str, device: str) -> None:
    if way == "fused" and name not in FUSED:
        pytest.skip("has no fused kernel")
    options = {"foreach": way == "foreach"} if way != "fused" else {"fused": True}
    program = training(OPTIMIZERS[name], **options)
    if way != "fused" or device == "cpu":
        assert_like_eager(program, device)
        return
    parameters, _, state, _ = run_fake(program, device)
    for parameter, entry in zip(parameters, state, strict=True):
        for key, value in entry.items():
            if value is not None:
                assert value.device == parameter.device, f"fused kernels keep {key} beside the parameter"


@on_each_device
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sparse_gradients_beside_dense_ones(momentum: float, device: str) -> None:
    """SGD groups parameters with their gradients by device, sparse ones too."""

    def program(device: str) -> Any:
        embedding, linear = nn.Embedding(10, 4, sparse=True, device=device), nn.Linear(4, 3, device=device)
        weights = [*embedding.parameters(), *linear.parameters()]
        optimizer = torch.optim.SGD(weights, lr=0.1, momentum=momentum, foreach=True)
        linear(embedding(torch.tensor([1, 2], device=device))).sum().backward()
        optimizer.step()
        return weights

    assert_like_eager(program, device)


@on_each_device
@pytest.mark.parametrize("name", ["SparseAdam", "Muon"])
def test_optimizers_with_one_way_only(name: str, device: str) -> None:
    def program(device: str) -> Any:
        if name == "SparseAdam":
            embedding = nn.Embedding(10, 4, sparse=True, device=device)
            weight, output = embedding.weight, embedding(torch.tensor([1, 2], device=device))
        else:
            weight = torch.randn(4, 4, device=device, requires_grad=True)
            output = weight @ weight
        optimizer = getattr(torch.optim, name)([weight], lr=0.1)
        output.sum().backward()
        optimizer.step()
        return weight, [value for value in optimizer.state[weight].values() if getattr(value, "ndim", 0)]

    assert_like_eager(program, device)


def test_sparse_gradients_of_a_large_table() -> None:
    """By what they store: the table itself is larger than what is run on zeros."""
    with FakeTensorMode():
        embedding = nn.Embedding(500_000, 300, sparse=True)
        (embedding(torch.arange(8)) + embedding(torch.arange(8))).sum().backward()
        assert embedding.weight.grad is not None and embedding.weight.grad._nnz() in (8, 16)


def test_an_optimizer_that_reads_values_says_so() -> None:
    with FakeTensorMode():
        weight = torch.randn(4, 4, requires_grad=True)
        (weight @ weight).sum().backward()
        with pytest.raises(DataDependentOutputException, match=r"optimizer\.step|Adafactor"):
            torch.optim.Adafactor([weight]).step()


@pytest.mark.parametrize("device", ["cuda", "cuda:3", "xpu"])
def test_an_accelerator_gets_foreach_kernels_by_default(device: str) -> None:
    with FakeTensorMode(), Stream() as stream:
        training(torch.optim.AdamW)(device)
        training(lambda p: torch.optim.SGD(p, lr=0.1))(device)
    assert "_foreach_addcdiv_" in stream.names
    assert "addcdiv_" not in stream.names
    assert "_foreach_add_" in stream.names


def test_the_cpu_gets_the_loop_by_default() -> None:
    def run() -> list[str]:
        with Stream() as stream:
            training(torch.optim.AdamW)("cpu")
        return [name for name in stream.names if "add" in name]

    real = run()
    with FakeTensorMode():
        fake = run()
    assert fake == real
    assert "addcdiv_" in real


def test_the_mode_calls_the_same_operators_as_eager_for_foreach() -> None:
    program = training(torch.optim.Adam, foreach=True)
    with Stream() as real:
        program("cpu")
    with FakeTensorMode(), Stream() as fake:
        program("cuda")
    steps = [[n for n in names if n.startswith("_foreach")] for names in (real.names, fake.names)]
    assert steps[0] == steps[1]


@pytest.mark.parametrize(
    "name", ["Adam", "AdamW", "NAdam", "RAdam", "Adadelta", "Adamax", "ASGD", "RMSprop", "Rprop"]
)
def test_capturable_keeps_steps_on_the_device(name: str) -> None:
    program = training(getattr(torch.optim, name), capturable=True)
    parameters, _, state, _ = run_fake(program, "cuda")
    assert all(entry["step"].device == parameters[0].device for entry in state)


def test_tensor_learning_rate() -> None:
    def program(device: str) -> Any:
        return training(lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), foreach=False))(device)

    assert_like_eager(program, "cpu")


def test_closures_and_lbfgs() -> None:
    with FakeTensorMode():
        weight = torch.randn(3, requires_grad=True)
        sgd = torch.optim.SGD([weight], lr=0.1)

        def closure() -> torch.Tensor:
            sgd.zero_grad()
            loss = weight.square().sum()
            loss.backward()
            return loss

        assert sgd.step(closure).shape == ()
        # L-BFGS decides by the size of the gradient when to stop.
        with pytest.raises(DataDependentOutputException, match=r"lbfgs|test_optimizers"):
            torch.optim.LBFGS([weight]).step(closure)


def test_parameter_groups_on_several_devices() -> None:
    with FakeTensorMode():
        first = nn.Linear(3, 3, device="cuda:0")
        second = nn.Linear(3, 2, device="cuda:1", dtype=torch.bfloat16)
        optimizer = torch.optim.AdamW(
            [{"params": first.parameters()}, {"params": second.parameters(), "lr": 0.1}]
        )
        out = second(first(torch.randn(2, 3, device="cuda:0")).to("cuda:1", torch.bfloat16))
        out.float().sum().backward()
        norm = nn.utils.clip_grad_norm_([*first.parameters(), *second.parameters()], 1.0)
        optimizer.step()
        assert norm.device == torch.device("cuda:0")
        for parameter in (*first.parameters(), *second.parameters()):
            state = optimizer.state[parameter]
            assert state["exp_avg"].device == parameter.device
            assert state["exp_avg"].dtype is parameter.dtype


@on_each_device
@pytest.mark.parametrize("foreach", [None, True, False])
def test_clipping(device: str, foreach: bool | None) -> None:
    def program(device: str) -> Any:
        layers = [nn.Linear(3, 3, device=device), nn.Linear(3, 3, device=device, dtype=torch.float64)]
        parameters = [p for layer in layers for p in layer.parameters()]
        for layer, dtype in zip(layers, (torch.float32, torch.float64), strict=True):
            layer(torch.randn(2, 3, device=device, dtype=dtype)).sum().backward()
        norms = [
            nn.utils.clip_grad_norm_(parameters, 1.0, norm_type=n, foreach=foreach)
            for n in (2.0, 1.0, float("inf"))
        ]
        nn.utils.clip_grad_value_(parameters, 0.5, foreach=foreach)
        total = nn.utils.get_total_norm([p.grad for p in parameters], foreach=foreach)
        return norms, total, [p.grad for p in parameters]

    assert_like_eager(program, device)


def test_clipping_refuses_what_it_can_not_know() -> None:
    with FakeTensorMode():
        layer = nn.Linear(3, 3)
        layer(torch.randn(2, 3)).sum().backward()
        with pytest.raises(DataDependentOutputException):
            nn.utils.clip_grad_norm_(layer.parameters(), 1.0, error_if_nonfinite=True)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 1),
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    "CyclicLR": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, cycle_momentum=False),
    "LinearLR": lambda o: torch.optim.lr_scheduler.LinearLR(o),
    "ExponentialLR": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: torch.optim.lr_scheduler.PolynomialLR(o),
    "CosineAnnealingWarmRestarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "MultiStepLR": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 2]),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [1]
    ),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_schedulers_give_the_same_rates(name: str, as_tensor: bool) -> None:
    def rates() -> list[float]:
        weight = torch.randn(3, requires_grad=True)
        lr = torch.tensor(0.05) if as_tensor else 0.05
        optimizer = torch.optim.Adam([weight], lr=lr, foreach=False)
        scheduler = SCHEDULERS[name](optimizer)
        seen = []
        for _ in range(4):
            weight.sum().backward()
            optimizer.step()
            scheduler.step()
            seen.append(float(optimizer.param_groups[0]["lr"]))
        return seen

    real = rates()
    with FakeTensorMode():
        assert rates() == pytest.approx(real)


@on_each_device
def test_averaged_models(device: str) -> None:
    def program(device: str) -> Any:
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to(device)
        averaged = swa_utils.AveragedModel(model)
        ema = swa_utils.AveragedModel(
            model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
        )
        for _ in range(2):
            averaged.update_parameters(model)
            ema.update_parameters(model)
        swa_utils.update_bn([torch.randn(4, 3, device=device)], averaged)
        return list(averaged.parameters()), list(ema.parameters()), int(averaged.n_averaged)

    assert_like_eager(program, device)


@on_each_device
def test_state_comes_back(device: str) -> None:
    def program(device: str) -> Any:
        model = nn.Linear(3, 2, device=device)
        optimizer = torch.optim.Adam(model.parameters(), foreach=False)
        model(torch.randn(4, 3, device=device)).sum().backward()
        optimizer.step()
        other = torch.optim.Adam(model.parameters(), foreach=False)
        other.load_state_dict(optimizer.state_dict())
        other.step()
        return [(other.state[p]["step"].item(), other.state[p]["exp_avg"]) for p in model.parameters()]

    assert_like_eager(program, device)


def test_step_counters_are_known() -> None:
    with FakeTensorMode():
        weight = torch.randn(3, device="cuda", requires_grad=True)
        optimizer = torch.optim.AdamW([weight])
        for _ in range(3):
            weight.sum().backward()
            optimizer.step()
        assert optimizer.state[weight]["step"].item() == 3


def test_optimizer_in_backward() -> None:
    with FakeTensorMode():
        model = nn.Linear(3, 2, device="cuda")
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

        def step(p: torch.Tensor) -> None:
            optimizers[p].step()
            optimizers[p].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        model(torch.randn(4, 3, device="cuda")).sum().backward()
        assert all(p.grad is None and p._version > 0 for p in model.parameters())
        assert str(model.weight.device) == with_index("cuda")
