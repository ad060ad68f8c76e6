"""Training programs as people write them: several models, penalties on gradients, optimizers of one's own, hooks on what
autograd saves, a search for the largest batch."""

import copy
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Tensor = torch.Tensor
Case = tuple[str, Callable[[], None]]
CARD = "cuda"


def _layers(*sizes: int, between: type[nn.Module] = nn.GELU) -> nn.Sequential:
    pairs = itertools.pairwise(sizes)
    return nn.Sequential(*(layer for a, b in pairs for layer in (nn.Linear(a, b), between())))[:-1].to(CARD)


def _play_two_models(penalty: bool) -> None:
    """A generator and a discriminator; with the penalty of Wasserstein's on the gradient's norm."""
    generator, judge = _layers(16, 256, 64), _layers(64, 256, 256, 1)
    optimizers = [
        torch.optim.Adam(model.parameters(), lr=2e-4, betas=(0.5, 0.999)) for model in (judge, generator)
    ]
    for _ in range(2):
        real, fake = torch.randn(128, 64, device=CARD), generator(torch.randn(128, 16, device=CARD))
        optimizers[0].zero_grad()
        if penalty:
            share = torch.rand(128, 1, device=CARD)
            between = (share * real + (1 - share) * fake.detach()).requires_grad_(True)
            out = judge(between)
            gradient = torch.autograd.grad(
                out, between, torch.ones_like(out), create_graph=True, retain_graph=True
            )[0]
            loss = (
                judge(fake.detach()).mean()
                - judge(real).mean()
                + 10 * ((gradient.norm(2, dim=1) - 1) ** 2).mean()
            )
            loss.backward()
        else:
            label = torch.full((128, 1), 1.0, device=CARD)
            F.binary_cross_entropy(judge(real).sigmoid(), label).backward()
            F.binary_cross_entropy(judge(fake.detach()).sigmoid(), label.fill_(0.0)).backward()
        optimizers[0].step()
        optimizers[1].zero_grad()
        (-judge(fake).mean()).backward()
        optimizers[1].step()


def _encode_and_decode() -> None:
    """A variational autoencoder, its weights averaged after each step."""
    encoder, decoder = _layers(784, 400, 40, between=nn.ReLU), _layers(20, 400, 784, between=nn.ReLU)
    average = copy.deepcopy(nn.ModuleList([encoder, decoder])).requires_grad_(False)
    parameters = [*encoder.parameters(), *decoder.parameters()]
    optimizer = torch.optim.Adam(parameters)
    for _ in range(2):
        x = torch.rand(128, 784, device=CARD)
        optimizer.zero_grad()
        mean, log_variance = encoder(x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        loss = F.binary_cross_entropy(torch.sigmoid(decoder(z)), x, reduction="sum")
        loss = loss - 0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), parameters, strict=True):
                slow.lerp_(fast.detach(), 0.001)


class _Orthogonal(torch.optim.Optimizer):
    """Momentum whose matrices are made orthogonal, by products in bfloat16."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.02})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.lerp_(p.grad, 0.05)
                x = p.grad.lerp_(momentum, 0.95).bfloat16() if p.ndim == 2 else p.grad
                if p.ndim == 2:
                    x = x / (x.norm() + 1e-7)
                    for _ in range(5):
                        a = x @ x.mT
                        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
                p.add_(x, alpha=-group["lr"])


class _InEightBits(torch.optim.Optimizer):
    """Adam whose moments are kept in 8 bits, block by block."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    @staticmethod
    def _pack(x: Tensor) -> tuple[Tensor, Tensor]:
        blocks = F.pad(x.flatten(), (0, -x.numel() % 256)).view(-1, 256)
        scale = blocks.abs().amax(1, keepdim=True).clamp_min(1e-12)
        return (blocks / scale * 127).round().to(torch.int8), scale

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p] or {name: self._pack(torch.zeros_like(p)) for name in "mv"}
                m, v = (
                    (q.float() * s / 127).flatten()[: p.numel()].view_as(p)
                    for q, s in (state["m"], state["v"])
                )
                m.mul_(0.9).add_(p.grad, alpha=0.1)
                v.mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                p.addcdiv_(m / 0.1, (v / 0.001).sqrt_().add_(1e-8), value=-group["lr"])
                self.state[p] = {"m": self._pack(m), "v": self._pack(v)}


def _train(
    make: Callable[[Any], torch.optim.Optimizer], forward: Callable[[nn.Sequential, Tensor], Tensor]
) -> None:
    model = _layers(256, 1024, 256, 1024, 256)
    optimizer = make(model.parameters())
    for _ in range(2):
        loss = forward(model, torch.randn(512, 256, device=CARD))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _apply(model: nn.Sequential, x: Tensor) -> Tensor:
    return model(x).pow(2).mean()


def _keep_on_cpu(model: nn.Sequential, x: Tensor) -> Tensor:
    with save_on_cpu(pin_memory=True):
        return _apply(model, x)


def _keep_in_half(model: nn.Sequential, x: Tensor) -> Tensor:
    with saved_tensors_hooks(lambda t: t.half() if t.ndim > 1 else t, lambda t: t.float()):
        return _apply(model, x)


def _keep_products(model: nn.Sequential, x: Tensor) -> Tensor:
    def choose(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        is_product = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE

    for layer in model:
        x = checkpoint(
            layer, x, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, choose)
        )
    return x.pow(2).mean()


def _find_batch() -> None:
    """Halved until it fits: what a refused attempt held is free again."""
    model = _layers(1024, 65536, 1024, between=nn.ReLU)
    batch = 1 << 18
    while batch:
        try:
            model(torch.randn(batch, 1024, device=CARD)).pow(2).mean().backward()
            return
        except torch.OutOfMemoryError:
            batch //= 2
        torch.cuda.empty_cache()


def program_cases() -> Iterator[Case]:
    yield "generator and discriminator", partial(_play_two_models, False)
    yield "generator and discriminator, penalty", partial(_play_two_models, True)
    yield "variational autoencoder", _encode_and_decode
    for make in (_Orthogonal, _InEightBits):
        yield f"optimizer, {make.__name__.strip('_')}", partial(_train, make, _apply)
    fused = partial(torch.optim.AdamW, fused=True)
    for forward in (_apply, _keep_on_cpu, _keep_in_half, _keep_products):
        yield f"saved tensors, {forward.__name__.strip('_')}", partial(_train, fused, forward)
    yield "the largest batch", _find_batch
