"""Models with quantised weights (QLoRA): bitsandbytes, through the stand-ins that it registers for its own operators.

Its kernels are operators of `torch.library` with a registered fake, so they run on stand-ins as any other operator does. Its
parameters are subclasses of `nn.Parameter` that hold what a kernel needs as attributes; on stand-ins they are plain
parameters with the same attributes. A model is quantised when it is loaded, layer by layer, on its device, as bitsandbytes
does it.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from understudy import _torch
from understudy.errors import UnderstudyError
from understudy.simulation.libraries import when_imported
from understudy.simulation.run_notes import add_note

Function = Callable[..., Any]


class QuantisationError(UnderstudyError, ImportError):
    """Weights are quantised in a way that is not rehearsed, or by a library that is not here."""


ATTRIBUTES: dict[str, dict[str, Any]] = {
    "Params4bit": {"quant_state": None, "blocksize": 64, "compress_statistics": True, "quant_type": "fp4",
                   "quant_storage": torch.uint8, "module": None, "bnb_quantized": False},
    "Int8Params": {"has_fp16_weights": False, "CB": None, "SCB": None},
}  # fmt: skip
"""Names of parameters, and their defaults."""


@when_imported("bitsandbytes.nn.modules", "Params4bit.__new__", "Int8Params.__new__")
def make_plain_parameters(original: Function) -> Any:
    """torch refuses a stand-in as the data of another subclass: it becomes a plain parameter with the same attributes."""

    def make(cls: Any, data: Any = None, requires_grad: bool = False, **attributes: object) -> Any:
        if _torch.active_fake_mode() is None:
            return original(cls, data, requires_grad, **attributes)
        data = torch.empty(0) if data is None else data
        parameter = torch.nn.Parameter(data.detach(), requires_grad and data.is_floating_point())
        given = {name: value for name, value in attributes.items() if value is not None}
        for name, value in {**ATTRIBUTES[cls.__name__], **given}.items():
            setattr(parameter, name, value)
        return parameter

    return staticmethod(make)


@when_imported("bitsandbytes.nn.modules", "Linear4bit.forward", "Linear8bitLt.forward")
def quantise_before_use(original: Function) -> Function:
    """A layer that a script makes itself is quantised by `.to("cuda")`, which on a plain parameter only moves it."""

    def forward(self: object, x: torch.Tensor) -> Any:
        if _torch.active_fake_mode() is not None:
            _quantise_layer(self, x.device, None)
        return original(self, x)

    return forward


def _quantise_layer(layer: Any, device: Any, dtype: torch.dtype | None) -> None:
    """Quantise the weight on the device, unless that has been done."""
    functional = importlib.import_module("bitsandbytes.functional")
    weight = layer.weight
    if hasattr(weight, "quant_state"):
        if weight.quant_state is not None:
            return
        whole = torch.empty(weight.shape, dtype=dtype or weight.dtype, device=device)
        packed, state = functional.quantize_4bit(
            whole, blocksize=weight.blocksize, compress_statistics=weight.compress_statistics,
            quant_type=weight.quant_type, quant_storage=weight.quant_storage,
        )  # fmt: skip
        new = {"quant_state": state, "bnb_quantized": True}
        layer.quant_state = state
    else:
        if weight.has_fp16_weights or weight.dtype == torch.int8:
            return
        whole = torch.empty(weight.shape, dtype=torch.float16, device=device)
        packed, scales, _ = functional.int8_vectorwise_quant(whole)
        new = {"CB": packed, "SCB": scales}
        layer.state.threshold = 0.0
        add_note("8-bit layers: assuming inputs without outlier columns, which depend on data")
    del whole
    layer.weight = torch.nn.Parameter(packed, requires_grad=False)
    names = next(names for names in ATTRIBUTES.values() if new.keys() <= names.keys())
    for name in names:
        setattr(layer.weight, name, new.get(name, getattr(weight, name)))


# --- from_pretrained -------------------------------------------------------------------------------------------------


def find_quantisation(name: object, config: object, options: dict[str, Any]) -> Any:
    """The `BitsAndBytesConfig` of the call, or of the model's own configuration; None if there is none."""
    wanted = options.pop("quantization_config", None)
    wanted = getattr(config, "quantization_config", None) if wanted is None else wanted
    bits = [bits for bits in (4, 8) if options.pop(f"load_in_{bits}bit", False)]
    if wanted is None and not bits:
        return None
    transformers = importlib.import_module("transformers")
    if wanted is None:
        wanted = transformers.BitsAndBytesConfig(**{f"load_in_{bits[0]}bit": True})
    method = (
        wanted.get("quant_method", "?") if isinstance(wanted, dict) else getattr(wanted, "quant_method", "?")
    )
    method = str(getattr(method, "value", method))
    if "bitsandbytes" not in method:
        raise QuantisationError(
            f"from_pretrained({str(name)!r}): weights quantised by {method!r} are not rehearsed; bitsandbytes (4 and 8 "
            "bits) is. Rehearse the model without its quantization_config for an upper bound"
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        raise QuantisationError(
            f"from_pretrained({str(name)!r}): its weights are quantised by bitsandbytes, which is not installed: "
            "pip install bitsandbytes (no GPU is needed)"
        )
    return transformers.BitsAndBytesConfig.from_dict(wanted) if isinstance(wanted, dict) else wanted


def quantise_model(model: torch.nn.Module, wanted: Any, device: object, dtype: torch.dtype) -> None:
    """Exchange its linear layers for those of bitsandbytes, on the device: one after the other, as when it is loaded."""
    integration = importlib.import_module("transformers.integrations.bitsandbytes")
    quantizers = importlib.import_module("transformers.quantizers.auto")
    quantizer = quantizers.AutoHfQuantizer.from_config(wanted)
    kept = quantizer.get_modules_to_not_convert(
        model, wanted.llm_int8_skip_modules, getattr(model, "_keep_in_fp32_modules", None)
    )
    sizes = {
        path: module.bias for path, module in model.named_modules() if isinstance(module, torch.nn.Linear)
    }
    integration.replace_with_bnb_linear(model, modules_to_not_convert=kept, quantization_config=wanted)
    modules = importlib.import_module("bitsandbytes.nn.modules")
    count = 0
    for path, layer in model.named_modules():
        if isinstance(layer, (modules.Linear4bit, modules.Linear8bitLt)):
            layer.bias = sizes[path]
            _quantise_layer(layer, device, dtype)
            count += 1
    model.hf_quantizer = quantizer
    quantizer.modules_to_not_convert = kept
    quantizer._process_model_after_weight_loading(model)
    model.quantization_method = wanted.quant_method
    add_note(f"{count} linear layers quantised by bitsandbytes ({wanted.quantization_method()})")
