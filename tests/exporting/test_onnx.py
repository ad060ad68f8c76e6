"""ONNX of exported programs, run in onnxruntime.

Llama with any batch and length is the example of docs/export.md; GPT-2 and BERT go by `accelerate_export`.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import understudy
from tests.exporting.models import leaves_of, small_model, text_inputs
from tests.exporting.test_models import fixed_of, inputs_of, what_varies

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


class Logits(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = small_model("llama", "AutoModelForCausalLM")

    def forward(self, input_ids: Any) -> Any:
        return self.model(input_ids, use_cache=False).logits


def test_llama_in_onnxruntime(tmp_path: Path) -> None:
    logits = Logits()
    asked = {"input_ids": {0: "batch", 1: "seq"}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ids = text_inputs(2, 9)["input_ids"]
        program = understudy.export(logits, (ids,), dynamic_shapes=asked, guard_zero_one=False)
        torch.onnx.export(program, dynamo=True, verbose=False).save(str(tmp_path / "llama.onnx"))
    session = onnxruntime.InferenceSession(str(tmp_path / "llama.onnx"))
    for size in ((2, 9), (3, 17), (1, 4)):
        ids = text_inputs(*size)["input_ids"]
        (found,) = session.run(None, {session.get_inputs()[0].name: ids.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), logits(ids).detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("model_type", ["gpt2", "bert"])
def test_accelerated_models_in_onnxruntime(model_type: str, tmp_path: Path) -> None:
    model: Any = small_model(model_type)
    fixed = fixed_of(model)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", understudy.AccelerationWarning)
        kwargs = {**inputs_of(model, 2, 9), **fixed}
        with understudy.accelerate_export():
            program = torch.onnx.export(
                model, (), kwargs=kwargs, dynamo=True, dynamic_shapes=what_varies(model), verbose=False
            )
    program.save(str(tmp_path / "model.onnx"))
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    for size in ((2, 9), (3, 17), (1, 4)):
        ids = text_inputs(*size)["input_ids"]
        found = session.run(None, {session.get_inputs()[0].name: ids.numpy()})
        with torch.no_grad():
            wanted = leaves_of(model(ids, **fixed))
        torch.testing.assert_close(list(map(torch.from_numpy, found)), wanted, atol=1e-5, rtol=1e-5)
