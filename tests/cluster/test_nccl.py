"""Memory of NCCL: which communicators exist, what changes their size, and when they decide the verdict."""

from __future__ import annotations

from dataclasses import replace

import pytest

from understudy.cluster.layout import Layout, LayoutError
from understudy.cluster.nccl import Communicator, NcclSettings, find_communicators
from understudy.report.cluster_rehearsal import RankRow
from understudy.report.cluster_runs import add_nccl
from understudy.report.rehearsal import Device, Peak, Rehearsal
from understudy.simulation.catalogue import CatalogueError, find_card, read_cards
from understudy.simulation.network import CollectiveRecord, Group

MiB, GiB = 1 << 20, 1 << 30
WORLD = Group("0", tuple(range(8)), "nccl", "default_pg")
PAIR = Group("1", (0, 1), "nccl")
CPU = Group("2", tuple(range(8)), "gloo")
GROUPS = {group.name: group for group in (WORLD, PAIR, CPU)}
H100 = find_card("h100")


def record(kind: str, group: Group = WORLD, peer: int | None = None, batch: int = 0) -> CollectiveRecord:
    return CollectiveRecord(kind, group.name, 1024, "float32", "train.py:1", peer=peer, batch=batch)


def find(*log: CollectiveRecord, card: str = "h100", nodes: int = 1, has_bound_device: bool = False,
         **settings: str) -> list[tuple[str, int, int, float, float]]:  # fmt: skip
    found = find_communicators(
        0,
        log,
        GROUPS,
        Layout(nodes, 8 // nodes),
        find_card(card),
        NcclSettings.read(settings),
        has_bound_device,
    )
    return [(c.group, c.size, c.peers, round(c.low_bytes / MiB), round(c.high_bytes / MiB)) for c in found]


def test_a_communicator_begins_with_the_first_collective_of_its_group() -> None:
    assert find() == []
    assert find(record("all_reduce"), record("broadcast", peer=0)) == [("0", 8, 0, 328, 1126)]
    assert find(record("all_reduce"), record("all_reduce", PAIR)) == [
        ("0", 8, 0, 328, 1126),
        ("1", 2, 0, 328, 1126),
    ]
    assert find(record("all_reduce", CPU)) == []


def test_all_to_all_takes_buffers_for_each_peer_and_channel() -> None:
    # nccl#1685: 8 x H100, 3.28 GB more after the first all-to-all
    alone = find(record("all_to_all"))
    assert alone == [("0", 8, 7, 7 * 32 * 14, 7 * 32 * 14)] and abs(alone[0][3] * MiB / 3.28e9 - 1) < 0.01
    assert find(record("barrier"), record("all_to_all")) == [("0", 8, 7, 328 + 3136, 1126 + 3136)]
    assert find(record("all_to_all"), nodes=4) == [("0", 8, 7, 32 * 14, 32 * 14 + 6 * 2 * 14)]


def test_a_message_has_a_communicator_of_its_own_unless_the_device_is_bound() -> None:
    messages = (record("send", peer=1), record("recv", peer=1), record("send", peer=2))
    assert find(*messages) == [("0 0-1", 2, 1, 448, 448), ("0 0-2", 2, 1, 64, 64)]
    assert find(*messages, has_bound_device=True) == [("0", 8, 2, 512, 512)]
    batch = (record("send", peer=1, batch=1), record("recv", peer=1, batch=1))
    assert find(*batch) == [("0", 8, 1, 448, 448)]


def test_settings_of_nccl() -> None:
    assert find(record("all_reduce"), NCCL_MAX_NCHANNELS="16") == [("0", 8, 0, 164, 563)]
    assert find(record("all_reduce"), NCCL_BUFFSIZE=str(8 * MiB)) == [("0", 8, 0, 459, 1577)]
    assert find(record("all_to_all"), NCCL_MAX_P2P_NCHANNELS="4") == [("0", 8, 7, 7 * 4 * 14, 7 * 4 * 14)]
    with pytest.raises(LayoutError, match="NCCL_BUFFSIZE must be a positive integer, got '4M'"):
        NcclSettings.read({"NCCL_BUFFSIZE": "4M"})


def test_a_card_of_which_nothing_is_published_has_a_wide_range() -> None:
    assert find_card("4090").nccl is None and find(record("all_reduce"), card="4090") == [
        ("0", 8, 0, 256, 1126)
    ]
    assert find(record("all_reduce"), card="a100-80") == [("0", 8, 0, 543, 686)]


def make_row(reserved: float) -> RankRow:
    device = Device("h100", "H100", "cuda", memory_bytes=H100.memory, limit_bytes=round(78.4 * GiB))
    peak = Peak(reserved_bytes=round(reserved * GiB))
    rehearsal = Rehearsal("fits", "", device, 2, peak, {}, [], [], 0, 0, None, round(0.02 * reserved * GiB))  # type: ignore[arg-type]
    return RankRow(0, 0, 0, "fits", 2, peak, rehearsal=rehearsal)


@pytest.mark.parametrize(
    ("reserved", "given", "verdict"),
    [
        (70, None, "fits"),
        (76, None, "tight"),
        (78, None, "tight"),
        (78.2, None, "does not fit"),
        (78.2, 0, "tight"),
    ],
)
def test_what_it_takes_may_decide(reserved: float, given: int | None, verdict: str) -> None:
    made = [Communicator(0, "world", 8, 0, GiB // 3, GiB), Communicator(1, "world", 8, 0, 80 * GiB, 80 * GiB)]
    row = add_nccl(make_row(reserved), made, given)
    assert row.verdict == verdict
    assert (row.nccl_low_bytes, row.nccl_high_bytes) == ((GiB // 3, GiB) if given is None else (0, 0))


def test_figures_of_ones_own_card(tmp_path) -> None:  # type: ignore[no-untyped-def]
    own = tmp_path / "cards.toml"
    own.write_text("[mine]\nmemory = 24\nnccl = { low = 0.1, high = 0.2, channels = [2, 4] }\n")
    assert replace(read_cards(own)[0].nccl, low=0).high == round(0.2 * GiB)  # type: ignore[type-var]
    own.write_text("[mine]\nmemory = 24\nnccl = { low = 0.1 }\n")
    with pytest.raises(
        CatalogueError, match=r"nccl must be as in \{ low = 0.3, high = 0.9, channels = \[16, 32\] \} \(GiB\)"
    ):
        read_cards(own)
