"""Models of `transformers` as torch-level graphs: the same numbers, and the right metadata at every node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.meta.reality import assert_same, run_both, wrong_nodes
from understudy import Dim, symbolic_trace

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
CAUSAL = {**SMALL, "num_key_value_heads": 2, "max_position_embeddings": 64}
VISION = {"image_size": 32, "patch_size": 8, **{k: v for k, v in SMALL.items() if k != "vocab_size"}}
BART = {"vocab_size": 99, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64}  # fmt: skip
T5 = {
    "vocab_size": 99,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
GPT2 = {
    "vocab_size": 99,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 1,
}

TEXT = ("input_ids", "attention_mask")
MODELS: dict[str, tuple[str, str, dict[str, Any], tuple[str, ...]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", CAUSAL, TEXT),
    "llama, eager attention": ("LlamaConfig", "LlamaForCausalLM", {**CAUSAL, "attn_implementation": "eager"}, TEXT),
    "llama, no mask": ("LlamaConfig", "LlamaForCausalLM", CAUSAL, ("input_ids",)),
    "llama, loss": ("LlamaConfig", "LlamaForCausalLM", CAUSAL, (*TEXT, "labels")),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", GPT2, TEXT),
    "bert": ("BertConfig", "BertForMaskedLM", SMALL, (*TEXT, "token_type_ids")),
    "t5": ("T5Config", "T5ForConditionalGeneration", T5, (*TEXT, "decoder_input_ids")),
    "t5, loss": ("T5Config", "T5ForConditionalGeneration", T5, (*TEXT, "labels")),
    "vit": ("ViTConfig", "ViTForImageClassification", VISION, ("pixel_values",)),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", CAUSAL, TEXT),
    "mistral, sliding window": ("MistralConfig", "MistralForCausalLM", {**CAUSAL, "sliding_window": 4}, TEXT),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {**CAUSAL, "head_dim": 8, "sliding_window": 4}, TEXT),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {**CAUSAL, "num_local_experts": 4}, TEXT),
    "bart": ("BartConfig", "BartForConditionalGeneration", BART, (*TEXT, "decoder_input_ids")),
    "roberta": ("RobertaConfig", "RobertaModel", SMALL, TEXT),
    "deberta, TorchScript inside": (
        "DebertaV2Config", "DebertaV2Model", {**SMALL, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}, TEXT,
    ),
    "resnet": (
        "ResNetConfig", "ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}, ("pixel_values",),
    ),
    "swin": (
        "SwinConfig", "SwinForImageClassification",
        {"image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4},
        ("pixel_values",),
    ),
}  # fmt: skip
NO_CACHE = {"use_cache": False}


def inputs_for(names: tuple[str, ...], batch: int = 2, length: int = 7) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 99, (batch, length))
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[-1, :2] = 0
    made: dict[str, Callable[[], torch.Tensor]] = {
        "attention_mask": lambda: mask,
        "token_type_ids": lambda: torch.zeros_like(ids),
        "pixel_values": lambda: torch.randn(batch, 3, 32, 32),
    }
    return {name: made.get(name, lambda: ids)() for name in names}


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    config, kind, options, _ = MODELS[name]
    return getattr(transformers, kind)(getattr(transformers, config)(**options)).eval()


@pytest.mark.parametrize("name", MODELS)
def test_same_numbers_and_metadata(name: str) -> None:
    model, inputs = model_of(name), inputs_for(MODELS[name][3])
    state = {key: (id(value), value._version) for key, value in model.state_dict(keep_vars=True).items()}
    traced = symbolic_trace(model, meta_args=inputs)
    run_both(model, traced, inputs, {})
    assert wrong_nodes(traced, inputs) == []
    traced.graph.lint()
    assert {
        key: (id(value), value._version) for key, value in model.state_dict(keep_vars=True).items()
    } == state


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "bart"])
def test_without_a_cache(name: str) -> None:
    model, inputs = model_of(name), inputs_for(MODELS[name][3])
    traced = symbolic_trace(model, inputs, concrete_args=NO_CACHE)
    run_both(model, traced, inputs, NO_CACHE)
    with pytest.raises(ValueError, match="use_cache was False when this graph was traced, and is True now"):
        traced(**inputs, use_cache=True)


def test_a_cache_as_input_and_as_output() -> None:
    """The second step of a generation: the cache of the first comes in, a longer one goes out."""
    model, inputs = model_of("llama"), inputs_for(("input_ids",))
    one = {"input_ids": inputs["input_ids"][:, :1]}

    def after_first() -> Any:
        with torch.no_grad():
            return model(**inputs).past_key_values

    traced = symbolic_trace(model, meta_args={**one, "past_key_values": after_first()})
    with torch.no_grad():
        real = model(**one, past_key_values=after_first())
        again = traced(**one, past_key_values=after_first())
    assert real.past_key_values.get_seq_length() == 8
    assert_same(real, again)
    assert again.past_key_values.get_seq_length() == 8


@pytest.mark.parametrize("name", [n for n in MODELS if n not in ("mixtral",)])
def test_one_graph_for_every_batch_size(name: str) -> None:
    names = MODELS[name][3]
    model = model_of(name)
    example = inputs_for(names)
    traced = symbolic_trace(model, example, symbolic={given: {0: Dim("batch")} for given in names})
    for batch in (2, 3, 5):
        other = inputs_for(names, batch=batch)
        run_both(model, traced, other, {})
    assert not [str(g) for g in traced.shape_env.guards if "batch ==" in str(g)]


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5", "qwen2", "bart"])
def test_one_graph_for_every_length(name: str) -> None:
    names = MODELS[name][3]
    model = model_of(name)
    traced = symbolic_trace(model, inputs_for(names), symbolic=True)
    for batch, length in ((2, 7), (3, 12), (4, 33)):
        run_both(model, traced, inputs_for(names, batch, length), {})


def test_a_mask_made_by_vmap() -> None:
    from transformers.masking_utils import create_causal_mask

    config = transformers.LlamaConfig(**CAUSAL, attn_implementation="sdpa")

    def mask(x: torch.Tensor, attention_mask: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        def same_kind(batch: Any, head: Any, query: Any, key: Any) -> Any:
            return kinds[batch, query] == kinds[batch, key]

        return create_causal_mask(
            config=config, inputs_embeds=x, attention_mask=attention_mask, past_key_values=None,
            or_mask_function=same_kind,
        )  # fmt: skip

    def inputs(batch: int, length: int) -> dict[str, torch.Tensor]:
        text = inputs_for(TEXT, batch, length)
        kinds = torch.randint(0, 2, (batch, length))
        return {"x": torch.randn(batch, length, 32), "attention_mask": text["attention_mask"], "kinds": kinds}

    example = inputs(2, 7)
    traced = symbolic_trace(mask, example)
    assert torch.equal(traced(**example), mask(**example))
    assert wrong_nodes(traced, example) == []
    traced = symbolic_trace(mask, example, symbolic=True)
    for given in (example, inputs(3, 9)):
        assert torch.equal(traced(**given), mask(**given))


def test_a_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CAUSAL)).eval()
    inputs = {name: value.to("meta") for name, value in inputs_for(TEXT).items()}
    traced = symbolic_trace(model, inputs)
    logits = next(node for node in traced.graph.nodes if node.name == "lm_head")
    assert logits.meta["val"].shape == (2, 7, 99)
    assert logits.meta["val"].device.type == "meta"


def test_training_gives_the_same_gradients() -> None:
    torch.manual_seed(0)
    inputs = inputs_for((*TEXT, "labels"))
    model = model_of("llama").train()
    traced = symbolic_trace(model, inputs)
    model(**inputs).loss.backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    traced(**inputs).loss.backward()
    for name, parameter in traced.named_parameters():
        assert torch.equal(parameter.grad, expected[name]), name
