"""Small models of `transformers`, by the names of their configurations."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

SMALL: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 32, "d_model": 32, "n_embd": 32, "num_hidden_layers": 2, "n_layer": 2, "num_layers": 2,
    "encoder_layers": 2, "decoder_layers": 2, "num_attention_heads": 4, "n_head": 4, "num_heads": 4,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "intermediate_size": 64, "ffn_dim": 64, "d_ff": 64,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "d_kv": 8, "num_key_value_heads": 2, "num_kv_heads": 2, "head_dim": 8,
    "n_positions": 64, "max_position_embeddings": 64, "image_size": 32, "patch_size": 8, "word_embed_proj_dim": 32,
    "embedding_size": 32, "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4, "rotary_dim": 8, "num_experts": 4,
    "num_local_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 0, "n_inner": 64, "hidden_dropout": 0.0,
}  # fmt: skip
"""What makes a model small, under all of the names that configurations have for it."""

NUMBERS_OF_LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "num_layers",
    "encoder_layers",
    "decoder_layers",
    "n_layers",
)
_LIBRARIES = []


def prepare_transformers() -> None:
    """A torchvision without its C++ operators stops the import of transformers: two of them are declared."""
    if _LIBRARIES or importlib.util.find_spec("torchvision") is None:
        return
    for name in ("nms", "qnms"):
        try:
            torch._C._dispatch_find_schema_or_throw(f"torchvision::{name}", "")
        except RuntimeError:
            library = torch.library.Library("torchvision", "FRAGMENT")
            library.define(f"{name}(Tensor a, Tensor b, float c) -> Tensor")
            _LIBRARIES.append(library)


def small_config(model_type: str, layers: int = 2, **changes: Any) -> Any:
    prepare_transformers()
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    default = kind()
    values = {name: value for name, value in SMALL.items() if hasattr(default, name)}
    values.update((name, layers) for name in NUMBERS_OF_LAYERS if name in values)
    if values.get("num_key_value_heads") and getattr(default, "num_key_value_heads", None) == getattr(
        default, "num_attention_heads", None
    ):
        values["num_key_value_heads"] = 4
    return kind(**{**values, **changes})


def small_model(model_type: str, kind: str = "AutoModel", **changes: Any) -> torch.nn.Module:
    """A model in evaluation mode with random weights."""
    config = small_config(model_type, **changes)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    import transformers

    torch.manual_seed(0)
    return getattr(transformers, kind).from_config(config).eval()


def text_inputs(batch: int, length: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(batch * 100 + length)
    return {"input_ids": torch.randint(3, 99, (batch, length), generator=generator)}


def image_inputs(batch: int, size: int = 32) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(batch)
    return {"pixel_values": torch.randn(batch, 3, size, size, generator=generator)}


def leaves_of(value: Any) -> list[Any]:
    return torch.utils._pytree.tree_leaves(value)
