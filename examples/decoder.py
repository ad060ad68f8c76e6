"""A decoder of any published size, trained on random tokens: one card, or laid out over many by torch's own APIs.

    understudy run --device h100 examples/decoder.py --size 1b --context 2048 --batch 4
    understudy run --device 8xh100 torchrun --nproc-per-node 8 examples/decoder.py --size 7b --checkpoint
    understudy run --device 8xh100 torchrun --nproc-per-node 8 examples/decoder.py --size llama-8b --tp 2 --pp 2 --zero 1

Sizes with a plain name are those of the MPT family: layer norms, GELU, four times the width in the MLP, learned positions,
tied embeddings. `llama-` sizes have RMS norms, rotary positions and a gated MLP.

Layouts: `--dp`, `--tp`, `--pp` ranks, whose product is the number of ranks. Tensor parallelism is `parallelize_module` with
sequence parallelism and a loss over the shards of the vocabulary, pipelines are `torch.distributed.pipelining` with 1F1B,
data parallelism is `fully_shard` for every stage of ZeRO: 0 shards nothing, 1 the optimizer state, 2 gradients too, 3 all.
"""

import argparse
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

SIZES = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
    "llama-tiny": (4, 64, 8, 128),
    "llama-1b": (16, 2048, 32, 8192),
    "llama-3b": (28, 3072, 32, 8192),
    "llama-8b": (32, 4096, 32, 14336),
    "llama-70b": (80, 8192, 64, 28672),
    "llama-405b": (126, 16384, 128, 53248),
}
"""Layers, width, heads; the width of the MLP, where it is gated."""
MOST_TIED = 10_000
"""Gated decoders with an MLP that is less wide have tied embeddings."""


def parse_options(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=SIZES, default="125m")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=4, help="sequences of one card in one pass")
    parser.add_argument("--accumulate", type=int, default=1, help="passes of one step")
    parser.add_argument("--vocabulary", type=int, default=50368)
    parser.add_argument("--checkpoint", action="store_true", help="recompute each block in the backward pass")
    parser.add_argument(
        "--keep-gathered", action="store_true", help="shard gradients and optimizer state only"
    )
    parser.add_argument("--dp", type=int, help="data parallel ranks (all that are left)")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel ranks")
    parser.add_argument("--pp", type=int, default=1, help="stages of a pipeline")
    parser.add_argument(
        "--even-stages", action="store_true", help="as many layers in each stage, whatever the head costs"
    )
    parser.add_argument(
        "--plain-attention", action="store_true", help="scores, softmax and product one after the other"
    )
    parser.add_argument("--dropout", type=float, default=0.0, help="of MPT sizes: scores and both branches")
    parser.add_argument(
        "--bias", action="store_true", help="of MPT sizes: linear layers and norms with biases"
    )
    parser.add_argument(
        "--no-sequence-parallel", action="store_true", help="tensor parallel ranks repeat norms and dropout"
    )
    parser.add_argument("--zero", type=int, choices=(0, 1, 2, 3), help="stage of ZeRO (3)")
    parser.add_argument("--pure", action="store_true", help="parameters and activations in bfloat16")
    parser.add_argument("--steps", type=int, default=2)
    return parser.parse_args(arguments)


def rotate(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Block(nn.Module):
    def __init__(self, options, width, heads, inner=None):
        super().__init__()
        self.head_size, self.is_gated, self.length = width // heads, inner is not None, options.context
        self.is_plain, self.dropout = options.plain_attention, options.dropout
        norm = nn.RMSNorm if self.is_gated else nn.LayerNorm
        bias = {} if self.is_gated else {"bias": options.bias}
        self.norm1, self.norm2 = norm(width, **bias), norm(width, **bias)
        bias = {"bias": options.bias and not self.is_gated}
        self.qkv, self.proj = nn.Linear(width, 3 * width, **bias), nn.Linear(width, width, **bias)
        inner = inner or 4 * width
        # A gate and what it scales are one product, so that tensor parallelism gathers its input once.
        self.up = nn.Linear(width, 2 * inner if self.is_gated else inner, **bias)
        self.down = nn.Linear(inner, width, **bias)

    def forward(self, x):
        x = x + self.drop(self.attend(self.norm1(x)))
        y = self.norm2(x)
        return x + self.drop(self.feed(y))

    def drop(self, x):
        return F.dropout(x, self.dropout) if self.dropout else x

    def attend(self, x):
        qkv = self.qkv(x)  # the heads of this rank, after each other: q, k and v of each
        q, k, v = qkv.view(-1, self.length, qkv.shape[1] // 3 // self.head_size, 3, self.head_size).permute(
            3, 0, 2, 1, 4
        )
        if self.is_gated:
            places = torch.arange(self.length, device=x.device, dtype=torch.float32)
            rates = 10_000 ** (-torch.arange(0, self.head_size, 2, device=x.device) / self.head_size)
            angles = torch.outer(places, rates).repeat(1, 2)
            cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if self.is_plain:
            y = self.attend_plainly(q, k, v)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        return self.proj(y.transpose(1, 2).reshape(len(qkv), -1))

    def attend_plainly(self, q, k, v):
        batch, heads, length, _ = q.shape
        mask = torch.full((length, length), float("-inf"), device=q.device, dtype=q.dtype).triu(1)
        q, k, v = (x.reshape(batch * heads, length, -1) for x in (q, k, v))
        scores = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=self.head_size**-0.5)
        return (self.drop(scores.softmax(-1)) @ v).view(batch, heads, length, -1)

    def feed(self, x):
        if not self.is_gated:
            return self.down(F.gelu(self.up(x)))
        gate, scaled = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * scaled)


