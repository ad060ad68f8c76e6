"""Times of rehearsed programs: phases, streams, evaluation, what bounds a step."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import understudy
from understudy.report.exports import write_trace
from understudy.report.rehearsal import Rehearsal
from understudy.report.runs import RehearsalOptions
from understudy.report.times import write_cost, write_interval, write_seconds, write_step
from understudy.timing.step_time import TimeEstimate, run_cost


def rehearse(program: object, device: str = "h100", **options: object) -> Rehearsal:
    return understudy.rehearse(program, device=device, options=RehearsalOptions(**options))  # type: ignore[arg-type]


def time_of(program: object, device: str = "h100", **options: object) -> TimeEstimate:
    time = rehearse(program, device, **options).time
    assert time is not None
    return time


def make_model(width: int = 4096, layers: int = 4) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).cuda().bfloat16()


def train(
    steps: int = 3,
    evaluations: int = 0,
    batch: int = 8192,
    reads: bool = False,
    width: int = 4096,
    layers: int = 4,
) -> None:
    model = make_model(width, layers)
    criterion = nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.empty(batch, width, device="cuda", dtype=torch.bfloat16)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = criterion(model(x), x)
        loss.backward()
        optimizer.step()
        if reads:
            loss.item()
        if evaluations:
            model.eval()
            with torch.no_grad():
                for _ in range(evaluations):
                    criterion(model(x), x).item()
            model.train()


def test_large_products_bound_a_step() -> None:
    time = time_of(train)
    assert time.per == "step" and time.steps == 2
    assert next(iter(time.bound_by)) == "products"
    assert sum(time.bound_by.values()) == pytest.approx(1)
    flops = 8192 * 4096 * 4096 * 2 * (4 * 3 - 1)  # the first layer has no gradient of its input
    assert time.hfu == pytest.approx(flops / 989.4e12 / time.seconds_per_step, rel=1e-3)
    assert 0.5 < time.hfu < 1 and time.mfu == time.hfu
    assert time.samples_per_second == pytest.approx(8192 / time.seconds_per_step)
    assert time.low_seconds < time.seconds_per_step < time.high_seconds
    assert sum(time.phases.values()) == pytest.approx(time.seconds_per_step)
    assert time.phases["backward"] > 1.5 * time.phases["forward"]


def test_small_products_are_bound_by_launches() -> None:
    time = time_of(lambda: train(batch=8, width=64, layers=32))
    assert next(iter(time.bound_by)) == "launches"
    assert time.host_seconds > 0.8 * time.seconds_per_step > time.card_seconds
    big = time_of(train)
    assert time.high_seconds / time.low_seconds > big.high_seconds / big.low_seconds


def test_a_slower_host_makes_a_host_bound_step_slower() -> None:
    def program() -> None:
        train(batch=8, width=64, layers=32)

    fast, slow = (time_of(program, host=host).seconds_per_step for host in ("desktop", "cloud"))
    assert slow > 1.5 * fast
    fast, slow = (time_of(train, host=host).seconds_per_step for host in ("desktop", "cloud"))
    assert slow < 1.05 * fast


def test_evaluation_is_in_no_step() -> None:
    """It was divided among the steps."""
    plain, evaluated = time_of(train), time_of(lambda: train(evaluations=5))
    assert evaluated.seconds_per_step == pytest.approx(plain.seconds_per_step, rel=0.02)
    assert plain.evaluation_seconds == 0
    assert evaluated.evaluation_seconds == pytest.approx(3 * 5 * plain.phases["forward"], rel=0.1)
    assert "evaluation" not in evaluated.phases
    assert evaluated.hfu == pytest.approx(plain.hfu, rel=0.02)


def test_a_frozen_teacher_is_a_part_of_the_step() -> None:
    def program(with_teacher: bool) -> None:
        student, teacher = make_model(), make_model().eval().requires_grad_(False)
        optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
        x = torch.empty(8192, 4096, device="cuda", dtype=torch.bfloat16)
        for _ in range(2):
            target = x
            if with_teacher:
                with torch.no_grad():
                    target = teacher(x)
            (student(x) - target).pow(2).mean().backward()
            optimizer.step()

    alone, taught = (time_of(lambda with_=with_: program(with_)) for with_ in (False, True))
    assert taught.seconds_per_step > 1.2 * alone.seconds_per_step
    assert taught.evaluation_seconds == 0


def test_a_forward_pass_has_the_time_of_a_pass() -> None:
    def program(passes: int) -> None:
        model = make_model().eval()
        x = torch.empty(8192, 4096, device="cuda", dtype=torch.bfloat16)
        with torch.no_grad():
            for _ in range(passes):
                model(x)

    one, four = time_of(lambda: program(1)), time_of(lambda: program(4))
    assert one.per == four.per == "pass" and four.steps == 4
    assert four.seconds_per_step == pytest.approx(one.seconds_per_step, rel=0.02)


def test_accumulated_gradients_are_one_step() -> None:
    def program(parts: int) -> None:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.empty(8192, 4096, device="cuda", dtype=torch.bfloat16)
        for _ in range(2):
            for _ in range(parts):
                model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    one, two = time_of(lambda: program(1)), time_of(lambda: program(2))
    assert two.seconds_per_step == pytest.approx(2 * one.seconds_per_step, rel=0.1)
    assert two.samples_per_second == pytest.approx(one.samples_per_second or 0, rel=0.1)


def test_recomputation_is_in_hfu_and_not_in_mfu() -> None:
    """Of two layers that are checkpointed together, torch computes the first one again: the second saves only its input."""

    def program(checkpoints: bool) -> None:
        model = nn.Sequential(*(nn.Sequential(*make_model(layers=2)) for _ in range(2)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.empty(8192, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(2):
            y = x
            for layer in model.children():
                y = (
                    torch.utils.checkpoint.checkpoint(layer, y, use_reentrant=False)
                    if checkpoints
                    else layer(y)
                )
            y.sum().backward()
            optimizer.step()

    plain, again = time_of(lambda: program(False)), time_of(lambda: program(True))
    assert plain.mfu == plain.hfu
    assert again.hfu == pytest.approx(again.mfu * 7 / 6, rel=0.01)


def test_an_item_in_each_step_is_waited_for() -> None:
    def program(reads: bool) -> None:
        train(steps=6, batch=512, width=1024, reads=reads, layers=8)

    free, waiting = (time_of(lambda reads=reads: program(reads)) for reads in (False, True))
    assert waiting.seconds_per_step > free.seconds_per_step


def test_streams_with_events_overlap() -> None:
    def program(overlaps: bool) -> None:
        side = torch.cuda.Stream()
        model, other = make_model(), make_model()
        x = torch.empty(8192, 4096, device="cuda", dtype=torch.bfloat16)
        with torch.no_grad():
            for _ in range(3):
                model(x)
                with torch.cuda.stream(side if overlaps else torch.cuda.current_stream()):
                    y = other(x)
                torch.cuda.current_stream().wait_stream(side)
                y.sum()

    serial, parallel = (time_of(lambda overlaps=overlaps: program(overlaps)) for overlaps in (False, True))
    assert parallel.seconds_per_step == pytest.approx(serial.seconds_per_step / 2, rel=0.1)
    assert parallel.card_seconds == pytest.approx(serial.card_seconds, rel=0.02)
    assert {"cuda:0", "cuda:0, stream 1"} <= set(parallel.trace.clock_names)


def test_an_event_of_another_stream_is_waited_for() -> None:
    def program(waits: bool) -> None:
        side, done = torch.cuda.Stream(), torch.cuda.Event()
        model = make_model()
        x = torch.empty(8192, 4096, device="cuda", dtype=torch.bfloat16)
        with torch.no_grad():
            model(x)
            done.record()
            with torch.cuda.stream(side):
                if waits:
                    done.wait()
                model(x)
            torch.cuda.synchronize()

    free, waiting = (time_of(lambda waits=waits: program(waits)) for waits in (False, True))
    assert waiting.seconds_per_step == pytest.approx(2 * free.seconds_per_step, rel=0.1)


def test_a_slow_input_pipeline_bounds_the_step() -> None:
    def program() -> None:
        model = make_model(256, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            x = torch.zeros(1 << 16, 256)
            for _ in range(20):
                x = x * 2
            model(x.cuda().bfloat16()).sum().backward()
            optimizer.step()

    time = time_of(program)
    assert next(iter(time.bound_by)) == "input"


def test_tokens_are_counted() -> None:
    """Integers of two dimensions, of which the first is that of the first input: offsets of tables are not tokens."""

    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, numbers: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
            return self.linear(numbers)

    def recommend() -> None:
        model = Tables().cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            numbers, offsets = torch.zeros(64, 4), torch.zeros(3, 64, dtype=torch.long)
            model(numbers.cuda(), offsets.cuda()).sum().backward()
            optimizer.step()

    def program() -> None:
        model = nn.Sequential(nn.Embedding(1000, 512), nn.Linear(512, 1000)).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        tokens = torch.zeros(8, 1024, dtype=torch.long, device="cuda")
        for _ in range(2):
            model(tokens).sum().backward()
            optimizer.step()

    time = time_of(program)
    assert time.tokens_per_second == pytest.approx(8192 / time.seconds_per_step)
    assert "tokens/s" in write_step(time)
    assert time_of(recommend).tokens_per_second is None
    counted = time_of(program, per_step=77)
    assert counted.samples_per_second == pytest.approx(77 / counted.seconds_per_step)


def test_what_checkpointing_calls_again_is_not_counted() -> None:
    """Blocks get positions, integers of two dimensions as well."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return self.inner(x) + positions[..., None]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(100, 64)
            self.blocks = nn.ModuleList(Block() for _ in range(4))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x, positions = self.tokens(ids), torch.arange(ids.shape[1], device=ids.device)[None]
            for block in self.blocks:
                x = checkpoint(block, x, positions, use_reentrant=False)
            return x

    def program() -> None:
        model = Model().cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(torch.zeros(8, 32, dtype=torch.long, device="cuda")).sum().backward()
            optimizer.step()

    time = time_of(program)
    assert time.tokens_per_second == pytest.approx(8 * 32 / time.seconds_per_step)
    assert time.samples_per_second == pytest.approx(8 / time.seconds_per_step)


