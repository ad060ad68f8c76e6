"""Programs: two steps of training of small models, and the decoder of the README's figures in small."""

import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn

_DECODER = Path(__file__).parents[2] / "simulation" / "scripts" / "train_decoder.py"
_ADAMW = partial(torch.optim.AdamW, foreach=True)


def _train_decoder(*arguments: str) -> None:
    spec = importlib.util.spec_from_file_location("train_decoder", _DECODER)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.main(list(arguments))


def train(
    make: Callable[[], nn.Module],
    batch: dict[str, torch.Tensor],
    optimizer: Callable[..., torch.optim.Optimizer] = _ADAMW,
    autocast: torch.dtype | None = None,
    clip: bool = True,
) -> None:
    """Two steps, clipped, under autocast if asked; with a GradScaler where it is in float16."""
    model = make().to("cuda").train()
    optimize = optimizer(model.parameters())
    scaler = torch.amp.GradScaler("cuda", enabled=autocast is torch.float16)
    for _ in range(2):
        on_card = {name: value.to("cuda") for name, value in batch.items()}
        with torch.autocast("cuda", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
            out = model(**on_card)
            loss = getattr(out, "loss", out)
        scaler.scale(loss).backward()
        scaler.unscale_(optimize)
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimize)
        scaler.update()
        optimize.zero_grad()
        del out, loss, on_card


def tokens(rows: int, length: int, masked: bool = False) -> dict[str, torch.Tensor]:
    zeros = torch.zeros(rows, length, dtype=torch.long)
    return {"input_ids": zeros, "labels": zeros} | (
        {"attention_mask": torch.ones_like(zeros)} if masked else {}
    )


def _train_with_trainer(make: Callable[[], Any], batch: int = 8, length: int = 64, steps: int = 2) -> None:
    """Steps of masked language modelling, clipped, as `transformers.Trainer` does them."""
    import transformers as hf

    example = {name: torch.zeros(length, dtype=torch.long) for name in ("input_ids", "labels")}
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "max_steps": steps,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "max_grad_norm": 1.0,
        }
        arguments = hf.TrainingArguments(folder, per_device_train_batch_size=batch, **settings)
        hf.Trainer(model=make(), args=arguments, train_dataset=[example] * batch * steps).train()


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(256, 8, 1024, batch_first=True), 2)
        self.out = nn.Linear(256, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.out(self.layers(x)).mean()
        return result


def _checkpointed(make: Callable[[], Any]) -> Any:
    model = make()
    model.gradient_checkpointing_enable()
    return model


_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW, fused": partial(torch.optim.AdamW, fused=True),
    "AdamW, one by one": partial(torch.optim.AdamW, foreach=False),
    "Adam, amsgrad": partial(torch.optim.Adam, amsgrad=True),
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "SGD, nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "Adafactor": torch.optim.Adafactor,
    "RMSprop": torch.optim.RMSprop,
    "Adagrad": torch.optim.Adagrad,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
}


def _transformers_cases() -> Iterator[tuple[str, Callable[[], None]]]:
    import transformers as hf

    def bert(layers: int = 2) -> Any:
        return hf.BertForMaskedLM(hf.BertConfig(num_hidden_layers=layers))

    def gpt2() -> Any:
        return hf.GPT2LMHeadModel(hf.GPT2Config(n_layer=2))

    def llama(**options: Any) -> Any:
        sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 2, "vocab_size": 32000}
        heads = {"num_attention_heads": 16, "num_key_value_heads": 4}
        return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, **heads, **options))

    def qwen2() -> Any:
        sizes = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 2, "vocab_size": 32000}
        return hf.Qwen2ForCausalLM(hf.Qwen2Config(**sizes, num_attention_heads=14, num_key_value_heads=2))

    def t5() -> Any:
        return hf.T5ForConditionalGeneration(hf.T5Config(num_layers=2, d_model=512, decoder_start_token_id=0))

    bfloat16, float16 = torch.bfloat16, torch.float16
    yield "BERT", partial(train, bert, tokens(2, 16))
    yield "BERT, masked", partial(train, bert, tokens(8, 128, masked=True))
    yield "BERT, masked, autocast", partial(train, bert, tokens(8, 128, masked=True), autocast=bfloat16)
    yield "BERT, masked, float16", partial(train, bert, tokens(8, 128, masked=True), autocast=float16)
    yield "BERT, Trainer", partial(_train_with_trainer, bert)
    yield (
        "BERT, full size, Trainer",
        partial(_train_with_trainer, partial(bert, 12), batch=2, length=16, steps=5),
    )
    for name, optimizer in _OPTIMIZERS.items():
        yield f"GPT-2, {name}", partial(train, gpt2, tokens(4, 128), optimizer)
    yield "GPT-2, autocast", partial(train, gpt2, tokens(4, 512), autocast=bfloat16)
    yield "Llama", partial(train, llama, tokens(2, 256))
    yield "Llama, autocast", partial(train, llama, tokens(2, 256), autocast=bfloat16)
    yield "Llama, bfloat16", partial(train, lambda: llama().to(bfloat16), tokens(2, 256))
    yield "Llama, bfloat16, masked", partial(train, lambda: llama().to(bfloat16), tokens(2, 256, masked=True))
    yield (
        "Llama, attention in steps",
        partial(train, partial(llama, attn_implementation="eager"), tokens(2, 256)),
    )
    yield "Llama, checkpointed", partial(train, partial(_checkpointed, llama), tokens(2, 256))
    yield "Qwen2, autocast", partial(train, qwen2, tokens(2, 256), autocast=bfloat16)
    yield "T5", partial(train, t5, tokens(4, 64))


def model_cases() -> Iterator[tuple[str, Callable[[], None]]]:
    for length in ("128", "512"):
        for options in ((), ("--forward",), ("--autocast",), ("--autocast", "--forward")):
            name = " ".join(("decoder", "--layers", "2", "--length", length, *options))
            yield name, partial(_train_decoder, *name.split()[1:])
    name = "decoder --layers 4 --length 256"
    yield name, partial(_train_decoder, *name.split()[1:])
    yield from _transformers_cases()
    encoder_input = {"x": torch.zeros(8, 64, 256)}
    yield "encoder", partial(train, _Encoder, encoder_input)
    yield "encoder, autocast", partial(train, _Encoder, encoder_input, autocast=torch.bfloat16)
