"""Models of transformers from small configurations: built, run and trained inside the mode, here and on CUDA."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.fake.sides import assert_like_eager, run_fake
from tests.oracle.models import loss_of
from understudy import DataDependentOutputException, FakeTensorMode

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
transformers.utils.logging.set_verbosity_error()
pytestmark = pytest.mark.filterwarnings("ignore")

Inputs = Callable[[str], dict[str, Any]]

TEXT = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
DECODER = {**TEXT, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BOTH = {
    "vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4,
}  # fmt: skip
IMAGE = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
STAGES = {"hidden_sizes": [8, 16, 32, 64], "depths": [1, 1, 1, 1], "num_labels": 3}


def tokens(device: str) -> dict[str, Any]:
    return {name: torch.randint(0, 64, (2, 12), device=device) for name in ("input_ids", "labels")}


def pixels(device: str) -> dict[str, Any]:
    return {
        "pixel_values": torch.randn(2, 3, 32, 32, device=device),
        "labels": torch.randint(0, 3, (2,), device=device),
    }


def pairs(device: str) -> dict[str, Any]:
    ids = torch.randint(0, 64, (2, 12), device=device)
    return {"input_ids": ids, "pixel_values": torch.randn(2, 3, 32, 32, device=device), "return_loss": True}


def sound(device: str) -> dict[str, Any]:
    labels = torch.randint(0, 64, (2, 12), device=device)
    return {"input_features": torch.randn(2, 8, 32, device=device), "labels": labels}


# name: model class, configuration class, its sizes, what goes in
MODELS: dict[str, tuple[str, str, dict[str, Any], Inputs]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {
        "vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2,
    }, tokens),
    "llama": ("LlamaForCausalLM", "LlamaConfig", DECODER, tokens),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**DECODER, "sliding_window": 4}, tokens),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", DECODER, tokens),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**DECODER, "head_dim": 8}, tokens),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**DECODER, "head_dim": 8}, tokens),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", DECODER, tokens),
    "mamba": ("MambaForCausalLM", "MambaConfig", {
        "vocab_size": 64, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2}, tokens),
    "bert": ("BertForMaskedLM", "BertConfig", TEXT, tokens),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", {**TEXT, "pad_token_id": 0}, tokens),
    "deberta": ("DebertaV2ForMaskedLM", "DebertaV2Config", {
        **TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}, tokens),
    "t5": ("T5ForConditionalGeneration", "T5Config", {
        "vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0,
    }, tokens),
    "bart": ("BartForConditionalGeneration", "BartConfig", {**BOTH, "max_position_embeddings": 64}, tokens),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", {
        **BOTH, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    }, sound),
    "vit": ("ViTForImageClassification", "ViTConfig", {**IMAGE, "num_labels": 3}, pixels),
    "deit": ("DeiTForImageClassification", "DeiTConfig", {**IMAGE, "num_labels": 3}, pixels),
    "swin": ("SwinForImageClassification", "SwinConfig", {
        "image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4,
        "num_labels": 3,
    }, pixels),
    "resnet": ("ResNetForImageClassification", "ResNetConfig", {**STAGES, "embedding_size": 8}, pixels),
    "convnext": ("ConvNextForImageClassification", "ConvNextConfig", STAGES, pixels),
    "clip": ("CLIPModel", "CLIPConfig", {
        "text_config": {**TEXT, "eos_token_id": 2}, "vision_config": IMAGE, "projection_dim": 16}, pairs),
}  # fmt: skip

# They draw a random number in training and skip a layer if it is small: nobody knows whether.
SKIP_LAYERS = frozenset({"bart", "whisper"})


def training(name: str, dtype: torch.dtype = torch.float32) -> Callable[[str], Any]:
    model_class, config_class, sizes, inputs = MODELS[name]

    def program(device: str) -> Any:
        config = getattr(transformers, config_class)(**sizes)
        model = getattr(transformers, model_class)(config).to(device, dtype).train(name not in SKIP_LAYERS)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        given = {
            k: v.to(dtype) if getattr(v, "is_floating_point", bool)() else v
            for k, v in inputs(device).items()
        }
        loss = loss_of(model(**given))
        loss.backward()
        optimizer.step()
        parameters = list(model.parameters())
        moments = [optimizer.state[p]["exp_avg"] for p in parameters if p in optimizer.state]
        return loss.detach(), parameters, [p.grad for p in parameters if p.grad is not None], moments

    return program


@pytest.mark.parametrize("name", MODELS)
def test_trained_here_as_for_real(name: str) -> None:
    assert_like_eager(training(name), "cpu")


@pytest.mark.parametrize("name", MODELS)
def test_trained_on_cuda(name: str) -> None:
    loss, parameters, gradients, moments = run_fake(training(name, torch.bfloat16), "cuda:3")
    assert loss.shape == ()
    assert gradients
    for tensor in (loss, *parameters, *gradients, *moments):
        assert tensor.device == torch.device("cuda:3")
        assert tensor is loss or tensor.dtype is torch.bfloat16


def test_layers_that_are_skipped_by_chance_are_named() -> None:
    model_class, config_class, sizes, inputs = MODELS["bart"]
    with FakeTensorMode():
        settings = {**sizes, "encoder_layerdrop": 0.5}
        model = getattr(transformers, model_class)(getattr(transformers, config_class)(**settings)).train()
        with pytest.raises(DataDependentOutputException, match="layerdrop"):
            model(**inputs("cpu"))


def test_layers_that_are_never_skipped_need_no_data() -> None:
    model_class, config_class, sizes, inputs = MODELS["bart"]
    with FakeTensorMode():
        settings = {**sizes, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}
        model = getattr(transformers, model_class)(getattr(transformers, config_class)(**settings)).train()
        model(**inputs("cpu"))


@pytest.mark.parametrize("name", ["llama", "vit", "t5"])
def test_checkpointing_of_layers(name: str) -> None:
    model_class, config_class, sizes, inputs = MODELS[name]
    with FakeTensorMode():
        model = (
            getattr(transformers, model_class)(getattr(transformers, config_class)(**sizes)).cuda().train()
        )
        model.gradient_checkpointing_enable()
        loss_of(model(**inputs("cuda"))).backward()
        assert all(p.grad is None or p.grad.device == torch.device("cuda:0") for p in model.parameters())


@pytest.mark.parametrize("name", ["llama", "bert", "gpt2"])
def test_under_autocast(name: str) -> None:
    model_class, config_class, sizes, inputs = MODELS[name]
    with FakeTensorMode():
        model = (
            getattr(transformers, model_class)(getattr(transformers, config_class)(**sizes)).cuda().train()
        )
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = model(**inputs("cuda"))
        assert out.logits.dtype is torch.bfloat16
        out.loss.backward()
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}


def test_a_model_that_fits_nowhere() -> None:
    """405 billion parameters, in no time and no memory."""
    sizes = {**DECODER, "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "vocab_size": 128256,
             "num_attention_heads": 128, "num_key_value_heads": 8}  # fmt: skip
    with FakeTensorMode(), torch.device("cuda"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
        assert sum(p.numel() for p in model.parameters()) > 405e9
        assert model.lm_head.weight.device == torch.device("cuda:0")
