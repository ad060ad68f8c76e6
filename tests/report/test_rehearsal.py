"""`understudy.rehearse`: what it says, what it leaves as it was, how it is saved and shown."""

from __future__ import annotations

import json
import re
from functools import partial

import jsonschema
import pytest
import torch
import torch.nn.functional as F

import understudy
from tests.report.programs import BATCH, GPT, LENGTH, PROGRAMS, VOCABULARY, train
from understudy.report.rehearsal import CATEGORIES, Rehearsal, read_schema
from understudy.report.text import fold_modules, write_text

MiB = 1 << 20
GiB = 1 << 30


@pytest.fixture(scope="module")
def on_h100() -> Rehearsal:
    program = partial(train, torch.optim.AdamW, autocast=True, sdpa=True, layers=4, device="cuda")
    return understudy.rehearse(program, device="h100")


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    logits = model(x)
    F.cross_entropy(logits.view(-1, logits.shape[-1]), x.view(-1)).backward()
    optimizer.step()
    optimizer.zero_grad()


# --- what it says


def test_categories_of_a_training_step() -> None:
    found = understudy.rehearse(PROGRAMS["adam"])
    gpt = GPT()
    parameters = sum(p.nbytes for p in gpt.parameters())
    counters = 4 * len(list(gpt.parameters()))
    assert found.categories["parameters"] == parameters
    assert found.categories["optimizer_state"] == 2 * parameters + counters
    assert found.categories["buffers"] == 2 * LENGTH * LENGTH
    assert found.categories["inputs"] == 2 * 8 * BATCH * LENGTH
    assert sum(found.categories.values()) == found.peak.allocated_bytes
    assert (found.steps, found.peak.step, found.peak.phase, found.verdict) == (2, 1, "backward", "fits")


def test_an_optimizer_written_by_hand() -> None:
    def program() -> None:
        model = torch.nn.Linear(200, 300)
        momentum = [torch.zeros_like(p) for p in model.parameters()]
        for _ in range(3):
            model(torch.randn(8, 200)).sum().backward()
            with torch.no_grad():
                for p, m in zip(model.parameters(), momentum, strict=True):
                    m.mul_(0.9).add_(p.grad)
                    p -= 0.1 * m
                    p.grad = None

    found = understudy.rehearse(program)
    assert found.categories["optimizer_state"] == 4 * (200 * 300 + 300)
    assert found.categories["gradients"] == 4 * (200 * 300 + 300)


def test_the_place_of_the_peak() -> None:
    def program() -> None:
        model = torch.nn.Sequential(
            torch.nn.Linear(8, 8), torch.nn.Linear(8, 50_000), torch.nn.Linear(50_000, 1)
        )
        model(torch.randn(64, 8))

    found = understudy.rehearse(program)
    assert (found.peak.phase, found.peak.module) == ("forward", "2")
    assert re.fullmatch(r"tests/report/test_rehearsal.py:\d+", found.peak.line)
    largest = found.peak.contributors[0]
    assert (largest.category, largest.module, largest.bytes) == ("activations", "1", 4 * 64 * 50_000)


def test_results_that_outlive_a_step_are_activations() -> None:
    def program() -> None:
        model = torch.nn.Linear(8, 50_000)
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(2):
            for _ in range(2):  # accumulated; each output is freed in the next forward pass
                output = model(torch.randn(64, 8))
                output.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    line = understudy.rehearse(program).timeline
    first = [i for i, phase in enumerate(line.phases) if phase == "optimizer" and line.steps[i] == 0]
    assert first and {line.bytes["activations"][i] for i in first} == {4 * 64 * 50_000}


def test_backward_is_told_by_module() -> None:
    found = understudy.rehearse(PROGRAMS["adam"])
    macs = {row.path: row.macs for row in found.modules}
    rows = BATCH * LENGTH
    forward_and_backward = 3 * rows * 64 * 256
    assert macs["blocks.0.up"] == macs["blocks.1.down"] == 2 * forward_and_backward  # two steps


def test_phases_have_their_work() -> None:
    found = understudy.rehearse(PROGRAMS["adam"])
    phases = {(row.step, row.phase): row for row in found.phases}
    assert phases[0, "backward"].macs == 2 * phases[0, "forward"].macs > 0
    assert phases[0, "optimizer"].macs == 0 and phases[0, "optimizer"].operations > 0
    assert found.macs == sum(row.macs for row in found.phases) and found.flops == 2 * found.macs
    assert max(row.peak_bytes for row in found.phases) == found.peak.allocated_bytes


