"""`examples/decoder.py`: how it spreads layers over stages, what it computes in, and how it splits products over ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import spawn_threads_and_init_comms

import understudy
from examples.decoder import SIZES, Decoder, SplitLoss, finish_gradients, main, parse_options, split_layers


@pytest.mark.parametrize("size", ["llama-1b", "llama-8b", "125m"])
@pytest.mark.parametrize("stages", [1, 2, 4, 8, 12])
def test_each_layer_is_in_one_stage(size: str, stages: int) -> None:
    counts = split_layers(parse_options(["--size", size, "--vocabulary", "131072"]), stages)
    assert len(counts) == stages and sum(counts) == SIZES[size][0]
    assert all(count > 0 for count in counts[:-1]) and counts[-1] >= 0


def test_the_stage_with_the_head_has_fewer_layers() -> None:
    """The head of this vocabulary has the weights of four layers: 20 in all, 5 in each stage."""
    options = ["--size", "llama-1b", "--vocabulary", "131072"]
    assert split_layers(parse_options(options), 4) == [5, 5, 5, 1]
    assert split_layers(parse_options([*options, "--even-stages"]), 4) == [4, 4, 4, 4]


def test_one_card_computes_in_bfloat16_whatever_the_layout_says() -> None:
    words = ["--size", "llama-tiny", "--context", "32", "--batch", "1", "--vocabulary", "1000"]
    plain, sharded = (
        understudy.rehearse(main, parse_options([*words, *more]), device="h100")
        for more in ([], ["--zero", "1"])
    )
    assert sharded.peak.allocated_bytes == plain.peak.allocated_bytes


WORDS = [
    "--size",
    "llama-tiny",
    "--context",
    "16",
    "--batch",
    "2",
    "--vocabulary",
    "64",
    "--tp",
    "2",
    "--overlap",
]


@pytest.mark.parametrize("more", [[], ["--no-sequence-parallel"]], ids=["split", "repeated"])
def test_overlapped_tensor_parallelism_computes_what_one_card_does(more: list[str]) -> None:
    """Two ranks as threads, on real tensors: the loss, and the gradient of each shard."""
    options = parse_options([*WORDS, *more])
    torch.manual_seed(0)
    whole = Decoder(options).double()
    ids, targets = torch.randint(64, (2, 2, 16))
    expected = torch.nn.functional.cross_entropy(whole(ids), targets.flatten())
    expected.backward()
    losses: list[float] = []
    gradients: dict[tuple[str, int], torch.Tensor] = {}

    @spawn_threads_and_init_comms(world_size=2)
    def run(test: object) -> None:
        rank, group = dist.get_rank(), dist.group.WORLD
        part = Decoder(options, group=group).double()
        with torch.no_grad():
            for name, parameter in part.named_parameters():
                parameter.copy_(cut(name, whole.get_parameter(name), rank, 2))
        loss = SplitLoss.apply(part(ids), targets.flatten(), group)
        loss.backward()
        if not options.no_sequence_parallel:
            finish_gradients(part)
        losses.append(loss.item())
        gradients.update({(name, rank): p.grad for name, p in part.named_parameters() if p.grad is not None})

    run(object())
    assert losses == pytest.approx([expected.item()] * 2)
    for (name, rank), found in gradients.items():
        wanted = whole.get_parameter(name).grad
        assert wanted is not None
        torch.testing.assert_close(found, cut(name, wanted, rank, 2), msg=name)
    assert len(gradients) == 2 * len(dict(whole.named_parameters()))


def cut(name: str, x: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """The shard of a parameter: columns of what sums up, rows of the rest; of a gate and what it scales, rows of each."""
    if "norm" in name:
        return x
    if "up." in name:
        gate, scaled = x.chunk(2)
        return torch.cat([gate.chunk(ranks)[rank], scaled.chunk(ranks)[rank]])
    return x.chunk(ranks, dim=1 if "proj" in name or "down" in name else 0)[rank]


def test_overlapped_collectives_of_a_layer() -> None:
    """Inputs of two products are gathered and their gradients scattered; outputs of two others are scattered and their
    gradients gathered."""
    words = ["--size", "llama-tiny", "--context", "32", "--batch", "1", "--vocabulary", "1024", "--tp", "2"]
    cluster = understudy.rehearse_cluster(
        lambda: main(parse_options([*words, "--overlap", "--zero", "0"])),
        device="2xh100",
        ranks="0",
        jobs=1,
        is_quiet=True,
    )
    layers, steps = 4, 2
    counts: dict[str, int] = {}
    for row in cluster.communication:
        if row.when == "steps" and row.group_size == 2:
            counts[row.collective] = counts.get(row.collective, 0) + row.calls
    ends = 2  # the head gathers its input, and scatters its gradient; embeddings do the reverse
    assert counts["all_gather"] == counts["reduce_scatter"] == steps * (4 * layers + ends)
