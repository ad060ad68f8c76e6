"""Every node of the graphs of real models has a `val` that is what the node gives in a real run."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from examples.llama import Llama, LlamaSize
from tests.graph.reality import RealRun, differences
from tests.oracle.models import PROGRAMS
from understudy import FakeTensorMode, FakeTensorProp

PLAIN = [
    "mlp",
    "cnn",
    "cnn, channels last",
    "cnn, 1-D",
    "unet",
    "transformer, written out",
    "transformer, sdpa",
]
HUGGING = ["gpt2", "llama", "bert", "t5", "vit", "resnet"]


class WithLoss(nn.Module):
    """A model as a function of tensors alone."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *tensors: torch.Tensor) -> Any:
        output = self.model(**dict(zip(self.names, tensors, strict=True)))
        if isinstance(output, torch.Tensor):
            return output
        return {name: value for name, value in output.items() if isinstance(value, torch.Tensor)}


def prepared(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    program = PROGRAMS[name]
    inputs = program.inputs()
    model = program.build().eval()
    return WithLoss(model, list(inputs)), tuple(inputs.values())


def check(module: torch.fx.GraphModule, *args: Any) -> None:
    module = copy.deepcopy(module)
    for node in module.graph.nodes:
        node.meta.pop("val", None)
    before = {name: (value.clone(), value._version) for name, value in module.state_dict().items()}
    FakeTensorProp(module).propagate(*args)
    for name, value in module.state_dict().items():
        assert type(value) in (torch.Tensor, nn.Parameter), name
        torch.testing.assert_close(value, before[name][0], rtol=0, atol=0, equal_nan=True)
        assert value._version == before[name][1], name
    assert differences(module, *args) == []


@pytest.mark.parametrize("name", [*PLAIN, *HUGGING])
def test_graph_of_make_fx(name: str) -> None:
    model, inputs = prepared(name)
    with torch.no_grad():
        graph = make_fx(model)(*inputs)
        check(graph, *inputs)


@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer, sdpa", "gpt2"])
def test_with_gradients(name: str) -> None:
    model, inputs = prepared(name)
    with torch.no_grad():
        graph = make_fx(model)(*inputs)
    check(graph, *inputs)


@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer, sdpa", "gpt2", "bert"])
def test_graph_of_a_training_step(name: str) -> None:
    model, inputs = prepared(name)
    parameters = {key: value.detach() for key, value in model.named_parameters()}

    def step(parameters: dict[str, torch.Tensor], *inputs: torch.Tensor) -> Any:
        leaves = {key: value.detach().requires_grad_() for key, value in parameters.items()}
        output = torch.func.functional_call(model, leaves, inputs)
        loss = (
            output.get("loss", next(iter(output.values())))
            if isinstance(output, dict)
            else output.float().mean()
        )
        return torch.autograd.grad(loss.sum(), list(leaves.values()), allow_unused=True)

    check(make_fx(step)(parameters, *inputs), parameters, *inputs)


@pytest.mark.parametrize(
    "name", ["mlp", "cnn", "transformer, written out", "transformer, sdpa", "bert", "vit"]
)
def test_exported(name: str) -> None:
    model, inputs = prepared(name)
    exported = torch.export.export(model, inputs, strict=False)
    check(exported.module(), *inputs)
    signature = exported.graph_signature
    state = {**exported.state_dict, **exported.constants}
    lifted = [
        state[place.target] if place.target is not None else None
        for place in signature.input_specs
        if place.kind.name != "USER_INPUT"
    ]
    check(exported.graph_module, *lifted, *inputs)
    lowered = exported.run_decompositions()
    check(lowered.graph_module, *lifted, *inputs)


def test_our_transformer() -> None:
    size = LlamaSize(layers=2, width=32, heads=4, kv_heads=2, hidden=64, vocabulary=50)
    model, tokens = Llama(size), torch.randint(50, (2, 12))
    with torch.no_grad():
        check(make_fx(model)(tokens), tokens)


def test_modules_as_leaves() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(72, 4),
    )
    check(torch.fx.symbolic_trace(model), torch.randn(2, 3, 8, 8))
    check(torch.fx.symbolic_trace(model.train()), torch.randn(2, 3, 8, 8))


def test_a_val_on_a_device_that_is_not_here() -> None:
    mode = FakeTensorMode()
    module = torch.fx.symbolic_trace(lambda x: torch.relu(x).sum(0, keepdim=True))
    with mode:
        x = torch.empty(4, 3, device="cuda:1")
    result = FakeTensorProp(module, mode).propagate_dont_convert_inputs(x)
    assert result.device == torch.device("cuda", 1)
    assert [str(FakeTensorProp.spec_of(node)) for node in module.graph.nodes][1] == "f32[4, 3]@cuda:1"


def test_the_oracle_sees_differences() -> None:
    module = torch.fx.symbolic_trace(lambda x: x.t())
    FakeTensorProp(module).propagate(torch.randn(2, 3))
    assert differences(module, torch.randn(2, 3)) == []
    assert len(differences(module, torch.randn(3, 2))) == 3
    assert RealRun(module).run(torch.ones(1, 1)) == 1
