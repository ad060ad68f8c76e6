"""The places of torch that can be made to answer otherwise while a fake mode is active, and the switch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import HigherOrderOperator

Patch = Callable[[Any], Any]
_INITIAL, _DLPACK = ("uniform", "normal", "trunc_normal", "fill", "zero"), ("from_dlpack", "to_dlpack")
RANDOM_STATE, SAMPLERS = ("get_rng_state", "set_rng_state", "manual_seed"), ("Random", "SubsetRandom", "Distributed")
_LEVELS = ("grad", "jvp")
POOLING_TO_INTEGERS = """adaptive_max_pool2d adaptive_max_pool3d fractional_max_pool2d fractional_max_pool3d""".split()
"""Operators to whose schemas the output's size is made of plain integers."""
PLACES: dict[str, tuple[Any, str]] = {
    "cuda autocast is unavailable": (torch.cuda.amp.common, "amp_definitely_not_available"),
    "cuda has bfloat16": (torch.cuda, "is_bf16_supported"),
    "cudnn takes a tensor": (torch.backends.cudnn, "is_acceptable"),
    "leaving autocast": (torch.amp.autocast_mode.autocast, "__exit__"),
    "grouping by device": (torch._C, "_group_tensors_by_device_and_dtype"),
    **{f"deepcopy of a {kind.__name__}": (kind, "__deepcopy__") for kind in (torch.Tensor, torch.nn.Parameter)},
    **{name: (torch, name) for name in ("compile", "ctc_loss", "linspace", "set_default_dtype")},
    "higher-order operators": (HigherOrderOperator, "dispatch"),
    "graphs of functionalization": (sys.modules["torch._higher_order_ops.utils"], "_maybe_fake_tracing"),
    "graphs of flex attention": (sys.modules["torch._higher_order_ops.flex_attention"], "make_fx"),
    "linearize": (sys.modules["torch._functorch.eager_transforms"], "make_fx"),
    "what dynamo leaves alone": (sys.modules["torch._functorch.eager_transforms"], "lazy_dynamo_disallow"),
    "operands of cond": (sys.modules["torch._higher_order_ops.cond"], "validate_subgraph_args_types"),
    **{f"initial {name}": (torch.nn.init, f"_no_grad_{name}_") for name in _INITIAL},
    **{f"initial {kind.__name__}": (kind, "reset_parameters") for kind in (torch.nn.Linear, torch.nn.modules.conv._ConvNd)},
    "encoders with padding": (torch.nn.TransformerEncoder, "forward"),
    "levels of vmap": (sys.modules["torch._functorch.vmap"], "vmap_increment_nesting"),
    **{f"levels of {t}": (sys.modules["torch._functorch.eager_transforms"], f"{t}_increment_nesting") for t in _LEVELS},
    "recurrent layers": (sys.modules["torch._decomp.decompositions"], "_rnn_helper"),
    "unpacking a sequence": (torch._VF, "_pad_packed_sequence"),
    "padding sequences": (torch._C._nn, "pad_sequence"),
    "broadcasting a mask": (torch.masked._ops, "_input_mask"),
    **{f"least size in {place.__name__}": (place, "min") for place in (torch._lowrank, torch.nn.functional)},
    **{name: (torch.nn.functional, name) for name in ("linear_cross_entropy", "adaptive_avg_pool1d", "one_hot")},
    **{f"share of {name}": (torch.nn.functional, name) for name in ("fractional_max_pool2d", "fractional_max_pool3d")},
    **{name: (torch._C._nn, name) for name in POOLING_TO_INTEGERS},
    **{f"places of {place.__name__}.tensor_split": (place, "tensor_split") for place in (torch, torch.Tensor)},
    **{f"order of {name}": (getattr(torch.utils.data, f"{name}Sampler"), "__iter__") for name in SAMPLERS},
    "loading by workers": (torch.utils.data.DataLoader, "_get_iterator"),
    "beginning to load data": (torch.utils.data.dataloader._BaseDataLoaderIter, "__init__"),
    "splitting data": (torch.utils.data.dataset, "randperm"),
    "applying a function of autograd": (torch.autograd.Function, "apply"),
    "making a subclass": (torch.Tensor, "_make_subclass"),
    **{name: (torch.Tensor, name) for name in ("device", "is_cuda", "as_subclass", "tolist", "data")},
    "scripted functions": (torch.jit.ScriptFunction, "__call__"),
    "symbols among arguments": (torch.SymInt, "__torch_function__"),
    **{f"{place.__name__}.{name}": (place, name) for place in (torch, torch.utils.dlpack) for name in _DLPACK},
    **{f"{place.__name__}.{name}": (place, name) for place in (torch, torch.random) for name in RANDOM_STATE},
    **{f"{place.__name__}.Generator": (place, "Generator") for place in (torch, torch._C)},
    "torch.lstm": (torch, "lstm"), **{name: (torch._VF, name) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
    **{name: (torch._C._nn, name) for name in dir(torch._C._nn) if name.lstrip("_").startswith("upsample_")},
}
"""Where torch can be made to answer otherwise for as long as a fake mode is active."""
_patches: dict[str, Patch] = {}


def while_active(place: str) -> Callable[[Patch], Patch]:
    """Register a function from torch's own object in this place to the one that replaces it."""

    def register(patch: Patch) -> Patch:
        _patches[place] = patch
        return patch

    return register


WITH_CONCRETE_SIZES = tuple(
    name for name, (place, _) in PLACES.items()
    if place in (torch._C._nn, torch._VF) and name not in POOLING_TO_INTEGERS
)[2:]  # fmt: skip
"""Functions whose C++ side reads sizes as plain integers; torch has Python versions that do not."""


_originals: list[tuple[Any, str, Any]] = []
_replacements: dict[str, tuple[Any, Any, Any]] = {}
"""What was put in a place when it was last patched, and for what: made once, as long as that stands there."""
_MISSING = object()


def _patch() -> None:
    """For as long as any fake mode is active anywhere."""
    for key, patch in _patches.items():
        place, name = PLACES[key]
        stands_there, replaced, replacement = _replacements.get(key, (None, None, None))
        original = vars(place).get(name, _MISSING)  # as it stands there: static or not
        if original is not stands_there or (original is _MISSING and getattr(place, name, None) is not replaced):
            replaced = getattr(place, name, None)
            replacement = patch(replaced)
            _replacements[key] = original, replaced, replacement
        _originals.append((place, name, original))
        setattr(place, name, replacement)


def _unpatch() -> None:
    while _originals:
        place, name, original = _originals.pop()
        if original is _MISSING:
            delattr(place, name)
        else:
            setattr(place, name, original)
