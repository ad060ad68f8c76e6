"""The listener that measures: it keeps nothing alive, and its cost grows with the number of calls."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import weakref

import pytest
import torch

import understudy
from tests.counting import count_calls
from understudy.report.measurement import Measurement
from understudy.report.runs import MeasuredRun


def test_nothing_is_kept_alive() -> None:
    with MeasuredRun() as recorder:
        x = torch.ones(1000)
        reference = weakref.ref(x)
        recorder.mode.report_events()
        totals = recorder.measurement.devices[torch.device("cpu")]
        assert totals.live == 4000
        del x
        recorder.mode.report_events()
        assert reference() is None and totals.live == 0


def test_records_do_not_make_the_collector_run_more_often() -> None:
    before = gc.get_threshold()
    with MeasuredRun():
        assert gc.get_threshold()[0] > before[0] and gc.get_threshold()[1:] == before[1:]
    assert gc.get_threshold() == before
    try:
        with MeasuredRun():
            gc.set_threshold(900)  # what the program has chosen
        assert gc.get_threshold()[0] == 900
    finally:
        gc.set_threshold(*before)


def test_views_and_writes_in_place_are_not_counted_twice() -> None:
    def program() -> None:
        x = torch.ones(1000)
        y = x.view(10, 100).t().detach()
        y.mul_(torch.ones(()))
        del x
        y.sum()

    assert understudy.rehearse(program).peak.allocated_bytes == 4000 + 4


def test_parameters_are_not_searched_for_at_calls_of_modules_without_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Transforms of pictures are modules, called for each picture of a batch."""
    searches = []
    search = Measurement.find_parameters
    monkeypatch.setattr(Measurement, "find_parameters", lambda self: (searches.append(1), search(self)))
    crop = torch.nn.ReLU()

    def program() -> None:
        for _ in range(20):
            crop(torch.ones(3))
        torch.nn.Linear(3, 3)(torch.ones(3))

    assert understudy.rehearse(program).categories["parameters"] == 36 + 12
    assert len(searches) == 2


def test_a_resized_storage_has_two_blocks_for_a_moment() -> None:
    def program() -> None:
        x = torch.empty(100)
        x.resize_(1000)

    assert understudy.rehearse(program).peak.allocated_bytes == 400 + 4000


def test_cost_grows_linearly() -> None:
    def measure(count: int) -> int:
        def program() -> None:
            kept = [torch.randn(8) for _ in range(50)]
            for index in range(count):
                kept[index % 50] = kept[index % 50] + kept[(index + 1) % 50]

        with count_calls() as calls:
            understudy.rehearse(program)
        return calls.count

    measure(100)
    assert measure(4000) < 5 * measure(1000)


# --- whose memory it is


