"""A decoder of any published size, trained on random tokens: one card, or laid out over many by torch's own APIs.

    understudy run --device h100 examples/decoder.py --size 1b --context 2048 --batch 4
    understudy run --device 8xh100 torchrun --nproc-per-node 8 examples/decoder.py --size 7b --checkpoint
    understudy run --device 8xh100 torchrun --nproc-per-node 8 examples/decoder.py --size llama-8b --tp 2 --pp 2 --zero 1

Sizes with a plain name are those of the MPT family: layer norms, GELU, four times the width in the MLP, learned positions,
tied embeddings. `llama-` sizes have RMS norms, rotary positions and a gated MLP.

Layouts: `--dp`, `--tp`, `--pp` ranks, whose product is the number of ranks. Tensor parallelism is `parallelize_module` with
sequence parallelism and a loss over the shards of the vocabulary, pipelines are `torch.distributed.pipelining` with 1F1B,
data parallelism is `fully_shard` for every stage of ZeRO: 0 shards nothing, 1 the optimizer state, 2 gradients too, 3 all.
`--overlap` is tensor parallelism as Megatron-LM and nanotron write it: collectives run beside products that do without them.
"""

import argparse
import os
from contextlib import nullcontext
from functools import partial

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
    parser.add_argument(
        "--overlap", action="store_true", help="collectives of tensor parallel ranks run beside products"
    )
    parser.add_argument("--zero", type=int, choices=(0, 1, 2, 3), help="stage of ZeRO (3)")
    parser.add_argument("--pure", action="store_true", help="parameters and activations in bfloat16")
    parser.add_argument("--steps", type=int, default=2)
    return parser.parse_args(arguments)


