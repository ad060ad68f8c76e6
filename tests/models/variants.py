"""Other ways to run a model than the default one: `transformers/LlamaForCausalLM+bf16`.

Each is a function from a case to a case, so that every column of the sweep can be tried with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tests.models import classes
from tests.models.classes import Case, Inputs

Variant = Callable[[Case], Case]


def _change_model(case: Case, change: Callable[[Any], Any]) -> Case:
    def build() -> nn.Module:
        model = case.build()
        return change(model) or model  # type: ignore[no-any-return]

    return replace(case, build=build)


def _change_inputs(case: Case, change: Callable[[Inputs], Inputs]) -> Case:
    return replace(case, inputs=lambda batch, length: change(case.inputs(batch, length)))


def attend_eagerly(case: Case) -> Case:
    """Attention written out, and its weights among the results."""
    case = _change_model(case, lambda model: model.set_attn_implementation("eager"))
    return replace(case, fixed={**case.fixed, "output_attentions": True, "output_hidden_states": True})


def checkpoint(case: Case) -> Case:
    return _change_model(case, lambda model: model.gradient_checkpointing_enable())


def checkpoint_reentrant(case: Case) -> Case:
    return _change_model(case, lambda model: model.gradient_checkpointing_enable({"use_reentrant": True}))


def cast(dtype: torch.dtype) -> Variant:
    def change(inputs: Inputs) -> Inputs:
        return {
            name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()
        }

    return lambda case: _change_inputs(_change_model(case, lambda model: model.to(dtype)), change)


def give_labels(case: Case) -> Case:
    """Of a language model: the tokens themselves, one of which is left out."""

    def add(inputs: Inputs) -> Inputs:
        labels = inputs.get("decoder_input_ids", inputs["input_ids"]).clone()
        labels[:, 0] = -100
        return {**inputs, "labels": labels}

    return _change_inputs(case, add)


def give_padding(case: Case) -> Case:
    """A mask of tokens, of which the last is padding."""

    def add(inputs: Inputs) -> Inputs:
        mask = torch.ones_like(inputs["input_ids"])
        mask[:, -1] = 0
        return {**inputs, "attention_mask": mask}

    return _change_inputs(case, add)


class TwoSteps(nn.Module):
    """The last token by itself, with the cache of the others."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, **others: Any) -> Any:
        given = {**others, "use_cache": True}
        first = self.model(input_ids[:, :-1], **given)
        second = self.model(input_ids[:, -1:], past_key_values=first.past_key_values, **given)
        return first[0], second[0]


def decode(case: Case) -> Case:
    return _change_model(case, TwoSteps)


STRUCTURE = frozenset({"grid_thw", "merge_sizes", "spatial_shapes"})
"""Integers that say how the batch is made up, and so decide what a model does: how many patches each image has."""


class Bound(nn.Module):
    """A model some of whose arguments are constants."""

    def __init__(self, model: nn.Module, arguments: Inputs) -> None:
        super().__init__()
        self.model, self.arguments = model, arguments

    def forward(self, **others: Any) -> Any:
        return self.model(**others, **self.arguments)


def bind_structure(case: Case, size: tuple[int, int]) -> Case | None:
    """The structure of a batch of this size as a constant of the program, as a user would bind it by a closure. None if none of
    the inputs is one."""
    bound = {name: value for name, value in case.inputs(*size).items() if name in STRUCTURE}
    if not bound:
        return None
    case = _change_model(case, lambda model: Bound(model, bound))
    return _change_inputs(
        case, lambda inputs: {name: value for name, value in inputs.items() if name not in STRUCTURE}
    )


VARIANTS: dict[str, Variant] = {
    "eager attention": attend_eagerly, "checkpoint": checkpoint, "reentrant checkpoint": checkpoint_reentrant,
    "bf16": cast(torch.bfloat16), "fp16": cast(torch.float16), "fp64": cast(torch.float64), "labels": give_labels,
    "padding": give_padding, "two steps": decode,
}  # fmt: skip
"""By name."""


def find_case(name: str) -> Case:
    """The case of `library/class`, or of `library/class+variant`."""
    name, _, variant = name.partition("+")
    case = classes.find_case(name)
    return VARIANTS[variant](case) if variant else case
