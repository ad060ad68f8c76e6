"""Graphs and programs that torch's own tools take: to_torch and inductor, AOTInductor."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor as TorchFakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as TorchFakeTensorMode

from understudy import FakeTensor, export, make_fx, to_torch


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16)).eval()


@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
def test_every_val_is_torchs_own(tracing_mode: str) -> None:
    model, x = network(), torch.randn(4, 8)
    gm = make_fx(model, tracing_mode=tracing_mode)(x)
    handed = to_torch(gm)
    vals = [node.meta["val"] for node in handed.graph.nodes if "val" in node.meta]
    tensors = [val for val in vals if isinstance(val, torch.Tensor)]
    assert len(tensors) > 5
    assert all(type(tensor) is TorchFakeTensor for tensor in tensors)
    assert torch.equal(handed(x), model(x))
    assert any(type(node.meta.get("val")) is FakeTensor for node in gm.graph.nodes), (
        "the given graph stays as it is"
    )
    assert next(handed.parameters()) is next(model.parameters())


def test_symbols_become_torchs_symbols() -> None:
    gm = make_fx(lambda x: (x.view(-1), x.shape[0] * 2), tracing_mode="symbolic")(torch.randn(4, 8))
    handed = to_torch(gm)
    (placeholder,) = handed.graph.find_nodes(op="placeholder")
    rows, columns = placeholder.meta["val"].shape
    assert isinstance(rows, torch.SymInt)
    assert rows.node.hint == 4
    assert columns.node.hint == 8
    (view,) = (node for node in handed.graph.nodes if node.name == "view")
    assert bool(view.meta["val"].shape[0] == rows * columns)
    assert handed(torch.ones(3, 5))[1] == 6


def test_a_mode_of_the_users() -> None:
    mode = TorchFakeTensorMode(allow_non_fake_inputs=True)
    handed = to_torch(make_fx(network(), tracing_mode="fake")(torch.randn(4, 8)), mode)
    tensors = [n.meta["val"] for n in handed.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    assert all(tensor.fake_mode is mode for tensor in tensors)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a compiler")
@pytest.mark.parametrize("tracing_mode", ["fake", "symbolic"])
def test_inductor_compiles_it(tracing_mode: str) -> None:
    from torch._inductor.compile_fx import compile_fx

    model, x = network(), torch.randn(4, 8)
    with torch.no_grad():
        compiled = compile_fx(to_torch(make_fx(model, tracing_mode=tracing_mode)(x)), [x])
        torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a compiler")
def test_aotinductor_compiles_a_program(tmp_path: Path) -> None:
    model = network()
    rows = torch.export.Dim("rows", min=1, max=64)
    with torch.no_grad():
        program = export(model, (torch.randn(4, 8),), dynamic_shapes=({0: rows},))
        package = torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / "network.pt2")
        )
        compiled = torch._inductor.aoti_load_package(package)
        for count in (4, 9, 1):
            x = torch.randn(count, 8)
            torch.testing.assert_close(compiled(x), model(x))