def test_the_closure_of_an_optimizer_has_its_phases() -> None:
    def train() -> None:
        model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Tanh(), torch.nn.Linear(256, 256))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        x = torch.randn(4096, 256)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)

    rehearsal = understudy.rehearse(train)
    assert {row.phase for row in rehearsal.phases if row.macs} == {"forward", "backward"}
    assert rehearsal.peak.phase == "backward" and rehearsal.categories["activations"] >= 4096 * 256 * 4


def test_batches_of_accumulation_are_inputs() -> None:
    def train() -> None:
        model = torch.nn.Linear(256, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            for _ in range(2):
                model(torch.randn(64, 256)).sum().backward()
            optimizer.step()

    assert understudy.rehearse(train).categories["inputs"] == 64 * 256 * 4


def test_operators_without_a_formula_are_listed() -> None:
    def program() -> None:
        torch.linalg.eigh(torch.eye(50) + 1)
        torch.ones(50, 50) @ torch.ones(50, 50)

    coverage = understudy.rehearse(program).coverage
    assert coverage.unknown == {"aten._linalg_eigh.default": 1}
    assert coverage.known == coverage.operators - 1 and 0 < coverage.unknown_share < 1


# --- on a card


def test_on_a_card(on_h100: Rehearsal) -> None:
    peak = on_h100.peak
    assert on_h100.verdict == "fits" and on_h100.headline.startswith("fits on H100: ")
    assert peak.requested_bytes <= peak.allocated_bytes <= peak.reserved_bytes
    assert peak.reserved_bytes % (2 * MiB) == 0
    assert on_h100.categories["scratch"] >= 64 * MiB  # two workspaces of cuBLAS
    assert on_h100.device.key == "h100" and on_h100.device.limit_bytes < on_h100.device.memory_bytes
    assert "simulated" in on_h100.software
    assert on_h100.time is not None and on_h100.time.seconds_per_step > 0


def test_what_does_not_fit_says_by_how_much() -> None:
    def program() -> None:
        kept = [torch.empty(1 << 30, device="cuda") for _ in range(5)]  # 20 GiB
        torch.cat(kept).sum()

    found = understudy.rehearse(program, device="t4")
    assert found.verdict == "does not fit"
    assert found.peak.reserved_bytes >= 40 << 30
    assert found.out_of_memory is not None and "test_rehearsal.py" in found.out_of_memory.line
    assert re.search(
        r"does not fit on T4: 40\.0 GiB needed, 14\.4 usable \(14\.6 less 0\.120 outside of the allocator\), 25\.6 GiB too much",
        found.headline,
    )


def test_the_peak_is_that_of_the_run_whatever_the_program_resets() -> None:
    def program() -> None:
        torch.empty(8 * GiB, dtype=torch.uint8, device="cuda")
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.empty(GiB, dtype=torch.uint8, device="cuda")
        assert torch.cuda.max_memory_reserved() == GiB

    peak = understudy.rehearse(program, device="t4").peak
    assert peak.reserved_bytes == peak.allocated_bytes == 8 * GiB


def test_margin_context_and_budget() -> None:
    def program() -> None:
        torch.empty(3 << 30, dtype=torch.uint8, device="cuda").add_(1)

    def verdict(**options: object) -> str:
        return understudy.rehearse(
            program, device="t4", options=understudy.RehearsalOptions(**options)
        ).verdict

    assert verdict() == "fits"
    assert verdict(margin=4.0) == "tight"
    assert verdict(context=12 << 30) == "does not fit"
    assert verdict(budget=2 << 30) == "does not fit"
    assert verdict(budget=(3 << 30) + 1000) == "tight"


def test_scratch_memory_is_at_the_peak() -> None:
    """The maximum over a strided dimension needs 157 MiB that no tensor has."""

    def program() -> None:
        torch.empty(10_000, 512, device="cuda").t().max(1)

    found = understudy.rehearse(program, device="h100")
    assert found.categories["scratch"] == 164_626_432 + 16
    assert found.peak.operator == "aten.max.dim"


# --- what stays as it was


@pytest.mark.parametrize("device", [None, "h100"])
def test_real_state_is_as_before(device: str | None) -> None:
    model = GPT(sdpa=True)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    step(model, optimizer, x)
    model(x).sum().backward()

    def state() -> list[torch.Tensor]:
        states = [v for s in optimizer.state.values() for v in s.values()]
        return [*model.state_dict().values(), *(p.grad for p in model.parameters()), *states]

    before = [tensor.clone() for tensor in state()]
    identities = [id(p) for p in model.parameters()]
    found = understudy.rehearse(step, model, optimizer, x, device=device)
    understudy.rehearse(lambda: step(model, optimizer, x), device=device)
    after = state()
    assert all(type(tensor) in (torch.Tensor, torch.nn.Parameter) for tensor in after)
    assert all(map(torch.equal, before, after)) and len(before) == len(after)
    assert [id(p) for p in model.parameters()] == identities
    assert found.steps == 1
    step(model, optimizer, x)


def test_state_is_given_back_after_an_error() -> None:
    model = torch.nn.Linear(3, 3)
    weight = model.weight

    def program() -> None:
        model(torch.ones(2, 3))
        raise KeyError("of the program")

    with pytest.raises(KeyError, match="of the program"):
        understudy.rehearse(program)
    assert model.weight is weight and type(model(torch.ones(2, 3))) is torch.Tensor


# --- saved and shown


def test_json_round_trip_and_schema(on_h100: Rehearsal) -> None:
    data = json.loads(on_h100.to_json())
    jsonschema.validate(data, read_schema())
    assert Rehearsal.from_json(on_h100.to_json()) == on_h100
    wanted = (
        "schema_version verdict device steps peak categories modules lines macs flops coverage answers writes "
        "assumptions software"
    )
    assert set(wanted.split()) <= set(data)
    assert {
        "allocated_bytes",
        "reserved_bytes",
        "active_bytes",
        "requested_bytes",
        "step",
        "phase",
        "module",
        "line",
    } <= set(data["peak"])
    assert set(data["categories"]) == set(CATEGORIES)


def test_the_timeline_keeps_the_peak(on_h100: Rehearsal) -> None:
    line = on_h100.timeline
    totals = [sum(sizes) for sizes in zip(*line.bytes.values(), strict=True)]
    assert len(totals) == len(line.operators) == len(line.phases) <= 5000
    assert {name: sizes[line.peak_index] for name, sizes in line.bytes.items()} == on_h100.categories
    assert line.phases[line.peak_index] == on_h100.peak.phase


def test_groups_of_parameters_are_as_before() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(
        [{"params": [p], "lr": lr} for p, lr in zip(model.parameters(), (0.1, 0.2), strict=True)]
    )
    groups = list(optimizer.param_groups)

    def program() -> None:
        optimizer.load_state_dict(optimizer.state_dict())  # makes other groups
        optimizer.param_groups.pop()["lr"] = 0.5

    understudy.rehearse(program)
    assert [group is before for group, before in zip(optimizer.param_groups, groups, strict=True)] == [
        True,
        True,
    ]
    assert [group["lr"] for group in groups] == [0.1, 0.2] and groups[1]["params"][0] is model.bias


def test_text_has_the_verdict_first(on_h100: Rehearsal) -> None:
    text = write_text(on_h100)
    assert text.splitlines()[0] == on_h100.headline
    assert "\033" not in text and text == str(on_h100)
    assert "blocks.0..3 (Block x4)" in text
    assert "FLOPs (fma=2)" in text and "calls known" in text
    assert max(map(len, text.split("Notes")[0].splitlines()[1:])) <= 100


@pytest.mark.parametrize("width", [40, 60, 80, 140])
def test_narrow_terminals(on_h100: Rehearsal, width: int) -> None:
    tables = write_text(on_h100, width).split("Notes")[0].splitlines()
    assert all(len(line) <= max(width, 60) for line in tables[1:] if line.startswith("  "))


def test_colour_is_for_terminals(on_h100: Rehearsal) -> None:
    assert write_text(on_h100, has_colour=True).startswith("\033[1;32mfits")


def test_repeated_layers_are_folded(on_h100: Rehearsal) -> None:
    labels = {node.label.strip(): node for node in fold_modules(on_h100.modules)}
    block = labels["blocks.0..3 (Block x4)"]
    assert block.macs == sum(row.macs for row in on_h100.modules if row.path.startswith("blocks."))
    assert "up (Linear x4)" in labels


def test_a_batch_without_padding_needs_no_mask() -> None:
    """transformers looks at the values of a mask, unless it takes the tensors for those of a tracer."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, vocab_size=100
    )

    def forward(with_mask: bool) -> None:
        tokens = torch.randint(0, 100, (4, 64))
        ones = torch.ones_like(tokens)
        given = {"attention_mask": ones} if with_mask else {}
        transformers.LlamaForCausalLM(config)(input_ids=tokens, labels=tokens, **given).loss.backward()

    without, with_mask = (
        understudy.rehearse(forward, masked).peak.requested_bytes for masked in (False, True)
    )
    assert without == with_mask
    assert transformers.utils.import_utils.is_fake_tensor.__module__.startswith("transformers")
