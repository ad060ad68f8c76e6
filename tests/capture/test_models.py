"""Models of `transformers`, built small from their configurations, captured by make_fx: the graphs give their numbers."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import pytest
import torch
import transformers as hf
from torch.optim import SGD, AdamW

from understudy import FakeTensor, capture_step, make_fx

Inputs = tuple[torch.Tensor, ...]
Case = tuple[torch.nn.Module, Callable[..., torch.Tensor], Callable[[int, int], Inputs]]
"""A model, what is captured of it, and inputs for a batch size and a length."""

WORDS = 100
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": WORDS,
}


def tokens(batch: int, length: int) -> Inputs:
    return (torch.randint(WORDS, (batch, length)),)


def language_model(model: Any) -> Case:
    return model, lambda ids: model(input_ids=ids, use_cache=False).logits, tokens


def llama() -> Case:
    return language_model(hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, num_key_value_heads=2)).eval())


def gpt2() -> Case:
    config = hf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=WORDS, bos_token_id=1, eos_token_id=1)
    return language_model(hf.GPT2LMHeadModel(config).eval())


def mixtral() -> Case:
    config = hf.MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4)
    return language_model(hf.MixtralForCausalLM(config).eval())


def mamba() -> Case:
    return language_model(
        hf.MambaForCausalLM(hf.MambaConfig(hidden_size=16, num_hidden_layers=2, vocab_size=WORDS)).eval()
    )


def bert() -> Case:
    model = hf.BertModel(hf.BertConfig(**SMALL)).eval()
    return model, lambda ids: model(input_ids=ids).last_hidden_state, tokens


def t5() -> Case:
    config = hf.T5Config(
        d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=WORDS, decoder_start_token_id=0
    )
    model = hf.T5ForConditionalGeneration(config).eval()

    def forward(ids: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, decoder_input_ids=answer, use_cache=False).logits

    return model, forward, lambda batch, length: (*tokens(batch, length), *tokens(batch, length - 2))


def whisper() -> Case:
    config = hf.WhisperConfig(
        d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=WORDS, max_source_positions=20, num_mel_bins=8,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    model = hf.WhisperForConditionalGeneration(config).eval()

    def forward(features: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
        return model(input_features=features, decoder_input_ids=answer, use_cache=False).logits

    return model, forward, lambda batch, length: (torch.randn(batch, 8, 40), *tokens(batch, length))


def pictures(model: Any, side: int) -> Case:
    return (
        model,
        lambda x: model(x).last_hidden_state,
        lambda batch, length: (torch.randn(batch, 3, side, side),),
    )


def vit() -> Case:
    config = hf.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        image_size=32,
        patch_size=8,
    )
    return pictures(hf.ViTModel(config).eval(), 32)


def swin() -> Case:
    config = hf.SwinConfig(
        image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4
    )
    return pictures(hf.SwinModel(config).eval(), 32)


CASES = {make.__name__: make for make in (llama, gpt2, mixtral, mamba, bert, t5, whisper, vit, swin)}
FIXED_LENGTH = {"mamba": "its scan is a Python loop over the sequence: a graph of it holds for one length"}


def made(name: str) -> Case:
    torch.manual_seed(0)
    return CASES[name]()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("tracing_mode", ["fake", "symbolic"])
def test_graph_gives_the_models_numbers(name: str, tracing_mode: str) -> None:
    model, forward, inputs = made(name)
    before = {key: (value, value.clone()) for key, value in model.state_dict(keep_vars=True).items()}
    with torch.no_grad():
        gm = make_fx(forward, tracing_mode=tracing_mode)(*inputs(2, 9))
        sizes = [(2, 9)] if tracing_mode == "fake" else [(2, 9), (3, 9 if name in FIXED_LENGTH else 13)]
        for batch, length in sizes:
            given = inputs(batch, length)
            assert torch.equal(gm(*given), forward(*given)), f"batch {batch}, length {length}"
    for key, value in model.state_dict(keep_vars=True).items():
        assert value is before[key][0]
        assert torch.equal(value, before[key][1])
    assert not any(isinstance(node.target, str) and "fake" in node.target for node in gm.graph.nodes)
    vals = [node.meta.get("val") for node in gm.graph.nodes if node.op == "call_function"]
    assert sum(type(val) is FakeTensor for val in vals) > len(vals) // 2


DEEP = {**SMALL, "num_hidden_layers": 5}
DEEP_MODELS: dict[str, Any] = {
    "bert": lambda: hf.BertModel(hf.BertConfig(**DEEP)),
    "gpt2 that scales by the layer": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(n_embd=32, n_layer=5, n_head=4, vocab_size=WORDS, bos_token_id=1, eos_token_id=1,
                      scale_attn_by_inverse_layer_idx=True)
    ),
    "smollm, some layers without positions": lambda: hf.SmolLM3ForCausalLM(
        hf.SmolLM3Config(**DEEP, num_key_value_heads=2, no_rope_layer_interval=2, pad_token_id=0, bos_token_id=1,
                         eos_token_id=2)
    ),
}  # fmt: skip
"""Models with several layers, some of which differ."""


@pytest.mark.parametrize("name", DEEP_MODELS)
@pytest.mark.parametrize("tracing_mode", ["fake", "symbolic"])
def test_models_with_several_layers(name: str, tracing_mode: str) -> None:
    torch.manual_seed(0)
    model = DEEP_MODELS[name]().eval()

    def forward(ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model(input_ids=ids)[0]
        return result

    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    (ids,) = tokens(2, 9)
    with torch.no_grad():
        graph = make_fx(forward, tracing_mode=tracing_mode)(ids)
        assert torch.equal(graph(ids), forward(ids))


# Mixtral's experts run through other operators while they are traced: its gradients agree to rounding, and AdamW would
# make more of the difference where a gradient is near zero.
@pytest.mark.parametrize(("name", "make"), [("llama", AdamW), ("gpt2", AdamW), ("mixtral", SGD)])
def test_training_step_of_a_language_model(name: str, make: Any) -> None:
    model, _, inputs = made(name)
    twin, _, _ = made(name)
    twin.load_state_dict(model.state_dict())

    def loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
        return result

    step = capture_step(model, loss, make(model.parameters()), *inputs(2, 9))
    optimizer = make(twin.parameters())
    for _ in range(2):
        (ids,) = inputs(2, 9)
        optimizer.zero_grad()
        expected = loss(twin, ids)
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(step(ids), expected.detach(), rtol=1e-6, atol=1e-6)
    for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("is_fused", [False, True])
def test_an_encoder_without_its_fused_kernels(tracing_mode: str, with_mask: bool, is_fused: bool) -> None:
    """In eval mode and without gradients, eager takes fused kernels for whole layers; the graph has the steps."""
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2).eval()
    x, padding = torch.randn(3, 5, 16), torch.arange(5).expand(3, 5) > 3

    def f(x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = encoder(x, src_key_padding_mask=padding if with_mask else None)
        return result

    torch.backends.mha.set_fastpath_enabled(is_fused)
    try:
        with torch.no_grad():
            graph = make_fx(f, tracing_mode=tracing_mode)(x, padding)
            found, expected = graph(x, padding), f(x, padding)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    torch.testing.assert_close(found, expected)
    assert is_fused or torch.equal(found, expected)


PADDING = {
    "last": [[0, 0, 1, 1], [0, 0, 0, 1]],
    "a whole row": [[1, 1, 1, 1], [0, 0, 0, 1]],
    "first": [[1, 1, 0, 0], [0, 0, 0, 1]],
    "in the middle": [[0, 1, 0, 1], [0, 0, 0, 0]],
    "none": [[0, 0, 0, 0], [0, 0, 0, 0]],
}


@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("mask_check", [True, False])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_an_encoder_drops_padding_as_eager_does(
    tracing_mode: str, mask_check: bool, dtype: torch.dtype
) -> None:
    """Eager gives zeros in the place of padding, if that comes last in each row: one graph does so for any mask."""
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2, torch.nn.LayerNorm(16), mask_check=mask_check).eval()
    torch.nn.init.normal_(encoder.norm.bias)
    x = torch.randn(2, 4, 16)
    masks = [torch.tensor(rows, dtype=torch.bool) for rows in PADDING.values()]
    if dtype is not torch.bool:
        masks = [torch.zeros(2, 4).masked_fill(mask, float("-inf")) for mask in masks]

    def f(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = encoder(x, src_key_padding_mask=mask)
        return result

    with torch.no_grad():
        graph = make_fx(f, tracing_mode=tracing_mode)(x, masks[0])
        for mask in masks:
            torch.testing.assert_close(graph(x, mask), f(x, mask))


def test_an_encoder_keeps_its_padding_where_gradients_are_on() -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2).eval()
    x, mask = torch.randn(2, 4, 16), torch.tensor(PADDING["last"], dtype=torch.bool)
    graph = make_fx(lambda x, mask: encoder(x, src_key_padding_mask=mask), tracing_mode="fake")(x, mask)
    assert torch.equal(graph(x, mask), encoder(x, src_key_padding_mask=mask))


@pytest.mark.parametrize("tracing_mode", ["fake", "symbolic"])
@pytest.mark.parametrize("name", ["Deberta", "DebertaV2"])
def test_models_with_scripted_functions(name: str, tracing_mode: str) -> None:
    config = getattr(hf, f"{name}Config")(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=99,
        max_position_embeddings=64, relative_attention=True, pos_att_type=["p2c", "c2p"], max_relative_positions=16,
        **({"position_buckets": 8} if name == "DebertaV2" else {}),
    )  # fmt: skip
    model = getattr(hf, f"{name}Model")(config).eval()

    def f(ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model(ids, return_dict=False)[0]
        return result

    # Deberta asks which is less, the length or max_relative_positions.
    ids, other = torch.randint(3, 99, (2, 14)), torch.randint(3, 99, (3, 24 if name == "DebertaV2" else 9))
    with torch.no_grad():
        graph = make_fx(f, tracing_mode=tracing_mode)(ids)
        assert torch.equal(graph(ids), f(ids))
        if tracing_mode == "symbolic":
            assert torch.equal(graph(other), f(other))