def rotate(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def gather(x, group):
    """The rows of all ranks, and what to wait for before they are read."""
    whole = x.new_empty(dist.get_world_size(group) * len(x), *x.shape[1:])
    return whole, dist.all_gather_into_tensor(whole, x.contiguous(), group=group, async_op=True)


def scatter_sum(x, group):
    """The sum of all ranks: the rows of this one, and what to wait for."""
    own = x.new_empty(len(x) // dist.get_world_size(group), *x.shape[1:])
    return own, dist.reduce_scatter_tensor(own, x, group=group, async_op=True)


def multiply_gathered(x, weight, group):
    """`weight` applied to the rows of all ranks: to those of this rank while the others arrive."""
    whole, work = gather(x, group)
    start = dist.get_rank(group) * len(x)
    end = start + len(x)
    out = x.new_empty(len(whole), weight.shape[1])
    torch.mm(x, weight, out=out[start:end])
    work.wait()
    for rows in (slice(0, start), slice(end, len(whole))):
        if rows.start < rows.stop:
            torch.mm(whole[rows], weight, out=out[rows])
    return out, whole


class ColumnProduct(torch.autograd.Function):
    """A linear layer of which each rank has some outputs. Inputs are split by rows, unless each rank `repeats` them."""

    @staticmethod
    def forward(ctx, x, weight, group, repeats):
        ctx.group, ctx.repeats = group, repeats
        out, whole = (x @ weight.t(), x) if repeats else multiply_gathered(x, weight.t(), group)
        ctx.save_for_backward(whole, weight)
        return out

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        if ctx.repeats:
            grad_x = grad @ weight
            work = dist.all_reduce(grad_x, group=ctx.group, async_op=True)
        else:
            grad_x, work = scatter_sum(grad @ weight, ctx.group)
        grad_weight = grad.t() @ x
        work.wait()
        return grad_x, grad_weight, None, None


class RowProduct(torch.autograd.Function):
    """A linear layer of which each rank has some inputs: outputs are summed up."""

    @staticmethod
    def forward(ctx, x, weight, group, repeats):
        ctx.group, ctx.repeats = group, repeats
        ctx.save_for_backward(x, weight)
        return sum_up(x @ weight.t(), group, repeats)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        if ctx.repeats:
            grad_x = grad @ weight
        else:
            grad_x, grad = multiply_gathered(grad, weight, ctx.group)
        return grad_x, grad.t() @ x, None, None


def sum_up(x, group, repeats):
    if repeats:
        dist.all_reduce(x, group=group)
        return x
    own, work = scatter_sum(x, group)
    work.wait()
    return own


class Sum(torch.autograd.Function):
    """The sum of what the ranks have found in their part of the vocabulary."""

    @staticmethod
    def forward(ctx, x, group, repeats):
        ctx.group, ctx.repeats = group, repeats
        if repeats:
            ctx.mark_dirty(x)
        return sum_up(x, group, repeats)

    @staticmethod
    def backward(ctx, grad):
        if ctx.repeats:
            return grad, None, None
        whole, work = gather(grad, ctx.group)
        work.wait()
        return whole, None, None


class SplitLoss(torch.autograd.Function):
    """Cross entropy of logits of which each rank has some columns."""

    @staticmethod
    def forward(ctx, logits, targets, group):
        top = logits.max(dim=-1).values
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        logits = logits - top[:, None]
        columns = targets - dist.get_rank(group) * logits.shape[1]
        is_outside = (columns < 0) | (columns >= logits.shape[1])
        columns = columns.masked_fill(is_outside, 0)
        rows = torch.arange(len(columns), device=columns.device)
        chosen = logits[rows, columns].masked_fill(is_outside, 0.0)
        dist.all_reduce(chosen, group=group)
        parts = logits.exp()
        total = parts.sum(dim=-1)
        dist.all_reduce(total, group=group)
        ctx.save_for_backward(parts.div_(total[:, None]), rows, columns, is_outside)
        return (total.log() - chosen).mean()

    @staticmethod
    def backward(ctx, grad):
        found, rows, columns, is_outside = ctx.saved_tensors
        result = found.clone()
        result[rows, columns] -= (~is_outside).float()
        return result.mul_(grad / len(rows)), None, None


class SplitLinear(nn.Module):
    """The shard of a linear layer that this rank has."""

    def __init__(self, product, inputs, outputs, group, options, bias=False):
        super().__init__()
        ranks = dist.get_world_size(group)
        is_column = product is ColumnProduct
        shape = (outputs // ranks, inputs) if is_column else (outputs, inputs // ranks)
        self.weight = nn.Parameter(torch.empty(shape).normal_(std=0.02))
        self.bias = nn.Parameter(torch.zeros(shape[0])) if bias else None
        self.product, self.group, self.repeats = product, group, options.no_sequence_parallel

    def forward(self, x):
        y = self.product.apply(x, self.weight, self.group, self.repeats)
        return y if self.bias is None else y + self.bias


class SplitEmbedding(nn.Module):
    """The rows of an embedding that this rank has."""

    def __init__(self, count, width, group, options):
        super().__init__()
        self.count = count // dist.get_world_size(group)
        self.weight = nn.Parameter(torch.empty(self.count, width).normal_(std=0.02))
        self.group, self.repeats = group, options.no_sequence_parallel

    def forward(self, ids):
        rows = ids - dist.get_rank(self.group) * self.count
        is_outside = (rows < 0) | (rows >= self.count)
        x = F.embedding(rows.masked_fill(is_outside, 0), self.weight)
        return Sum.apply(x.masked_fill(is_outside[:, None], 0.0), self.group, self.repeats)


def make_linear(kind, inputs, outputs, options, group, bias=False):
    if group is None:
        return nn.Linear(inputs, outputs, bias=bias)
    return SplitLinear(kind, inputs, outputs, group, options, bias)


class Block(nn.Module):
    def __init__(self, options, width, heads, inner=None, group=None):
        super().__init__()
        self.head_size, self.is_gated, self.length = width // heads, inner is not None, options.context
        self.is_plain, self.dropout = options.plain_attention, options.dropout
        norm = nn.RMSNorm if self.is_gated else nn.LayerNorm
        bias = {} if self.is_gated else {"bias": options.bias}
        self.norm1, self.norm2 = norm(width, **bias), norm(width, **bias)
        rest = options, group, options.bias and not self.is_gated
        self.qkv = make_linear(ColumnProduct, width, 3 * width, *rest)
        self.proj = make_linear(RowProduct, width, width, *rest)
        inner = inner or 4 * width
        # A gate and what it scales are one product, so that tensor parallelism gathers its input once.
        self.up = make_linear(ColumnProduct, width, 2 * inner if self.is_gated else inner, *rest)
        self.down = make_linear(RowProduct, inner, width, *rest)

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

    def __init__(self, options, stage=0, stages=1, group=None):
        """`group`: of tensor parallel ranks, where this module has a shard for one of them."""
        super().__init__()
        _, width, heads, *inner = SIZES[options.size]
        inner_width = inner[0] if inner else None
        self.has_checkpoints, self.group = options.checkpoint, group
        self.is_first, self.is_last = stage == 0, stage == stages - 1
        self.is_tied = stages == 1 and (not inner or inner[0] < MOST_TIED)
        if self.is_first:
            self.tokens = (
                SplitEmbedding(options.vocabulary, width, group, options)
                if group is not None
                else nn.Embedding(options.vocabulary, width)
            )
            self.positions = None if inner else nn.Embedding(options.context, width)
        count = split_layers(options, stages)[stage]
        self.blocks = nn.ModuleList(Block(options, width, heads, inner_width, group) for _ in range(count))
        if self.is_last:
            self.norm = nn.RMSNorm(width) if inner else nn.LayerNorm(width, bias=options.bias)
            self.head = make_linear(ColumnProduct, width, options.vocabulary, options, group)
        self.tie()

    def tie(self):
        if self.is_tied:
            self.head.weight = self.tokens.weight

    def forward(self, x):
        if self.is_first:
            batch, length = x.shape
            x = self.tokens(x.flatten())
            if self.positions is not None:
                rows = torch.arange(length, device=x.device).repeat(batch)
                ranks = len(rows) // len(x)  # that a sequence is split over
                x = x + self.positions(rows if ranks == 1 else rows.chunk(ranks)[dist.get_rank(self.group)])
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


def compute_loss(logits, targets, group=None):
    if group is not None:
        return SplitLoss.apply(logits.float(), targets.flatten(), group)
    return F.cross_entropy(logits.float(), targets.flatten())


def finish_gradients(model):
    """With sequence parallelism each rank has seen some of the rows that norms scale."""
    if model.group is None:
        return
    for name, parameter in model.named_parameters():
        if "norm" in name:
            grad = parameter.grad
            dist.all_reduce(grad.to_local() if hasattr(grad, "to_local") else grad, group=model.group)


def gather_parameters(model):
    """ZeRO's first stage: after a step of the optimizer, each rank gets what the others have updated."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()


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
    group = mesh["tp"].get_group() if options.overlap and tp > 1 else None
    with device:
        model = Decoder(options, stage, pp, group)
    if tp > 1 and group is None:
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
    return model, Schedule1F1B(part, options.accumulate, loss_fn=partial(compute_loss, group=group))


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
        finish_gradients(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if is_sharded and options.zero == 1:
            gather_parameters(model)
    if is_sharded:
        dist.destroy_process_group()


def split_loss(options):
    if options.tp == 1 or options.overlap:
        return nullcontext()
    from torch.distributed.tensor.parallel import loss_parallel

    return loss_parallel()


def train_passes(model, options, is_sharded, device):
    # Layouts compute in the dtype of `fully_shard`, with a pipeline or without.
    has_autocast = not (options.pure or (is_sharded and has_layout(options)))
    for number in range(options.accumulate):
        is_last = number == options.accumulate - 1
        if is_sharded and options.zero in (0, 1):
            model.set_requires_gradient_sync(is_last)
        if is_sharded and options.zero in (0, 1, 2):
            model.set_reshard_after_backward(is_last)
        ids = torch.randint(options.vocabulary, (options.batch, options.context + 1), device=device)
        with torch.autocast("cuda", torch.bfloat16, enabled=has_autocast):
            logits = model(ids[:, :-1])
            loss = compute_loss(logits, ids[:, 1:], model.group)
        loss.backward()


if __name__ == "__main__":
    main(parse_options())
