"""What training scripts do besides: architectures of transformers, convolutions, sparse gradients, LoRA, checkpointing,
accumulation, loaders with pinned memory."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from tests.oracle.card.cases_models import tokens, train

Tensor = torch.Tensor
Case = tuple[str, Callable[[], None]]


class _Perceptron(nn.Module):
    def __init__(self, width: int = 512, depth: int = 6, reentrant: bool | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.GELU(),
                nn.Dropout(0.1),
                nn.Linear(4 * width, width),
            )
            for _ in range(depth)
        )
        self.out = nn.Linear(width, 10)
        self.reentrant = reentrant

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + (
                layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
            )
        return F.cross_entropy(self.out(x), y)


class _LowRank(nn.Module):
    """LoRA, as people write it around a linear layer."""

    def __init__(self, base: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) * 0.01)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + (x @ self.a.t() @ self.b.t()) * 2.0


def _low_rank() -> nn.Module:
    model = _Perceptron()
    model.requires_grad_(False)
    for layer in model.layers:
        layer[1], layer[4] = _LowRank(layer[1]), _LowRank(layer[4])  # type: ignore[index,arg-type,operator]
    return model


class _ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = (3, 64, 128, 256)
        self.blocks = nn.Sequential(*(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True), nn.MaxPool2d(2))
            for a, b in itertools.pairwise(sizes)
        ))  # fmt: skip
        self.out = nn.Linear(sizes[-1], 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.out(self.blocks(x).mean((2, 3))), y)


class _UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(3, 64, 3, padding=1), nn.Conv2d(64, 128, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(8, 128)
        self.up, self.last = nn.ConvTranspose2d(128, 64, 2, stride=2), nn.Conv2d(128, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = F.silu(self.first(x))
        up = self.up(F.silu(self.norm(self.down(first))))
        return F.mse_loss(self.last(torch.cat((first, up), 1)), x)


class _Bags(nn.Module):
    def __init__(self, sparse: bool, mode: str = "mean") -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(50000, 64, mode=mode, sparse=sparse)
        self.out = nn.Linear(64, 4)

    def forward(self, ids: Tensor, offsets: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.out(self.bag(ids, offsets)), y)


class _Factors(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(20000, 64, sparse=sparse), nn.Embedding(5000, 64, sparse=sparse)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(
            (self.users(users) * self.items(items)).sum(-1), torch.ones_like(users).float()
        )


class _Labels(nn.Module):
    """Several labels for each example: the loss of logits is the largest part."""

    def __init__(self, weighted: bool) -> None:
        super().__init__()
        self.out = nn.Linear(64, 4096)
        self.register_buffer("weight", torch.full((4096,), 3.0) if weighted else None)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(self.out(x), y, pos_weight=self.weight)


def _train_from_loader(accumulated: int = 1) -> None:
    data = TensorDataset(torch.zeros(256, 512), torch.zeros(256, dtype=torch.long))
    model = _Perceptron().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    for number, (x, y) in enumerate(DataLoader(data, batch_size=64, pin_memory=True, shuffle=True)):
        x, y = x.to("cuda", non_blocking=True), y.to("cuda", non_blocking=True)
        loss = model(x, y) / accumulated
        loss.backward()
        if (number + 1) % accumulated == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            scheduler.step()


def _train_with_average() -> None:
    """An exponential moving average of the weights, evaluation after each step."""
    model = _Perceptron().cuda()
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    x, y = torch.zeros(256, 512, device="cuda"), torch.zeros(256, dtype=torch.long, device="cuda")
    for _ in range(2):
        optimizer.zero_grad()
        model(x, y).backward()
        optimizer.step()
        average.update_parameters(model)
        with torch.no_grad():
            average(x, y)


def _plain_cases() -> Iterator[Case]:
    flat = {"x": torch.zeros(1024, 512), "y": torch.zeros(1024, dtype=torch.long)}
    images = {"x": torch.zeros(8, 3, 64, 64), "y": torch.zeros(8, dtype=torch.long)}
    bags = {
        "ids": torch.zeros(4096, dtype=torch.long),
        "offsets": torch.arange(0, 4096, 16),
        "y": torch.zeros(256, dtype=torch.long),
    }
    factors = {"users": torch.zeros(4096, dtype=torch.long), "items": torch.zeros(4096, dtype=torch.long)}
    yield "perceptron", partial(train, _Perceptron, flat)
    yield "perceptron, float16", partial(train, _Perceptron, flat, autocast=torch.float16)
    for reentrant in (True, False):
        yield (
            f"perceptron, checkpointed, reentrant {reentrant}",
            partial(train, partial(_Perceptron, reentrant=reentrant), flat),
        )
    yield "perceptron, low rank", partial(train, _low_rank, flat)
    yield "perceptron, low rank, autocast", partial(train, _low_rank, flat, autocast=torch.bfloat16)
    yield "perceptron, loader", _train_from_loader
    yield "perceptron, loader, accumulated", partial(_train_from_loader, 2)
    yield "perceptron, average", _train_with_average
    for dtype in (None, torch.bfloat16):
        name = "" if dtype is None else ", autocast"
        yield f"convolutions{name}", partial(train, _ConvNet, images, autocast=dtype)
        yield f"U-Net{name}", partial(train, _UNet, {"x": torch.zeros(4, 3, 64, 64)}, autocast=dtype)
    for weighted in (False, True):
        batch = {"x": torch.zeros(512, 64), "y": torch.zeros(512, 4096)}
        yield f"labels, weighted {weighted}", partial(train, partial(_Labels, weighted), batch)
    for mode in ("mean", "sum", "max"):
        yield f"bags, {mode}", partial(train, partial(_Bags, False, mode), bags)
    sgd, sparse_adam = partial(torch.optim.SGD, lr=0.1), partial(torch.optim.SparseAdam, lr=0.1)
    yield "bags, sparse", partial(train, partial(_Bags, True), bags, sgd, clip=False)
    yield "factors", partial(train, partial(_Factors, False), factors)
    yield "factors, sparse", partial(train, partial(_Factors, True), factors, sgd, clip=False)
    yield "factors, SparseAdam", partial(train, partial(_Factors, True), factors, sparse_adam, clip=False)


def _architecture_cases() -> Iterator[Case]:
    import transformers as hf

    def causal(name: str, **options: Any) -> Callable[[], Any]:
        sizes = {"hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 8000}
        return lambda: hf.AutoModelForCausalLM.from_config(
            hf.AutoConfig.for_model(name, **{**sizes, **options})
        )

    inner = {"intermediate_size": 1024}
    grouped = {**inner, "num_key_value_heads": 4}
    causal_models: dict[str, dict[str, Any]] = {
        "mistral": grouped, "phi3": {**grouped, "pad_token_id": 0}, "gemma2": {**grouped, "head_dim": 64}, "qwen3": grouped,
        "gpt_neox": inner, "bloom": {}, "falcon": {}, "opt": {"ffn_dim": 1024, "word_embed_proj_dim": 512},
        "mixtral": {**grouped, "num_local_experts": 4}, "olmo2": grouped, "gptj": {"rotary_dim": 32},
        "stablelm": grouped, "granite": grouped, "cohere": grouped,
    }  # fmt: skip
    for name, options in causal_models.items():
        yield f"transformers, {name}", partial(train, causal(name, **options), tokens(2, 128))
        yield (
            f"transformers, {name}, autocast",
            partial(train, causal(name, **options), tokens(2, 128), autocast=torch.bfloat16),
        )
    small = {"num_hidden_layers": 2}
    masked: dict[str, Any] = {
        "roberta": small, "distilbert": {"n_layers": 2}, "albert": small, "electra": small, "deberta-v2": small, "modernbert": small
    }  # fmt: skip
    for name, options in masked.items():
        make = partial(hf.AutoModelForMaskedLM.from_config, hf.AutoConfig.for_model(name, **options))
        yield f"transformers, {name}", partial(train, make, tokens(4, 64, masked=True))
    pictures = {"pixel_values": torch.zeros(2, 3, 224, 224), "labels": torch.zeros(2, dtype=torch.long)}
    for name, options in {"vit": small, "swin": {"depths": [2, 2]}, "convnext": {}, "resnet": {}}.items():
        make = partial(
            hf.AutoModelForImageClassification.from_config, hf.AutoConfig.for_model(name, **options)
        )
        yield f"transformers, {name}", partial(train, make, pictures)
    bart = hf.BartConfig(encoder_layers=2, decoder_layers=2, d_model=256, vocab_size=8000)
    yield "transformers, bart", partial(train, lambda: hf.BartForConditionalGeneration(bart), tokens(2, 64))
    whisper = hf.WhisperConfig(
        encoder_layers=2, decoder_layers=2, d_model=384, vocab_size=8000, pad_token_id=0
    )
    speech = {"input_features": torch.zeros(1, 80, 3000), "labels": torch.zeros(1, 32, dtype=torch.long)}
    yield "transformers, whisper", partial(train, lambda: hf.WhisperForConditionalGeneration(whisper), speech)
    yield (
        "transformers, mistral, LoRA of peft",
        partial(train, partial(_with_adapters, causal("mistral", **grouped)), tokens(2, 128)),
    )


def _with_adapters(make: Callable[[], Any]) -> Any:
    import peft

    settings = peft.LoraConfig(
        r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", lora_dropout=0.05
    )
    return peft.get_peft_model(make(), settings)


def training_cases() -> Iterator[Case]:
    yield from _plain_cases()
    yield from _architecture_cases()
