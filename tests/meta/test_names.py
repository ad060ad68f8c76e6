"""Names of modules and parameters are the user's, and may be anything. What they say is never run."""

from __future__ import annotations

import builtins
import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from understudy import symbolic_trace

x = torch.randn(2, 3)
INJECTED = 'x"), setattr(__import__("builtins"), "injected", True), (lambda *a: 0)(self, "'
PLAIN = ["a", "layer_1", "1", "a-b", "a b", "é"]
HOSTILE = [
    INJECTED,
    "class",
    "None",
    "lambda",
    "line\nend",
    "tab\t",
    "it's",
    'say "hi"',
    "back\\slash",
    "{x}",
    "ﬁ",
    "\u2028",
]
OF_GRAPH_MODULES = [
    "graph",
    "code",
    "meta",
    "shape_env",
    "_graph",
    "recompile",
    "print_readable",
    "add_submodule",
]


class WithParameters(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.parts = nn.ParameterDict({name: torch.ones(3)})
        self.path = f"parts.{name}"

    def forward(self, x: Tensor) -> Any:
        return x + next(iter(self.parts.values()))


class WithModule(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.add_module(name, nn.Linear(3, 3))
        self.path = name

    def forward(self, x: Tensor) -> Any:
        return next(self.children())(x) * 2


class WithBuffer(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.register_buffer(name, torch.ones(3))
        self.path = name

    def forward(self, x: Tensor) -> Any:
        return next(self.buffers()) + x


class WithModules(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: nn.Sequential(nn.Linear(3, 3), nn.ReLU())})
        self.path = f"parts.{name}.0"

    def forward(self, x: Tensor) -> Any:
        return next(iter(self.parts.values()))(x)


@pytest.mark.parametrize("name", [*PLAIN, *HOSTILE, *OF_GRAPH_MODULES], ids=ascii)
@pytest.mark.parametrize("kind", [WithParameters, WithModule, WithBuffer, WithModules])
def test_any_name(kind: Any, name: str) -> None:
    model = kind(name)
    names = list(model.state_dict())
    traced = symbolic_trace(model, {"x": x})
    for module in (traced, copy.deepcopy(traced), pickle.loads(pickle.dumps(traced))):
        assert torch.equal(module(x), model(x))
    traced.graph.lint()
    assert not hasattr(builtins, "injected")
    assert list(model.state_dict()) == names
    read = next(node for node in traced.graph.nodes if node.op in ("get_attr", "call_module"))
    assert read.meta.get("original_path", read.target) == model.path
    is_hidden = name in OF_GRAPH_MODULES and kind in (WithModule, WithBuffer)
    assert ("original_path" in read.meta) == (name in HOSTILE or is_hidden)


def test_names_that_are_made_are_not_taken() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ParameterDict({"a\n": torch.ones(3), "a\t": torch.zeros(3)})
            self.parts_a = nn.Parameter(torch.full((3,), 2.0))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.parts["a\n"] + self.parts["a\t"] * self.parts_a

    model = Model()
    traced = symbolic_trace(model, {"x": x})
    assert torch.equal(traced(x), model(x))
    assert len({node.target for node in traced.graph.nodes if node.op == "get_attr"}) == 3


def test_a_method_of_an_unknown_value_is_no_code() -> None:
    def program(x: Any) -> Any:
        return getattr(x, 'sin(), __import__("os").getcwd')()

    with pytest.raises(AttributeError, match="can't be written"):
        symbolic_trace(program)