def test_seconds_by_module_line_and_operator_add_up() -> None:
    rehearsal = rehearse(train)
    assert rehearsal.time is not None
    by_module = sum(row.seconds for row in rehearsal.modules)
    by_line = sum(row.seconds for row in rehearsal.lines)
    assert by_module == pytest.approx(by_line)
    assert by_module == pytest.approx(3 * rehearsal.time.card_seconds)
    products = [row for row in rehearsal.operators if row.kind == "products"]
    assert sum(row.seconds for row in products) > 0.7 * by_module
    assert sum(row.seconds for row in rehearsal.operators) == pytest.approx(by_module)
    layers = [row.seconds for row in rehearsal.modules if row.kind == "Linear"]
    assert max(layers[1:]) < 1.5 * min(layers[1:])


def test_the_text_has_every_figure_with_its_interval() -> None:
    rehearsal = rehearse(train)
    above = " ".join(str(rehearsal).partition("Where the memory goes")[0].split())
    assert re.search(
        r" step [\d.]+ m?s \([\d.]+–[\d.]+\), [\d.]+% MFU, [\d.]+% HFU, [\d,]+ samples/s; bound by: products",
        above,
    )
    assert "of a step" in rehearsal.to_html()


def test_attention_in_training_widens_the_interval() -> None:
    def program(heads: int, is_trained: bool) -> float:
        def run() -> None:
            x = torch.empty(
                8, heads, 4096, 128, device="cuda", dtype=torch.bfloat16, requires_grad=is_trained
            )
            weight = nn.Linear(4096, 4096, device="cuda", dtype=torch.bfloat16)
            for _ in range(3):
                found = weight(torch.empty(8192, 4096, device="cuda", dtype=torch.bfloat16)).sum()
                if heads:
                    found = found + nn.functional.scaled_dot_product_attention(x, x, x).sum()
                if is_trained:
                    found.backward()

        time = time_of(run)
        return time.high_seconds / time.seconds_per_step

    assert program(16, is_trained=True) > 1.2 * program(0, is_trained=True)
    assert program(16, is_trained=False) == pytest.approx(program(0, is_trained=False), rel=0.01)


