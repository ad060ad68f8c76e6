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
MODELS = (
    "llama", "gpt2", "bert", "distilbert", "roberta", "opt", "gpt_neox", "qwen2", "mistral", "phi", "t5", "vit", "bloom",
    "mixtral",
)  # fmt: skip
"""Those of the benchmark."""
QUICK = ("llama", "gpt2", "bert", "t5", "vit", "mixtral")
each_model = pytest.mark.parametrize(
    "model_type",
    [*QUICK, *(pytest.param(name, marks=pytest.mark.conformance) for name in MODELS if name not in QUICK)],
)


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


@each_model
def test_both_dialects(model_type: str) -> None:
    """The numbers of eager at three sizes, after saving and loading too."""
    model = small_model(model_type)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for table, allowed in ((None, 0.0), (torch.export.default_decompositions(), 1e-5)):
            program, fixed = export_small(model, decompositions=table)
            program.validate()
            assert differences(model, program.module(), fixed) <= allowed
            assert differences(model, save_and_load(program).module(), fixed) <= allowed


def save_and_load(program: Any) -> Any:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


@each_model
def test_sizes_that_were_not_asked_to_vary_are_refused(model_type: str) -> None:
    model = small_model(model_type)
    inputs, fixed = inputs_of(model, 2, 8), fixed_of(model)
    first, *_ = inputs
    is_image = first == "pixel_values"
    asked = {**{name: {0: DYNAMIC} for name in inputs}, **dict.fromkeys(fixed)}
    program = understudy.export(model, (), {**inputs, **fixed}, dynamic_shapes=asked)
    other = image_inputs(3, 40) if is_image else inputs_of(model, 3, 9)
    dim, size = (2, 32) if is_image else (1, 8)
    for one in (program, save_and_load(program)):
        with pytest.raises(AssertionError, match=rf"Guard failed: {first}.size\(\)\[{dim}\] == {size}"):
            one.module()(**other, **fixed)


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
    program = understudy.export(model, (), kwargs, dynamic_shapes=asked)
    if not understudy.guards_of(program):
        pytest.skip("this version of the model does not look at its batch")
    with pytest.raises(AssertionError, match="masking_utils"):
        program.module()(**text_inputs(1, 8), use_cache=False)


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_a_batch_of_one_and_a_length_of_one_as_in_torch(model_type: str) -> None:
    model = small_model(model_type)
    program, fixed = export_small(model, guard_zero_one=False)
    with torch.no_grad():
        for size in ((1, 8), (2, 1), (1, 1)):
            inputs = text_inputs(*size)
            assert torch.equal(program.module()(**inputs, **fixed)[0], model(**inputs, **fixed)[0])


class DecodingStep(torch.nn.Module):
    """One token more, with the cache of `transformers` as input and output."""

    def __init__(self) -> None:
        super().__init__()
        self.model = small_model("llama", "AutoModelForCausalLM")

    def forward(self, input_ids: Any, past_key_values: Any) -> Any:
        out = self.model(input_ids, past_key_values=past_key_values, use_cache=True)
        return out.logits, out.past_key_values

    def make_inputs(self, batch: int, length: int) -> tuple[Any, Any]:
        from transformers import DynamicCache

        config, cache = self.model.config, DynamicCache(config=self.model.config)
        generator = torch.Generator().manual_seed(batch * 10 + length)
        for number in range(config.num_hidden_layers):
            shape = (batch, config.num_key_value_heads, length, config.head_dim)
            cache.update(*(torch.randn(shape, generator=generator) for _ in range(2)), number)
        return torch.randint(3, 99, (batch, 1), generator=generator), cache


def test_a_cache_as_input_and_output() -> None:
    prepare_transformers()
    executorch = pytest.importorskip("transformers.integrations.executorch")
    executorch.register_dynamic_cache_export_support()
    step = DecodingStep().eval()
    asked = {"input_ids": {0: DYNAMIC}, "past_key_values": [[{0: DYNAMIC, 2: DYNAMIC}] * 2] * 2}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        training = understudy.export(step, step.make_inputs(2, 5), dynamic_shapes=asked)
        decomposed = training.run_decompositions()
        for program, allowed in ((training, 0.0), (decomposed, 1e-6)):
            program.validate()
            for size in ((2, 5), (3, 7), (1, 4)):
                got = leaves_of(program.module()(*step.make_inputs(*size)))
                torch.testing.assert_close(
                    got, leaves_of(step(*step.make_inputs(*size))), atol=allowed, rtol=0
                )


def sweep_types() -> list[str]:
    prepare_transformers()
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return sorted(MODEL_MAPPING_NAMES)


@pytest.mark.conformance
def test_sweep() -> None:
    """At most 3% of the classes are exported by torch.export and not by us, with the numbers of eager.

    A class counts if it can be made small, run on text or images, and exported by one of the two.
    """
    from tests.exporting.sweep import sweep

    results = sweep(sweep_types())
    right = [name for name, result in results.items() if result.ours == "ok"]
    wrong = {
        name: result.ours for name, result in results.items() if result.ours != "ok" and result.torch == "ok"
    }
    assert len(right) >= 200, f"only {len(right)} classes were exported"
    assert len(wrong) <= 0.03 * len(right), wrong
