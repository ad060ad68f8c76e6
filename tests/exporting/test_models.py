"""Models of `transformers`: exported, decomposed, saved and run, with the numbers of eager at three sizes.

The sweep over more than a hundred model classes is a conformance test: `pytest -m conformance tests/exporting/test_models.py`.
"""

from __future__ import annotations

import inspect
import io
import warnings
from typing import Any

import pytest
import torch

import understudy
from tests.exporting.models import image_inputs, leaves_of, prepare_transformers, small_model, text_inputs
from understudy import dims

SIZES = ((2, 8), (3, 5), (4, 11))
DYNAMIC = torch.export.Dim.DYNAMIC
QUICK = ("llama", "gpt2", "bert", "t5", "vit", "mixtral")


def inputs_of(model: Any, batch: int, length: int) -> dict[str, Any]:
    if model.main_input_name == "pixel_values":
        return image_inputs(batch)
    inputs = text_inputs(batch, length)
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"].flip(1)
    return inputs


def fixed_of(model: Any) -> dict[str, Any]:
    """Other arguments that a model is called with."""
    return {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}


def what_varies(model: Any) -> dict[str, Any]:
    """All that may: the batch of images, batch and length of text."""
    varying = {0: DYNAMIC} if model.main_input_name == "pixel_values" else {0: DYNAMIC, 1: DYNAMIC}
    return {**dict.fromkeys(inputs_of(model, *SIZES[0]), varying), **dict.fromkeys(fixed_of(model))}


def export_small(model: Any, **options: Any) -> Any:
    inputs, fixed = inputs_of(model, *SIZES[0]), fixed_of(model)
    program = understudy.export(model, (), {**inputs, **fixed}, dynamic_shapes=what_varies(model), **options)
    return program, fixed


def differences(model: Any, run: Any, fixed: dict[str, Any]) -> float:
    worst = 0.0
    for size in SIZES:
        inputs = inputs_of(model, *size)
        got, wanted = leaves_of(run(**inputs, **fixed)), leaves_of(model(**inputs, **fixed))
        assert len(got) == len(wanted)
        for one, other in zip(got, wanted, strict=True):
            if isinstance(one, torch.Tensor) and one.numel():
                worst = max(worst, (one.double() - other.double()).abs().max().item())
    return worst


@pytest.mark.parametrize("model_type", QUICK)
def test_both_dialects(model_type: str) -> None:
    model = small_model(model_type)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        program, fixed = export_small(model)
        program.validate()
        assert differences(model, program.module(), fixed) == 0
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        assert differences(model, torch.export.load(file).module(), fixed) == 0
        decomposed, _ = export_small(model, decompositions=torch.export.default_decompositions())
        decomposed.validate()
        assert differences(model, decomposed.module(), fixed) <= 1e-5


def test_unflattened_llama() -> None:
    model = small_model("llama")
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        program, fixed = export_small(model)
        module = torch.export.unflatten(program)
        assert differences(model, module, fixed) == 0
        assert module.get_submodule("layers.1.self_attn.q_proj") is not None


def test_a_batch_that_the_program_excludes_is_refused() -> None:
    batch, seq = dims("batch", "seq")
    model = small_model("llama")
    kwargs = {**text_inputs(2, 8), "use_cache": False}
    asked = {"input_ids": {0: batch, 1: seq}, "use_cache": None}
    program = understudy.export(model, (), kwargs, dynamic_shapes=asked, guard_zero_one=True)
    if not understudy.guards_of(program):
        pytest.skip("this version of the model does not look at its batch")
    with pytest.raises(AssertionError, match="masking_utils"):
        program.module()(**text_inputs(1, 8), use_cache=False)


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_a_batch_of_one_and_a_length_of_one_as_in_torch(model_type: str) -> None:
    model = small_model(model_type)
    program, fixed = export_small(model)
    with torch.no_grad():
        for size in ((1, 8), (2, 1), (1, 1)):
            inputs = text_inputs(*size)
            assert torch.equal(program.module()(**inputs, **fixed)[0], model(**inputs, **fixed)[0])


def sweep_types() -> list[str]:
    prepare_transformers()
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return sorted(MODEL_MAPPING_NAMES)


@pytest.mark.conformance
def test_sweep() -> None:
    """Of the classes that torch.export exports, at least 97% are exported by us, with the same numbers.

    A class counts if it can be made small, run on text or images, and exported by torch.
    """
    from tests.exporting.sweep import sweep

    results = sweep(sweep_types(), with_torch=True)
    counted = {name: result for name, result in results.items() if result.torch == "ok"}
    wrong = {name: result.ours for name, result in counted.items() if result.ours != "ok"}
    assert len(counted) >= 100, f"only {len(counted)} classes were exported by torch"
    assert len(wrong) <= 0.03 * len(counted), wrong