def test_json_keeps_the_time() -> None:
    rehearsal = rehearse(train)
    assert Rehearsal.from_json(rehearsal.to_json()).time == rehearsal.time


def test_the_trace_has_the_clocks(tmp_path: Path) -> None:
    rehearsal = rehearse(train)
    write_trace(rehearsal, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert rehearsal.time is not None
    clocks = {
        event["tid"]: event["args"]["name"]
        for event in events
        if event["name"] == "thread_name" and event["pid"] == 2
    }
    spans: dict[str, list[float]] = {name: [] for name in clocks.values()}
    for event in events:
        if event["ph"] == "X" and event["pid"] == 2:
            spans[clocks[event["tid"]]].append(event["dur"])
    assert sum(spans["cuda:0"]) == pytest.approx(1e6 * 2 * rehearsal.time.card_seconds, rel=0.01)
    launches = sum(spans["host"])
    assert 0.5e6 * 2 * rehearsal.time.host_seconds < launches < 1.01e6 * 2 * rehearsal.time.host_seconds


def test_the_cost_of_a_run() -> None:
    time = time_of(train)
    cost = run_cost(time, 3_600_000, cards=8, price=2.5)
    assert cost.hours == pytest.approx(1000 * time.seconds_per_step)
    assert cost.card_hours == pytest.approx(8 * cost.hours)
    assert cost.money == pytest.approx(20 * cost.hours)
    assert "card-hours" in write_cost(cost) and "3,600,000 steps" in write_cost(cost)


def test_without_a_card_there_is_no_time() -> None:
    def program() -> None:
        nn.Linear(4, 4)(torch.zeros(2, 4))

    assert understudy.rehearse(program).time is None


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0.412, "0.412 s (0.33–0.49)"),
        (0.0136, "13.6 ms (11–16)"),
        (136e-6, "136 µs (110–160)"),
        (5400, "1.50 h (1.2–1.8)"),
        (12345e-6, "12.3 ms (9.9–15)"),
        (0.125, "0.125 s (0.10–0.15)"),
    ],
)
def test_intervals_are_written_in_one_unit(seconds: float, text: str) -> None:
    assert write_interval(seconds, 0.8 * seconds, 1.2 * seconds) == text


@pytest.mark.parametrize(
    "seconds, text",
    [(0.0, "-"), (2.5, "2.50 s"), (0.227, "227 ms"), (429e-6, "429 µs"), (28.4e-6, "28.4 µs")],
)
def test_seconds_of_a_table_have_a_unit(seconds: float, text: str) -> None:
    assert write_seconds(seconds) == text
