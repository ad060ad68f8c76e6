"""Llama to ONNX, with any batch and length, run in onnxruntime: the example of docs/export.md."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import understudy
from tests.exporting.models import small_model, text_inputs

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
        program = understudy.export(logits, (text_inputs(2, 9)["input_ids"],), dynamic_shapes=asked)
        torch.onnx.export(program, dynamo=True, verbose=False).save(str(tmp_path / "llama.onnx"))
    session = onnxruntime.InferenceSession(str(tmp_path / "llama.onnx"))
    for size in ((2, 9), (3, 17), (1, 4)):
        ids = text_inputs(*size)["input_ids"]
        (found,) = session.run(None, {session.get_inputs()[0].name: ids.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), logits(ids).detach(), atol=1e-5, rtol=1e-5)