class Part(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Autoencoder(torch.nn.Module):
    """As of Lightning: its parts are called by a method, `forward` never is."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Part(32), Part(32)

    def training_step(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encoder(x)).square().mean()


def test_parts_of_a_module_whose_forward_is_not_called() -> None:
    def train() -> None:
        Autoencoder().training_step(torch.randn(4, 32)).backward()

    found = understudy.rehearse(train)
    rows = {row.path: row for row in found.modules}
    assert rows[""].kind == "Autoencoder"
    assert rows["encoder.layer"].parameters == rows["decoder.layer"].parameters == 4096
    assert rows["encoder.layer"].macs == 2 * 4 * 32 * 32  # forward, and the gradient of the weight
    assert sum(row.macs for row in found.modules) == found.macs


def test_several_models_have_their_names_in_the_program() -> None:
    def train() -> None:
        generator, discriminator, criterion = Part(32), Part(32), torch.nn.MSELoss()
        critics = [Part(16), Part(16)]
        score = discriminator(generator(torch.randn(4, 32)))
        scores = [critic(torch.randn(4, 16)).sum() for critic in critics]
        (criterion(score, torch.zeros(4, 32)) + sum(scores)).backward()

    found = understudy.rehearse(train)
    rows = {row.path: row for row in found.modules}
    assert rows["generator.layer"].parameters == rows["discriminator.layer"].parameters == 4096
    assert rows["critics.0.layer"].parameters == rows["critics.1.layer"].parameters == 1024
    assert rows["criterion"].kind == "MSELoss"
    assert sum(row.macs for row in found.modules) == found.macs
    assert found.peak.module in rows
    assert "(whole program)" in str(found)


def test_modules_of_a_list_are_named_by_their_place_in_it() -> None:
    def program() -> None:
        blocks, x = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3)), torch.randn(2, 4)
        for block in blocks:
            x = block(x)

    paths = {row.path for row in understudy.rehearse(program).modules}
    assert {"blocks.0", "blocks.1", "blocks.2"} <= paths and not any(
        path.startswith("block_") for path in paths
    )


def test_a_loss_beside_one_model_is_a_module_of_its_own() -> None:
    def train() -> None:
        net, criterion = Part(32), torch.nn.MSELoss()
        criterion(net(torch.randn(4, 32)), torch.zeros(4, 32)).backward()

    found = understudy.rehearse(train)
    assert {row.path for row in found.modules} >= {"", "layer", "criterion"}
    assert "(whole model) (Part)" in str(found)


def test_models_of_one_name_in_turn_are_one_row_if_they_are_of_one_class() -> None:
    def search() -> None:
        for part in (Part, Part, torch.nn.Linear):
            model = part(8) if part is Part else part(8, 8)
            model(torch.randn(2, 8)).sum().backward()
            del model

    found = understudy.rehearse(search)
    assert {row.path for row in found.modules if row.calls} == {"model", "model.layer", "model_2"}


def test_looking_for_names_keeps_nothing_alive() -> None:
    kept: list[bool] = []

    def train() -> None:
        model, x = Part(8), torch.randn(2, 8)
        model(x).sum().backward()
        alive = weakref.ref(x)
        del x
        kept.append(alive() is not None)

    understudy.rehearse(train)
    assert kept == [False]


def test_lines_are_not_those_of_generated_code() -> None:
    @dataclasses.dataclass
    class Batch:
        x: object = dataclasses.field(default_factory=lambda: None)
        y: object = None

        def __post_init__(self) -> None:
            self.y = make()

    def make() -> torch.Tensor:
        names: dict[str, object] = {"torch": torch}
        exec("def make():\n    return torch.ones(64)\nkept = torch.ones(32)", names)
        result: torch.Tensor = names["make"]()
        return result

    found = understudy.rehearse(lambda: Batch())
    assert all("<string>" not in row.line for row in found.lines)
    assert any(row.source == 'result: torch.Tensor = names["make"]()' for row in found.lines)
    assert any(row.source.startswith("exec(") for row in found.lines)


def test_a_step_that_fails_is_over() -> None:
    """An optimizer that runs out of memory calls no hook at the end of its step."""
    with MeasuredRun("t4", understudy.RehearsalOptions(oom="raise")) as recorder:
        for width in (40_000, 100):
            model = torch.nn.Linear(width, width, device="cuda")
            optimizer = torch.optim.Adam(model.parameters())
            model(torch.ones(4, width, device="cuda")).sum().backward()
            with contextlib.suppress(torch.OutOfMemoryError):
                optimizer.step()
    places = {
        (record.born.phase, record.line)
        for record in recorder.measurement.events
        if record.nbytes == 100 * 100 * 4
    }
    assert {phase for phase, _ in places} == {"between steps", "backward", "optimizer"}
    assert len({line for _, line in places}) == 3


class Wrapped(torch.optim.Optimizer):
    """An optimizer around another one, as those of sharded states are."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {})
        self.inner = torch.optim.Adam(parameters)
        self.kept: list[torch.Tensor] = []

    def step(self, closure: object = None) -> None:
        self.inner.step()
        self.kept.append(torch.ones(77))


def test_a_step_of_an_optimizer_around_another_one_ends_with_the_outer_one() -> None:
    with MeasuredRun() as recorder:
        model = torch.nn.Linear(4, 4)
        optimizer = Wrapped(list(model.parameters()))
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        assert recorder.measurement.places.step == 2
    born = [record.born for record in recorder.measurement.events if record.nbytes == 77 * 4]
    assert [(moment.step, moment.phase) for moment in born] == [(0, "optimizer"), (1, "optimizer")]


def test_sparse_gradients_are_rehearsed() -> None:
    """Sparse tensors have no strides: what describes kernels must not ask for them."""

    def step() -> None:
        bag = torch.nn.EmbeddingBag(1000, 8, mode="sum", sparse=True).cuda()
        optimizer = torch.optim.SGD(bag.parameters(), lr=0.1)
        rows = torch.randint(0, 1000, (40,), device="cuda")
        bag(rows, torch.arange(0, 40, 4, device="cuda")).sum().backward()
        assert bag.weight.grad is not None and bag.weight.grad.is_sparse
        optimizer.step()
        volumes = torch.sparse_coo_tensor(torch.zeros(1, 10), torch.rand(10, 3, 4, 5), (50, 3, 4, 5)).cuda()
        (volumes + volumes).to_dense()

    result = understudy.rehearse(step, device="t4")
    assert result.steps == 1 and result.verdict == "fits"
