"""A `DataLoader` inside of a fake mode takes the examples that it takes outside, in the same order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

from understudy import FakeTensor, FakeTensorMode


class Noted(Dataset[Tensor]):
    """Notes which examples are asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __len__(self) -> int:
        return 10

    def __getitem__(self, position: int) -> Tensor:
        self.asked.append(position)
        return torch.zeros(3)


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter([torch.zeros(3) for _ in range(5)])


def orders(seed: int) -> list[Any]:
    """What is loaded, in several ways."""
    torch.manual_seed(seed)
    shuffled, chosen, shared = Noted(), Noted(), Noted()
    for batch in DataLoader(shuffled, batch_size=4, shuffle=True):
        assert batch.shape[1] == 3
    for _ in DataLoader(chosen, sampler=SubsetRandomSampler(range(2, 7))):
        pass
    for _ in DataLoader(shared, batch_size=2, sampler=DistributedSampler(shared, num_replicas=2, rank=1)):
        pass
    first, _ = random_split(Noted(), [7, 3], generator=torch.Generator().manual_seed(1))
    return [shuffled.asked, chosen.asked, shared.asked, list(first.indices)]


def test_the_order_is_that_of_a_run_outside() -> None:
    outside = orders(0)
    with FakeTensorMode():
        inside = orders(0)
    assert inside == outside
    assert orders(1) != outside


def test_what_is_loaded_is_a_stand_in() -> None:
    with FakeTensorMode():
        data = TensorDataset(torch.randn(10, 4), torch.arange(10))
        batches = list(DataLoader(data, batch_size=3, shuffle=True, drop_last=True))
        streamed = [batch.shape for batch in DataLoader(Stream(), batch_size=2)]
    assert [type(rows) for rows, _ in batches] == [FakeTensor] * 3
    assert [rows.shape for rows, _ in batches] == [(3, 4)] * 3
    assert streamed == [(2, 3), (2, 3), (1, 3)]


def test_workers_are_not_needed() -> None:
    with FakeTensorMode():
        loader = DataLoader(Noted(), batch_size=4, num_workers=2, persistent_workers=True, timeout=9)
        for _ in range(2):
            assert [batch.shape for batch in loader] == [(4, 3), (4, 3), (2, 3)]
    assert loader.num_workers == 2 and loader.timeout == 9


def test_nothing_is_replaced_afterwards() -> None:
    before = DataLoader._get_iterator
    with FakeTensorMode():
        assert DataLoader._get_iterator is not before
    assert DataLoader._get_iterator is before


class TensorBatches:
    """A sampler of a user's, that reads what it draws, and gives tensors of indices."""

    def __iter__(self) -> Iterator[Tensor]:
        while torch.rand(()).item() < 0.9:
            yield torch.randperm(10)[:4]


def test_samplers_of_all_kinds_draw_for_real() -> None:
    weighted = WeightedRandomSampler([0.1, 0.2, 0.7], 8)

    def run() -> list[list[int]]:
        torch.manual_seed(5)
        drawn = [list(DataLoader(range(3), sampler=weighted, batch_size=None))]  # type: ignore[arg-type]
        loader = DataLoader(
            torch.arange(10), batch_sampler=TensorBatches(), num_workers=2, persistent_workers=True
        )  # type: ignore[arg-type]
        for _ in range(2):
            drawn += [batch.tolist() for batch in loader]
        return drawn

    with FakeTensorMode():
        inside = run()
    assert len(inside) > 2
    assert inside == run()


def test_the_generator_of_the_program_is_not_advanced() -> None:
    """And two epochs have two orders, those of a run without the mode."""
    torch.manual_seed(3)
    outside = [list(DataLoader(range(9), shuffle=True, batch_size=None)) for _ in range(3)]  # type: ignore[arg-type]
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with FakeTensorMode():
        inside = [list(DataLoader(range(9), shuffle=True, batch_size=None)) for _ in range(3)]  # type: ignore[arg-type]
        random_split(range(10), [5, 5])  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), before)
    assert inside == outside
    assert inside[0] != inside[1]
    with FakeTensorMode():
        torch.manual_seed(3)
        assert list(DataLoader(range(9), shuffle=True, batch_size=None)) == outside[0]  # type: ignore[arg-type]
