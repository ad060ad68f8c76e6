"""Whole models with symbolic sizes: they run, their outputs are in the user's names, and the guards are only those that
the program needs. The outputs are held against real runs at other sizes that the guards admit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.oracle import models
from understudy import FakeTensorMode, make_fx
from understudy.shapes.env import ShapeEnv
from understudy.shapes.input_dims import dims

BATCH, SEQ, TARGET, HEIGHT, WIDTH = dims("batch", "seq", "target", "height", "width")
TOKENS = (BATCH, SEQ)
FEATURES = (BATCH, SEQ, "static")
IMAGE = (BATCH, "static", HEIGHT, WIDTH)

pytestmark = pytest.mark.filterwarnings("ignore")


@dataclass(frozen=True)
class Model:
    build: Callable[[], nn.Module]
    inputs: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]]
    "Name of the argument → example's shape, dimensions."
    output: str
    guards: tuple[str, ...] = ()
    other_sizes: dict[str, int] | None = None
    "Sizes that the guards admit, for a real run."


def hugging(name: str) -> Callable[[], nn.Module]:
    return models.PROGRAMS[name].build


def small(model: str, config: str, **sizes: Any) -> Callable[[], nn.Module]:
    return models._hugging(model, config, **sizes)


def swin() -> nn.Module:
    return small("SwinForImageClassification", "SwinConfig", image_size=32, patch_size=2, embed_dim=8, depths=[1, 1],
                 num_heads=[2, 2], window_size=4, num_labels=3)()  # fmt: skip


def convnext() -> nn.Module:
    return small("ConvNextForImageClassification", "ConvNextConfig", hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1],
                 num_labels=3)()  # fmt: skip


LONGER = {"batch": 3, "seq": 17}

MODELS: dict[str, Model] = {
    # The last logits go unused: whether the others lie next to each other in memory depends on how many there are. The
    # table of positions has 16 rows.
    "transformer": Model(lambda: models.Decoder(lambda: models.Sdpa(32, 4, causal=True)), {"ids": ((2, 12), TOKENS)},
                         "f32[]", ("seq >= 3", "seq <= 16"), {"batch": 3, "seq": 9}),
    "transformer, written out": Model(lambda: models.Decoder(lambda: models.SelfAttention(32, 4)),
                                      {"ids": ((2, 12), TOKENS)}, "f32[]", ("seq >= 3", "seq <= 16"), {"batch": 3, "seq": 9}),
    "nn.TransformerEncoder": Model(models._encoder_layer, {"src": ((2, 6, 32), FEATURES)}, "f32[batch, seq, 32]", (), LONGER),
    "cnn": Model(models._cnn, {"input": ((2, 3, 16, 18), IMAGE)}, "f32[batch, 10]",
                 ("height >= 6", "width >= 6"), {"batch": 5, "height": 21, "width": 14}),
    "unet": Model(models.Unet, {"x": ((2, 3, 16, 24), IMAGE)}, "f32[batch, 3, 2*height, 2*width]",
                  ("height % 2 == 0", "width % 2 == 0"), {"batch": 3, "height": 2, "width": 12}),
    "lstm": Model(lambda: models.Recurrent(nn.LSTM), {"x": ((3, 5, 8), FEATURES)}, "f32[batch, 4]", (), LONGER),
    "gru, fixed length": Model(lambda: models.Recurrent(nn.GRU), {"x": ((3, 5, 8), (BATCH, "static", "static"))},
                               "f32[batch, 4]", (), {"batch": 7}),
    "gpt2": Model(hugging("gpt2"), {"input_ids": ((2, 12), TOKENS)}, "f32[batch, seq, 64]", (), LONGER),
    "llama": Model(hugging("llama"), {"input_ids": ((2, 12), TOKENS)}, "f32[batch, seq, 64]", (), LONGER),
    "llama, eager attention": Model(hugging("llama, eager attention"), {"input_ids": ((2, 12), TOKENS)},
                                    "f32[batch, seq, 64]", (), LONGER),
    "llama, padded": Model(hugging("llama"), {"input_ids": ((2, 12), TOKENS), "attention_mask": ((2, 12), TOKENS)},
                           "f32[batch, seq, 64]", (), LONGER),
    "mixtral": Model(hugging("mixtral"), {"input_ids": ((2, 12), TOKENS)}, "f32[batch, seq, 64]", (), LONGER),
    "bert": Model(hugging("bert"), {"input_ids": ((2, 12), TOKENS)}, "f32[batch, seq, 64]", ("seq <= 32",), LONGER),
    "t5": Model(hugging("t5"), {"input_ids": ((2, 12), TOKENS), "decoder_input_ids": ((2, 7), (BATCH, TARGET))},
                "f32[batch, target, 64]", (), {**LONGER, "target": 5}),
    "resnet": Model(hugging("resnet"), {"pixel_values": ((2, 3, 64, 96), IMAGE)}, "f32[batch, 3]", (),
                    {"batch": 3, "height": 70, "width": 65}),
    "vit": Model(hugging("vit"), {"pixel_values": ((2, 3, 32, 32), (BATCH, "static", "static", "static"))},
                 "f32[batch, 3]", (), {"batch": 5}),
    # Rows and columns of patches are joined to one dimension: how they lie in memory is another thing for one row.
    "convnext": Model(
        convnext, {"pixel_values": ((2, 3, 64, 96), IMAGE)}, "f32[batch, 3]",
        # The kernels have to fit; and of a map of one pixel, another layout would be the usual one.
        (*(f"{size} >= {least}" for least in (4, 8, 16, 32) for size in ("width", "height")),
         *(f"width >= {least} or height >= {least}" for least in (8, 16, 32, 64))),
        {"batch": 3, "height": 70, "width": 100},
    ),
    # The program itself asks for the padding, the window and the shift at each stage.
    "swin": Model(
        swin, {"pixel_values": ((2, 3, 32, 32), IMAGE)}, "f32[batch, 3]",
        ("width % 2 == 0", "height % 2 == 0", "height <= width", "height >= 10",
         "width % 8 == 0", "height % 8 == 0", "height >= 24", "width % 16 == 0", "height % 16 == 0"),
        {"batch": 3, "height": 48, "width": 64},
    ),
}  # fmt: skip


def tensor_of(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    if len(shape) > 2:
        return torch.randn(shape)
    return torch.ones(shape, dtype=torch.int64) if "mask" in name else torch.randint(0, 64, shape)


def result_of(output: Any) -> Any:
    for name in ("logits", "last_hidden_state"):
        if hasattr(output, name):
            return getattr(output, name)
    return output


def shape_at(shape: tuple[int, ...], dimensions: tuple[Any, ...], sizes: dict[str, int]) -> tuple[int, ...]:
    return tuple(
        sizes.get(getattr(dim, "name", ""), size) for size, dim in zip(shape, dimensions, strict=True)
    )


@pytest.mark.parametrize("name", MODELS)
def test_forward(name: str) -> None:
    model = MODELS[name]
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    with mode:
        module = model.build().eval()
    inputs = {
        argument: mode.from_tensor(tensor_of(argument, shape), source=argument, symbolic_context=dimensions)
        for argument, (shape, dimensions) in model.inputs.items()
    }
    with mode, torch.no_grad():
        spec = result_of(module(**inputs))._spec
    assert str(spec).partition("@")[0].partition("~")[0] == model.output
    assert {str(guard.condition) for guard in env.guards} == set(model.guards)
    assert not env.runtime_asserts
    if model.other_sizes is not None:
        _compare_with_real_run(model, env, spec, model.other_sizes)


def _compare_with_real_run(model: Model, env: ShapeEnv, spec: Any, sizes: dict[str, int]) -> None:
    values = {symbol: sizes[symbol.name] for symbol in env.hints}
    broken = [str(guard) for guard in env.guards if not guard.holds(values)]
    assert not broken, "choose other sizes"
    with torch.no_grad():
        real = result_of(
            model.build().eval()(**{
                name: tensor_of(name, shape_at(shape, dimensions, sizes))
                for name, (shape, dimensions) in model.inputs.items()
            })
        )  # fmt: skip
    assert tuple(number_at(size, values) for size in spec.shape) == tuple(real.shape)
    assert tuple(number_at(step, values) for step in spec.stride) == real.stride()


def number_at(size: Any, values: Any) -> Any:
    return (
        size
        if isinstance(size, int)
        else size.value.evaluate(values)
        if hasattr(size.value, "evaluate")
        else size.value
    )


TRAINED = (
    "transformer, written out",
    "nn.TransformerEncoder",
    "cnn",
    "lstm",
    "gpt2",
    "llama",
    "bert",
    "t5",
    "resnet",
)


@pytest.mark.parametrize("name", TRAINED)
def test_backward(name: str) -> None:
    """Gradients have the sizes of what they are gradients of, which asks nothing more of the inputs' sizes."""
    model = MODELS[name]
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    with mode:
        module = model.build().train()
    inputs = {
        argument: mode.from_tensor(tensor_of(argument, shape), source=argument, symbolic_context=dimensions)
        for argument, (shape, dimensions) in model.inputs.items()
    }
    with mode:
        models.loss_of(module(**inputs)).backward()
    for parameter in module.parameters():
        if parameter.grad is not None:
            assert parameter.grad.shape == parameter.shape
    assert {str(guard.condition) for guard in env.guards} <= {
        *model.guards,
        *NEEDED_BY_TRAINING.get(name, ()),
    }


# A gradient is spread over what was averaged, and masks over what they were drawn for: a size of 1 has other strides.
NEEDED_BY_TRAINING: dict[str, tuple[str, ...]] = {
    "cnn": ("width >= 10", "height >= 10"),
    "resnet": ("width >= 33", "height >= 33"),
}


@pytest.mark.parametrize("length", [1, 3])
def test_a_flag_of_attention_that_is_computed_of_sizes(length: int) -> None:
    """`a and b` is `a` where that is false: a symbol, which C++ would refuse."""

    def program(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, k, is_causal=q.shape[2] > 2 and k is not None)

    q, k = torch.randn(2, 4, length, 8), torch.randn(2, 4, 5, 8)
    graph = make_fx(program, tracing_mode="symbolic")(q, k)
    assert torch.equal(graph(q, k), program(q, k))
    assert bool(graph.shape_env.check(torch.randn(2, 4, 4 - length, 8), k))
