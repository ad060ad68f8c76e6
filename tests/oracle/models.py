"""Models, small in size and whole in kind, for runs that go from construction to the optimizer's step.

A `Program` makes everything it needs (model, inputs, optimizer) when it is asked to, so that the same function runs
for real and, inside a mode, with stand-ins from the first parameter on.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")

Loss = Callable[[Any], torch.Tensor]


@dataclass(frozen=True)
class Trained:
    """What is left after one step of training."""

    output: Any
    parameters: dict[str, nn.Parameter]
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    writes: dict[str, int]
    "How often the step wrote to each parameter."


@dataclass(frozen=True)
class Prepared:
    """All that a step of training needs."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    inputs: dict[str, Any]

    def step(self) -> Trained:
        """Forward, backward, optimizer."""
        parameters = dict(self.model.named_parameters())
        before = {name: parameter._version for name, parameter in parameters.items()}
        output = self.model(**self.inputs)
        loss_of(output).backward()
        self.optimizer.step()
        names = {id(parameter): name for name, parameter in parameters.items()}
        return Trained(
            output=output,
            parameters=parameters,
            gradients={name: parameter.grad for name, parameter in parameters.items()},
            buffers=dict(self.model.named_buffers()),
            optimizer={names[id(key)]: dict(entry) for key, entry in self.optimizer.state.items()},
            writes={name: parameter._version - before[name] for name, parameter in parameters.items()},
        )


@dataclass(frozen=True)
class Program:
    """A model with its inputs: `build()` gives the module, `inputs()` the keyword arguments of its forward."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW

    def prepare(self) -> Prepared:
        torch.manual_seed(0)
        model = self.build().train()
        return Prepared(model, self.optimizer(model.parameters(), lr=1e-3), self.inputs())

    def train(self) -> Trained:
        return self.prepare().step()

    def infer(self) -> Any:
        """One forward without training."""
        torch.manual_seed(0)
        model = self.build().eval()
        with torch.no_grad():
            return model(**self.inputs())


def loss_of(output: Any) -> torch.Tensor:
    """The model's own loss, or something that every output takes part in."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    if isinstance(output, torch.Tensor):
        return output.float().pow(2).mean()
    for name in ("logits", "last_hidden_state"):
        if getattr(output, name, None) is not None:
            return loss_of(getattr(output, name))
    return loss_of(output[0])


class Sdpa(nn.Module):
    """Attention through `scaled_dot_product_attention`."""

    def __init__(self, width: int, heads: int, *, causal: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.causal, self.dropout = heads, causal, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal, dropout_p=dropout)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, attention: nn.Module) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = attention
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class Decoder(nn.Module):
    """A small language model with tied embeddings."""

    def __init__(self, attention: Callable[[], nn.Module], width: int = 32) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(64, width), nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width, attention()) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 64, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class SelfAttention(nn.Module):
    """Attention written out: matrix products, a mask, a softmax."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            layer(x).view(batch, length, self.heads, -1).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        scores = q @ k.transpose(-2, -1) / (width // self.heads) ** 0.5
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        weights = self.drop(scores.masked_fill(~mask, float("-inf")).softmax(-1))
        return self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.rnn = kind(8, 16, num_layers=2, batch_first=True, **options)
        self.head = nn.Linear(32 if options.get("bidirectional") else 16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sequence, _ = self.rnn(x)
        return self.head(sequence[:, -1])


class Unet(nn.Module):
    """Down, up, and a connection across: strided, transposed and grouped convolutions, group norm, resizing."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 8, 3, padding=1)
        self.down = nn.Conv2d(8, 16, 3, stride=2, padding=1, groups=2)
        self.norm = nn.GroupNorm(4, 16)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.leave = nn.Conv2d(16, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        entered = self.enter(x)
        deep = nn.functional.silu(self.norm(self.down(entered)))
        joined = torch.cat([self.up(deep), entered], dim=1)
        return nn.functional.interpolate(self.leave(joined), scale_factor=2.0, mode="bilinear")


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, stride=2), nn.BatchNorm2d(16), nn.GELU(), nn.Dropout2d(0.2),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10),
    )  # fmt: skip


def _cnn_1d() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(3, 8, 5, dilation=2), nn.BatchNorm1d(8), nn.LeakyReLU(), nn.AvgPool1d(2), nn.Conv1d(8, 8, 3, groups=8),
        nn.InstanceNorm1d(8, affine=True), nn.Flatten(), nn.Linear(112, 4),
    )  # fmt: skip


def _encoder_layer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def _given(name: str, *shape: int) -> Callable[[], dict[str, Any]]:
    return lambda: {name: torch.randn(shape)}


def _tokens(name: str = "ids", count: int = 64) -> Callable[[], dict[str, Any]]:
    return lambda: {name: torch.randint(0, count, (2, 12))}


def _sgd(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, nesterov=True, weight_decay=1e-4)


