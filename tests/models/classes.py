"""The model classes of `transformers`, `timm` and `diffusers`: small ones, with inputs on which eager runs.

Nothing is known of most of them but their signatures: each kind of input is tried until the model runs on one. A class
that can't be made small, or that runs on none of these, is not counted.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.exporting.models import SMALL, prepare_transformers

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

Inputs = dict[str, Any]
MakeInputs = Callable[[int, int], Inputs]
"""Inputs for a batch size and a length; they are made on the device that is the default one."""

MOST_PARAMETERS = 30_000_000
SECONDS_TO_FIND = 3
IMAGE_SIDE = 32
WORDS = 90
FLAT_PATCHES = (4, 4)
"""The patches of all images in one dimension; a grid tells how many each of them has."""


class NotCounted(Exception):
    """Eager does not construct the class in a small configuration, or does not run it on any of the inputs."""


@dataclass(frozen=True)
class Case:
    """A model class: `build()` constructs it, `inputs(batch, length)` are the keyword arguments of its forward."""

    build: Callable[[], nn.Module]
    inputs: MakeInputs
    fixed: Inputs = field(default_factory=dict)
    "Other arguments of forward, which are no tensors."


def find_case(name: str) -> Case:
    """The case of `library/class`."""
    library, _, class_name = name.partition("/")
    return _LIBRARIES[library].find(class_name)


def list_names(libraries: tuple[str, ...] = ("transformers", "timm", "diffusers")) -> list[str]:
    """All classes of the libraries that are installed."""
    installed = [name for name in libraries if importlib.util.find_spec(name) is not None]
    return [f"{library}/{name}" for library in installed for name in _LIBRARIES[library].names()]


def _run_first(build: Callable[[], nn.Module], candidates: Iterator[tuple[MakeInputs, Inputs]]) -> Case:
    """The first inputs on which eager runs in training and in evaluation."""
    model = build()
    reasons = []
    for inputs, fixed in candidates:
        try:
            with torch.no_grad():
                for training in (True, False):
                    model.train(training)(**inputs(2, 8), **fixed)
            return Case(build, inputs, fixed)
        except Exception as error:  # the next kind of input may fit
            reasons.append(f"{'+'.join(inputs(2, 8))}: {type(error).__name__}: {str(error)[:120]}")
    raise NotCounted(" | ".join(reasons))


def _make_quickly(build: Callable[[], nn.Module]) -> Any:
    """The model without its data, if it is not too large."""
    try:
        with torch.device("meta"):
            model = build()
    except Exception:  # a few compute with values while they are constructed
        model = build()
    count = sum(parameter.numel() for parameter in model.parameters())
    if count > MOST_PARAMETERS:
        raise NotCounted(f"{count / 1e6:.0f} million parameters")
    return model


# --- transformers ----------------------------------------------------------------------------------------------------

_SMALL: dict[str, Any] = {
    **SMALL, "embed_dim": 32, "ffn_hidden_size": 64, "mlp_dim": 64, "num_encoder_layers": 2, "num_decoder_layers": 2,
    "depth": 2, "mlp_ratio": 2, "num_channels": 3, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, "layerdrop": 0.0,
    "max_source_positions": 8, "num_mel_bins": 16, "num_labels": 3, "projection_dim": 16, "num_codebooks": 2,
    "apply_spec_augment": False, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "shared_expert_intermediate_size": 32, "encoder_intermediate_size": 64, "decoder_intermediate_size": 64,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "codebook_size": 16, "codebook_dim": 8,
    "encoder_hidden_size": 32, "decoder_hidden_size": 32, "decoder_num_hidden_layers": 2, "encoder_num_hidden_layers": 2,
    "decoder_num_attention_heads": 4, "encoder_num_attention_heads": 4, "num_queries": 6, "query_length": 4,
    "fusion_hidden_size": 16, "context_length": 8, "prediction_length": 4, "num_frames": 4, "num_mlp_layers": 2,
    "window_size": 4,
}  # fmt: skip
"""More names for what makes a model small."""
_SMALL_LISTS: dict[str, Callable[[int], list[int]]] = {
    "depths": lambda n: [1] * n, "layer_depths": lambda n: [1] * n, "hidden_sizes": lambda n: [16 * 2**i for i in range(n)],
    "embed_dims": lambda n: [16 * 2**i for i in range(n)], "num_heads": lambda n: [2**i for i in range(n)],
    "num_attention_heads": lambda n: [2**i for i in range(n)], "conv_dim": lambda n: [16] * n, "tdnn_dim": lambda n: [16] * n,
    "encoder_hidden_sizes": lambda n: [16 * 2**i for i in range(n)], "neck_hidden_sizes": lambda n: [16] * n,
}  # fmt: skip
"""Where a configuration has a list, one of the same length."""
_KEEPS_WIDTHS = frozenset({
    "vocab_size", "num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers", "n_layers", "depth",
    "num_encoder_layers", "num_decoder_layers", "decoder_num_hidden_layers", "encoder_num_hidden_layers", "depths",
    "layer_depths", "encoder_layerdrop", "decoder_layerdrop", "layerdrop", "apply_spec_augment", "num_labels", "num_queries",
    "pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "image_size", "num_experts", "num_local_experts",
    "n_routed_experts", "num_experts_per_tok", "max_source_positions", "context_length", "prediction_length",
})  # fmt: skip
"""What makes a model small and leaves its parts as wide as they are, so that they fit together."""


Shrink = Callable[[str, Any], Any]
"""A smaller value for an attribute of a configuration; None to leave it."""


def _small_config(default: Any, shrink: Shrink, depth: int = 0) -> Any:
    """A configuration like this one, with smaller values. A part keeps what its whole gave it."""
    values: dict[str, Any] = {}
    for name, value in vars(default).items():
        is_part = hasattr(value, "model_type") and depth < 3
        values[name] = _small_config(value, shrink, depth + 1) if is_part else shrink(name, value)
    others = getattr(type(default), "attribute_map", {})
    for name in _SMALL:  # names that are properties for others, as GPT-2's
        if values.get(name) is None and name not in others and isinstance(_read(default, name), (int, float)):
            values[name] = shrink(name, _read(default, name))
    heads, keys = (_read(default, name) for name in ("num_attention_heads", "num_key_value_heads"))
    if values.get("num_key_value_heads") and heads == keys:
        values["num_key_value_heads"] = values.get("num_attention_heads")
    return type(default)(
        **{
            **_given_by_whole(default, depth),
            **{name: value for name, value in values.items() if value is not None},
        }
    )


def _given_by_whole(part: Any, depth: int) -> dict[str, Any]:
    """What a part of a configuration has that is not its default. Lists and tables have an entry for each layer."""
    given = part.to_diff_dict() if depth else {}
    names = inspect.signature(type(part).__init__).parameters
    return {
        name: value for name, value in given.items() if name in names and not isinstance(value, (list, dict))
    }


def _read(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except Exception:  # a few configurations have attributes that can't be read
        return None


def _choose_small(config: Any) -> Iterator[Shrink]:
    """All that makes a model small; more layers, as there may be several kinds of them; its own widths, or parts of them; all
    but one."""
    yield _take_small
    yield lambda name, value: 8 if name == "num_hidden_layers" else _take_small(name, value)
    yield partial(_divide, 1)
    yield partial(_divide, 16)
    yield partial(_divide, 4)
    names = set(_names_in(config))
    for omitted in dict.fromkeys(("head_dim", "hidden_size", *_SMALL, *_SMALL_LISTS)):
        if omitted in names and omitted not in ("num_hidden_layers", "vocab_size"):
            yield lambda name, value, omitted=omitted: None if name == omitted else _take_small(name, value)


def _take_small(name: str, value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return _SMALL_LISTS[name](len(value)) if name in _SMALL_LISTS else None
    if name not in _SMALL or isinstance(value, dict):
        return None
    return float(_SMALL[name]) if isinstance(value, float) else _SMALL[name]


def _divide(by: int, name: str, value: Any) -> Any:
    """Widths and numbers of heads, divided. What there is a number of for its own sake is as small as can be."""
    if name in _KEEPS_WIDTHS:
        return _take_small(name, value)
    if isinstance(value, (list, tuple)):
        return (
            [_divide(by, name, each) or each for each in value]
            if all(type(each) is int for each in value)
            else None
        )
    is_width = (
        type(value) is int
        and (value >= 256 or "heads" in name)
        and not any(word in name for word in ("token", "_id", "position"))
    )
    return value // by if is_width and by > 1 and value % by == 0 else None


def _names_in(config: Any) -> Iterator[str]:
    yield from (*vars(config), *getattr(type(config), "attribute_map", {}))
    for part in vars(config).values():
        if hasattr(part, "model_type"):
            yield from _names_in(part)


def _build_transformers(kind: Any, config: Any) -> Callable[[], nn.Module]:
    for part in (config, getattr(config, "text_config", None), getattr(config, "decoder", None)):
        if hasattr(part, "use_cache"):
            part.use_cache = False

    def build() -> nn.Module:
        torch.manual_seed(0)
        return kind(config)  # type: ignore[no-any-return]

    return build


def _find_transformers(class_name: str) -> Case:
    """In the first small configuration whose parts fit together."""
    prepare_transformers()
    import transformers

    kind = getattr(transformers, class_name)
    default = kind.config_class()
    end = time.process_time() + SECONDS_TO_FIND
    reason = ""
    for shrink in _choose_small(default):
        try:
            build = _build_transformers(kind, _small_config(default, shrink))
            return _run_first(build, _transformers_inputs(_make_quickly(build)))
        except Exception as error:
            reason = reason or f"{type(error).__name__}: {str(error)[:400]}"
        if time.process_time() > end:
            break
    raise NotCounted(reason)


def _transformers_inputs(model: Any) -> Iterator[tuple[MakeInputs, Inputs]]:
    parameters = inspect.signature(model.forward).parameters
    fixed = {"use_cache": False} if "use_cache" in parameters else {}
    required = tuple(
        name
        for name, each in parameters.items()
        if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD
    )
    main = model.main_input_name if model.main_input_name in parameters else ""
    kinds = [
        (main, "decoder_input_ids"), (main,), required, ("input_ids", "pixel_values"), ("input_ids",), ("pixel_values",),
        ("input_ids", "bbox"), ("input_ids", "attention_mask"), ("input_values",), ("input_features",),
        ("input_features", "decoder_input_ids"), ("pixel_values", "decoder_input_ids"), ("input_features", "attention_mask"),
        ("input_features", "input_features_mask"), ("input_ids", "input_features"), ("input_ids", "input_values"),
        ("inputs_embeds",), ("past_values", "past_time_features", "past_observed_mask"), ("past_values",),
        ("pixel_values", "input_ids", "bbox"), ("hidden_states",), ("inputs",),
    ]  # fmt: skip
    for names in dict.fromkeys(kinds):
        if names and names[0] and all(name in parameters for name in names) and {*required} <= {*names}:
            for make in _sizes_of_inputs(model.config, names):
                yield make, fixed


def _sizes_of_inputs(config: Any, names: tuple[str, ...]) -> Iterator[MakeInputs]:
    """Images and sounds have sizes of which the configuration does not tell all."""
    sizes: Iterable[tuple[int, ...]] = [(0,)]
    if "grid_thw" in names:
        sizes = [FLAT_PATCHES]
    elif any(name in names for name in ("pixel_values", "pixel_values_videos")):
        sizes = [(side, side) for side in dict.fromkeys((_side_of(config), IMAGE_SIDE, 64, 224))]
    elif "input_values" in names:
        longest = _attribute_of(config, "max_length", default=64)
        sizes = [
            (16,),
            (64,),
            (1600,),
            (4000,),
            (1, 1600),
            (longest, _attribute_of(config, "num_mel_bins", default=16)),
        ]
    elif "input_features" in names:
        width = _attribute_of(
            config, "num_mel_bins", "feature_size", "feature_projection_input_dim", "input_dim", default=16
        )
        longest = 2 * _attribute_of(config, "max_source_positions", default=8)
        sizes = [
            (width, 16),
            (width, 64),
            (width, longest),
            (16, width),
            (64, width),
            (1, 64, width),
            (1600,),
        ]
    for size in sizes:
        yield lambda batch, length, size=size: {
            name: _make_input(config, name, batch, length, size) for name in names
        }


def _side_of(config: Any) -> int:
    for part in (config, *(value for value in vars(config).values() if hasattr(value, "model_type"))):
        side = getattr(part, "image_size", None)
        if side:
            return int(side[0]) if isinstance(side, (list, tuple)) else int(side)
    return IMAGE_SIDE


def _attribute_of(config: Any, *names: str, default: int) -> int:
    for part in (config, *(value for value in vars(config).values() if hasattr(value, "model_type"))):
        for name in names:
            if isinstance(getattr(part, name, None), int):
                return int(getattr(part, name))
    return default


def _make_input(config: Any, name: str, batch: int, length: int, size: tuple[int, ...]) -> torch.Tensor:
    width = _attribute_of(config, "hidden_size", "d_model", default=32)
    match name:
        case "grid_thw":
            return torch.tensor([[1, 4, 4]] * batch)
        case "pixel_values" | "hidden_states" if size == FLAT_PATCHES:
            channels, side = (
                _attribute_of(config, "in_channels", "num_channels", default=3),
                _attribute_of(config, "patch_size", default=8),
            )
            return torch.randn(
                batch * 16, channels * _attribute_of(config, "temporal_patch_size", default=1) * side**2
            )
        case "pixel_values":
            return torch.randn(batch, _attribute_of(config, "num_channels", "in_channels", default=3), *size)
        case "input_values" | "input_features":
            return torch.randn(batch, *size)
        case "input_features_mask":
            return torch.ones(batch, size[-1], dtype=torch.int64)
        case "attention_mask":
            return torch.ones(batch, length, dtype=torch.int64)
        case "past_observed_mask":
            return torch.ones(batch, length)
        case "bbox":
            return torch.zeros(batch, length, 4, dtype=torch.int64)
        case "past_values":
            return torch.randn(batch, _attribute_of(config, "context_length", default=length))
        case _ if any(word in name for word in ("embeds", "embeddings", "states", "inputs")):
            return torch.randn(batch, length, width)
        case _:
            return torch.randint(3, WORDS, (batch, length))


def _transformers_names() -> list[str]:
    """The base class of every type, and the first class with a head that there is for it."""
    prepare_transformers()
    from transformers.models.auto import modeling_auto as auto

    names: dict[str, None] = {}
    for table in ("MODEL_MAPPING", "MODEL_FOR_CAUSAL_LM_MAPPING", "MODEL_FOR_MASKED_LM_MAPPING",
                  "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
                  "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING"):  # fmt: skip
        for value in sorted(getattr(auto, f"{table}_NAMES").values(), key=str):
            names.update(dict.fromkeys(value if isinstance(value, (list, tuple)) else [value]))
    return list(names)


# --- timm ------------------------------------------------------------------------------------------------------------


_LEAST = (
    "atto",
    "femto",
    "pico",
    "nano",
    "xxtiny",
    "xtiny",
    "xxs",
    "tiny",
    "xs",
    "b0",
    "_0",
    "18",
    "small",
    "_s",
    "_t",
    "lite",
    "mini",
)


def _timm_names() -> list[str]:
    """One model of each module of `timm.models`: one whose name says that it is small, if there is one."""
    prepare_transformers()
    timm = importlib.import_module("timm")
    return [
        _least(timm.list_models(module=module))
        for module in timm.list_modules()
        if timm.list_models(module=module)
    ]


def _least(names: list[str]) -> str:
    def rank(name: str) -> int:
        return next((place for place, word in enumerate(_LEAST) if word in name), len(_LEAST))

    return min(names, key=rank)


def _find_timm(name: str) -> Case:
    prepare_transformers()
    timm = importlib.import_module("timm")

    def build_with(**options: Any) -> Callable[[], nn.Module]:
        def build() -> nn.Module:
            torch.manual_seed(0)
            return timm.create_model(name, pretrained=False, num_classes=5, **options)  # type: ignore[no-any-return]

        return build

    reasons = []
    for options, side in (({"img_size": 64}, 64), ({}, 64), ({}, 128), ({}, 224)):
        try:
            build = build_with(**options)
            _make_quickly(build)
            return _run_first(build, iter([(_make_images(side), {})]))
        except Exception as error:  # a smaller image, or the size that it is made for
            reasons.append(str(error)[:150])
    raise NotCounted(" | ".join(reasons))


def _make_images(side: int) -> MakeInputs:
    return lambda batch, length: {"x": torch.randn(batch, 3, side, side)}


# --- diffusers -------------------------------------------------------------------------------------------------------


_SMALL_DIFFUSERS: dict[str, Any] = {
    "num_layers": 2, "num_single_layers": 1, "num_mmdit_layers": 1, "num_single_dit_layers": 1, "num_refiner_layers": 1,
    "num_attention_heads": 2, "attention_head_dim": 16, "num_kv_heads": 2, "num_key_value_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "hidden_size": 32, "inner_dim": 32, "dim": 32, "model_dim": 32, "embed_dim": 32,
    "cross_attention_dim": 32, "caption_channels": 32, "joint_attention_dim": 32, "caption_projection_dim": 32,
    "pooled_projection_dim": 32, "text_dim": 32, "text_embed_dim": 32, "freq_dim": 32, "ffn_dim": 64, "intermediate_size": 64,
    "norm_num_groups": 4, "layers_per_block": 1, "sample_size": 16, "sample_height": 16, "sample_width": 16,
    "sample_frames": 4, "time_embed_dim": 32, "axes_dims_rope": (4, 4, 8), "rope_axes_dim": (4, 4, 8), "n_layers": 2,
    "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2, "cap_feat_dim": 32, "axes_dims": [4, 4, 8], "num_hidden_layers": 2,
    "depth": 2, "num_heads": 2, "encoder_hidden_size": 32, "vocab_size": 99, "codebook_size": 90, "cond_embed_dim": 32,
    "text_embed_dim_2": 32, "num_cross_attention_heads": 2, "cross_attention_head_dim": 16, "num_res_blocks": 1,
    "base_dim": 16, "z_dim": 4, "embedding_dim": 32, "num_embeddings": 7, "context_in_dim": 32, "text_states_dim": 32,
    "mlp_ratio": 2, "adm_in_channels": 32, "max_text_seq_length": 8, "text_seq_length": 8, "in_visual_dim": 4,
    "out_visual_dim": 4, "in_text_dim": 32, "in_text_dim2": 32, "time_dim": 32, "condition_dim": 32, "ff_dim": 64,
    "time_proj_dim": 32, "cross_attention_input_dim": 32, "global_states_input_dim": 32, "learn_sigma": False,
    "conditioning_channels": 3, "cross_attention_dim_t5": 32, "pooled_embed_dim": 32, "num_norm_groups": 4,
    "encoder_hidden_dim": 32, "decoder_hidden_dim": 32, "pos_embed_max_size": 16, "source_dim": 32, "target_dim": 32,
    "target_vocab_size": 99, "min_sequence_length": 8, "mid_dim": 16, "decoder_base_dim": 16, "num_vq_embeddings": 16,
    "text_hidden_dim": 32, "rope_max_seq_len": 64, "block_num_heads": 2, "micro_cond_encode_dim": 8, "groups": 4,
    "micro_cond_embed_dim": 40, "channels": [16, 16, 16, 16], "motion_num_attention_heads": 2, "ctrl_max_norm_num_groups": 4,
}  # fmt: skip
"""What makes a model of diffusers small."""
_WIDTHS = ("block_out_channels", "encoder_block_out_channels", "decoder_block_out_channels", "decode_block_out_channels",
           "down_block_out_channels", "up_block_out_channels", "ctrl_block_out_channels")  # fmt: skip
_DEPTHS = ("layers_per_block", "encoder_layers_per_block", "decoder_layers_per_block", "num_encoder_blocks",
           "num_decoder_blocks", "down_num_layers_per_block", "up_num_layers_per_block")  # fmt: skip


def _diffusers_names() -> list[str]:
    diffusers = importlib.import_module("diffusers")
    kinds = {name: getattr(diffusers, name) for name in diffusers._import_structure["models"]}
    return sorted(
        name for name, kind in kinds.items() if inspect.isclass(kind) and issubclass(kind, nn.Module)
    )


def _find_diffusers(name: str) -> Case:
    kind = getattr(importlib.import_module("diffusers"), name)
    options = _small_options(kind)

    def build() -> nn.Module:
        torch.manual_seed(0)
        return kind(**options)  # type: ignore[no-any-return]

    try:
        config = _make_quickly(build).config
    except Exception as error:
        raise NotCounted(f"construct: {type(error).__name__}: {str(error)[:200]}") from error
    return _run_first(build, _diffusers_inputs(kind, config))


def _small_options(kind: Any) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for name, parameter in inspect.signature(kind.__init__).parameters.items():
        default = parameter.default
        is_list = isinstance(default, (list, tuple))
        if name in _WIDTHS and is_list:
            options[name] = tuple(8 * 2 ** min(i, 2) for i in range(len(default)))
        elif name in _DEPTHS and is_list:
            options[name] = tuple(1 for _ in default)
        elif (
            name in _SMALL_DIFFUSERS
            and is_list == isinstance(_SMALL_DIFFUSERS[name], (list, tuple))
            and default is not None
        ):
            options[name] = _SMALL_DIFFUSERS[name]
    return options


def _diffusers_inputs(kind: Any, config: Any) -> Iterator[tuple[MakeInputs, Inputs]]:
    parameters = dict(list(inspect.signature(kind.forward).parameters.items())[1:])
    required = [name for name, parameter in parameters.items() if parameter.default is parameter.empty]
    optional = [
        name
        for name in ("encoder_hidden_states", "timestep", "pooled_projections", "pooled_projection")
        if name in parameters
    ]
    fixed: Inputs = {"return_dict": False} if "return_dict" in parameters else {}
    for names in (required, list(dict.fromkeys([*required, *optional]))):
        for rank in (4, 5, 3, 2):
            for side in (16, 32, 8):
                if rank == 5 or rank == 4 or side == 16:
                    yield _make_latents(names, config, rank, side), fixed


def _make_latents(names: list[str], config: Any, rank: int, side: int) -> MakeInputs:
    channels = next(
        (
            config[name]
            for name in ("in_channels", "in_dim", "in_visual_dim", "latent_channels", "io_channels")
            if config.get(name)
        ),
        3,
    )
    channels = channels if isinstance(channels, int) else channels[0]

    def make_one(name: str, batch: int, length: int) -> Any:
        match name:
            case "sample" | "hidden_states" | "x" | "controlnet_cond" | "z":
                shape = {2: (batch, channels), 3: (batch, side, channels), 4: (batch, channels, side, side),
                         5: (batch, channels, 5, side, side)}[rank]  # fmt: skip
                return torch.randn(shape)
            case "timestep" | "t" | "timestep_ratio" | "r_timestep" | "timestep_r":
                return torch.rand(batch)
            case "encoder_hidden_states" | "cap_feats" | "encoder_hidden_states_t5" | "source_hidden_states":
                return torch.randn(batch, length, 32)
            case (
                "pooled_projections"
                | "pooled_text_emb"
                | "pooled_projection"
                | "clip_text_pooled"
                | "proj_embedding"
            ):
                return torch.randn(batch, 32)
            case (
                "encoder_attention_mask"
                | "attention_mask"
                | "encoder_hidden_states_mask"
                | "text_embedding_mask"
            ):
                return torch.ones(batch, length, dtype=torch.int64)
            case "img_ids":
                return torch.zeros(side, 3)
            case "txt_ids":
                return torch.zeros(length, 3)
            case "height" | "width":
                return side
            case "num_frames":
                return 5
            case "guidance":
                return torch.ones(batch)
            case "class_labels":
                return torch.randint(0, 5, (batch,))
            case _:
                return torch.randint(3, 80, (batch, length))

    return lambda batch, length: {name: make_one(name, batch, length) for name in names}


@dataclass(frozen=True)
class Library:
    names: Callable[[], list[str]]
    find: Callable[[str], Case]


_LIBRARIES = {
    "transformers": Library(_transformers_names, _find_transformers),
    "timm": Library(_timm_names, _find_timm),
    "diffusers": Library(_diffusers_names, _find_diffusers),
}