def split_layers(options, stages):
    """How many layers each stage has. The head is work of the last one, as that of so many layers as it has weights."""
    layers, width, _, *inner = SIZES[options.size]
    if options.even_stages:
        return [layers * (stage + 1) // stages - layers * stage // stages for stage in range(stages)]
    weights = 4 * width * width + (3 * width * inner[0] if inner else 8 * width * width)
    share = (layers + options.vocabulary / weights * width) / stages
    ends = [min(round(share * (stage + 1)), layers - (stages - 2 - stage)) for stage in range(stages - 1)]
    starts = [0]
    for end in ends:
        starts.append(min(layers, max(end, starts[-1] + 1)))
    return [end - start for start, end in zip(starts, [*starts[1:], layers], strict=True)]


class Decoder(nn.Module):
    """Of a pipeline, one stage: the embeddings are in the first, the head is in the last. Between them a batch has one row
    for each token: shards of the sequence are then whole blocks of memory, which collectives move without a copy."""

    def __init__(self, options, stage=0, stages=1):
        super().__init__()
        _, width, heads, *inner = SIZES[options.size]
        self.has_checkpoints = options.checkpoint
        self.is_first, self.is_last = stage == 0, stage == stages - 1
        self.is_tied = stages == 1 and (not inner or inner[0] < MOST_TIED)
        if self.is_first:
            self.tokens = nn.Embedding(options.vocabulary, width)
            self.positions = None if inner else nn.Embedding(options.context, width)
        count = split_layers(options, stages)[stage]
        self.blocks = nn.ModuleList(Block(options, width, heads, *inner) for _ in range(count))
        if self.is_last:
            self.norm = nn.RMSNorm(width) if inner else nn.LayerNorm(width, bias=options.bias)
            self.head = nn.Linear(width, options.vocabulary, bias=False)
        self.tie()

    def tie(self):
        if self.is_tied:
            self.head.weight = self.tokens.weight

    def forward(self, x):
        if self.is_first:
            batch, length = x.shape
            x = self.tokens(x.flatten())
            if self.positions is not None:
                x = x + self.positions(torch.arange(length, device=x.device).repeat(batch))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.has_checkpoints else block(x)
        return self.head(self.norm(x)) if self.is_last else x


def split_tensors(model, mesh, repeats):
    """Tensor parallelism: heads and the MLP over ranks, and the sequence between them, unless each rank `repeats` it."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    between = Replicate() if repeats else Shard(0)
    column = ColwiseParallel(input_layouts=between)
    row = RowwiseParallel(output_layouts=between)
    to_local = SequenceParallel(sequence_dim=0, use_local_output=True)

    def repeat(module):
        def read(_, inputs, mesh):
            return DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False)

        distribute_module(module, mesh, input_fn=read, output_fn=lambda _, output, mesh: output.to_local())

    for block in model.blocks:
        plan = {"norm1": to_local, "qkv": column, "proj": row, "norm2": to_local, "up": column, "down": row}
        for name in ("norm1", "norm2") if repeats else ():
            repeat(block.get_submodule(name))
            del plan[name]
        parallelize_module(block, mesh, plan)
    if model.is_first:
        layouts = {"input_layouts": Replicate(), "output_layouts": between}
        plan = {"tokens": RowwiseParallel(**layouts)}
        if model.positions is not None:
            plan["positions"] = RowwiseParallel(**layouts)
        parallelize_module(model, mesh, plan)
    if model.is_last:
        if repeats:
            repeat(model.norm)
        head = ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False)
        parallelize_module(model, mesh, {"head": head} | ({} if repeats else {"norm": to_local}))
    model.tie()


def shard(model, options, mesh=None):
    """Data parallelism, with all that the stage of ZeRO shards."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    reduce_dtype = torch.bfloat16 if options.zero is None else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    keeps = options.keep_gathered or options.zero in (0, 1, 2)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=not keeps)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    if keeps and options.zero is not None:
        model.set_reshard_after_backward(False)


def compute_loss(logits, targets):
    return F.cross_entropy(logits.float(), targets.flatten())


def lay_out(options, device):
    """The model, or the stage, of this rank; the schedule of its pipeline, if there is one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    world, tp, pp = dist.get_world_size(), options.tp, options.pp
    dp = options.dp or world // (tp * pp)
    if dp * tp * pp != world:
        raise SystemExit(f"--dp {dp} x --tp {tp} x --pp {pp} is not the number of ranks, {world}")
    # Of stage 0, every rank has all: shards of one rank each.
    shards = 1 if options.zero == 0 else dp
    mesh = init_device_mesh(
        "cuda", (pp, dp // shards, shards, tp), mesh_dim_names=("pp", "dp", "shard", "tp")
    )
    stage = mesh["pp"].get_local_rank()
    with device:
        model = Decoder(options, stage, pp)
    if tp > 1:
        split_tensors(model, mesh["tp"], options.no_sequence_parallel)
    shard(model, options, mesh["dp", "shard"] if shards < dp else mesh["shard"])
    if pp == 1:
        return model, None
    width = SIZES[options.size][1]
    tokens = options.batch * options.context
    kinds = {"device": device, "dtype": torch.bfloat16, "requires_grad": True}
    hidden = torch.empty(tokens if options.no_sequence_parallel else tokens // tp, width, **kinds)
    ids = torch.empty(options.batch, options.context, device=device, dtype=torch.long)
    inputs = ids if stage == 0 else hidden
    outputs = torch.empty(tokens, options.vocabulary // tp, **kinds) if stage == pp - 1 else hidden
    part = PipelineStage(model, stage, pp, device, inputs, outputs, group=mesh["pp"].get_group())
    return model, Schedule1F1B(part, options.accumulate, loss_fn=compute_loss)


def train_pipeline(schedule, options, device):
    """All passes of one step: the schedule splits the batch."""
    shape = (options.batch * options.accumulate, options.context + 1)
    if schedule._stage.is_first:
        schedule.step(torch.randint(options.vocabulary, shape, device=device)[:, :-1])
    elif schedule._stage.is_last:
        schedule.step(target=torch.randint(options.vocabulary, shape, device=device)[:, 1:])
    else:
        schedule.step()


def has_layout(options):
    return options.zero is not None or max(options.dp or 1, options.tp, options.pp) > 1


def main(options):
    is_sharded = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if is_sharded:
        dist.init_process_group("nccl")
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    device = torch.device("cuda", torch.cuda.current_device())
    schedule = None
    if is_sharded and has_layout(options):
        model, schedule = lay_out(options, device)
    else:
        with device:
            model = Decoder(options)
        if options.pure:
            model = model.bfloat16()
        if is_sharded:
            shard(model, options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
    for _ in range(options.steps):
        with split_loss(options):
            if schedule is not None:
                train_pipeline(schedule, options, device)
            else:
                train_passes(model, options, is_sharded, device)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if is_sharded:
        dist.destroy_process_group()


def split_loss(options):
    if options.tp == 1:
        return nullcontext()
    from torch.distributed.tensor.parallel import loss_parallel

    return loss_parallel()


def train_passes(model, options, is_sharded, device):
    # Layouts compute in the dtype of `fully_shard`, with a pipeline or without.
    has_autocast = not (options.pure or (is_sharded and has_layout(options)))
    for number in range(options.accumulate):
        if is_sharded and options.zero in (0, 1):
            model.set_requires_gradient_sync(number == options.accumulate - 1)
        ids = torch.randint(options.vocabulary, (options.batch, options.context + 1), device=device)
        with torch.autocast("cuda", torch.bfloat16, enabled=has_autocast):
            logits = model(ids[:, :-1])
            loss = compute_loss(logits, ids[:, 1:])
        loss.backward()


if __name__ == "__main__":
    main(parse_options())