def _foreach_adam(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=lr, foreach=True, amsgrad=True)


def _fused_adamw(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, fused=True)


PLAIN = [
    Program("mlp", _mlp, _given("input", 4, 8), _sgd),
    Program("mlp, foreach Adam", _mlp, _given("input", 4, 8), _foreach_adam),
    Program("mlp, fused AdamW", _mlp, _given("input", 4, 8), _fused_adamw),
    Program("mlp, RMSprop", _mlp, _given("input", 4, 8), torch.optim.RMSprop),
    Program("mlp, Adagrad", _mlp, _given("input", 4, 8), torch.optim.Adagrad),
    Program("cnn", _cnn, _given("input", 2, 3, 16, 16)),
    Program("cnn, channels last", _cnn, lambda: {"input": torch.randn(2, 3, 16, 16).to(memory_format=torch.channels_last)}),
    Program("cnn, 1-D", _cnn_1d, _given("input", 2, 3, 40)),
    Program("unet", Unet, _given("x", 2, 3, 16, 16)),
    Program("transformer, written out", lambda: Decoder(lambda: SelfAttention(32, 4)), _tokens()),
    Program("transformer, sdpa", lambda: Decoder(lambda: Sdpa(32, 4, causal=True)), _tokens()),
    Program("transformer, sdpa with dropout", lambda: Decoder(lambda: Sdpa(32, 4, causal=False, dropout=0.1)), _tokens()),
    Program("nn.TransformerEncoder", _encoder_layer, _given("src", 2, 6, 32)),
    Program("nn.Transformer", lambda: nn.Transformer(32, 4, 1, 1, 64, batch_first=True),
            lambda: {"src": torch.randn(2, 6, 32), "tgt": torch.randn(2, 5, 32)}),
    Program("lstm", lambda: Recurrent(nn.LSTM), _given("x", 3, 5, 8)),
    Program("lstm, bidirectional with dropout", lambda: Recurrent(nn.LSTM, bidirectional=True, dropout=0.2), _given("x", 3, 5, 8)),
    Program("gru", lambda: Recurrent(nn.GRU), _given("x", 3, 5, 8)),
    Program("rnn", lambda: Recurrent(nn.RNN, nonlinearity="relu"), _given("x", 3, 5, 8)),
]  # fmt: skip


def _language_inputs(**more: Callable[[], torch.Tensor]) -> Callable[[], dict[str, Any]]:
    def make() -> dict[str, Any]:
        ids = torch.randint(0, 64, (2, 12))
        return {"input_ids": ids, "labels": ids, **{name: value() for name, value in more.items()}}

    return make


def _pixels() -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.randint(0, 3, (2,))}


def _hugging(model: str, config: str, **sizes: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        # Imported on use: it takes seconds, and the other models have no need of it.
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**sizes))  # type: ignore[no-any-return]

    return build


def _vit() -> nn.Module:
    """A vision transformer as it comes, without values: `trunc_normal_` draws again until it likes the values."""
    from transformers.initialization import no_init_weights

    with no_init_weights():
        return _hugging("ViTForImageClassification", "ViTConfig", **_VIT_SIZES)()


_LLAMA_SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_BERT_SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 32,
}  # fmt: skip
_VIT_SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 32, "patch_size": 8, "num_labels": 3,
}  # fmt: skip

HUGGING = [
    Program("gpt2", _hugging("GPT2LMHeadModel", "GPT2Config", vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4,
                             bos_token_id=1, eos_token_id=2), _language_inputs()),
    Program("llama", _hugging("LlamaForCausalLM", "LlamaConfig", **_LLAMA_SIZES), _language_inputs()),
    Program("llama, eager attention", _hugging("LlamaForCausalLM", "LlamaConfig", attn_implementation="eager", **_LLAMA_SIZES),
            _language_inputs()),
    Program("llama, padded", _hugging("LlamaForCausalLM", "LlamaConfig", **_LLAMA_SIZES),
            _language_inputs(attention_mask=lambda: torch.ones(2, 12, dtype=torch.int64))),
    Program("mixtral", _hugging("MixtralForCausalLM", "MixtralConfig", num_local_experts=4, num_experts_per_tok=2, **_LLAMA_SIZES),
            _language_inputs()),
    Program("bert", _hugging("BertForMaskedLM", "BertConfig", **_BERT_SIZES), _language_inputs()),
    Program("t5", _hugging("T5ForConditionalGeneration", "T5Config", vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2,
                           num_heads=4, decoder_start_token_id=0), _language_inputs()),
    Program("vit", _vit, _pixels),
    Program("resnet", _hugging("ResNetForImageClassification", "ResNetConfig", embedding_size=8, hidden_sizes=[8, 16, 32, 64],
                               depths=[1, 1, 1, 1], num_labels=3), _pixels),
]  # fmt: skip

PROGRAMS = {program.name: program for program in (*PLAIN, *HUGGING)}
