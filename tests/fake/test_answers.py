"""Reads of data that is not there: what follows from the program, what a policy makes up, and the list of it."""

from __future__ import annotations

import contextlib
import gc
import itertools
import runpy
import weakref
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from understudy import FakeTensorMode, ShapeEnv, unset_fake_temporarily
from understudy.errors import (
    ArgumentError,
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
)
from understudy.fake.values.answers import Answers, Read
from understudy.fake.values.ranges import range_of
from understudy.ops.traits.ranges import ValueRange, value_range


def plausible() -> FakeTensorMode:
    return FakeTensorMode(answers="plausible")


def given(mode: FakeTensorMode) -> list[Any]:
    assert isinstance(mode.answers, Answers)
    return mode.answers.given


# --- what follows from the program: no policy ------------------------------------------------------------------------

SURE = {
    "a number drawn below 0": (lambda: torch.rand([]) < 0.0, False),
    "a number drawn below 1": (lambda: torch.rand([]) < 1.0, True),
    "drawn in place": (lambda: torch.empty(1).uniform_(0.25, 0.5) > 0.2, True),
    "any of many drawn": (lambda: (torch.rand(1000) < 0.0).any(), False),
    "a view of what was drawn": (lambda: torch.rand(3)[1].detach() >= 0, True),
    "an expression of what was drawn": (lambda: 1.0 + torch.rand([]) * 2 < 0.5, False),
    "integers drawn": (lambda: torch.randint(3, 10, (5,)).max() < 10, True),
    "isnan of integers": (lambda: torch.isnan(torch.randint(0, 9, (5,))).any(), False),
    "isfinite of integers": (lambda: torch.isfinite(torch.randint(0, 9, (5,))).all(), True),
    "never drawn": (lambda: torch.bernoulli(torch.zeros(5)).bool().any(), False),
    "always drawn": (lambda: torch.bernoulli(torch.ones(5)).bool().all(), True),
    "or with what is true": (lambda: ((torch.randn(4) > 0) | torch.ones(4, dtype=torch.bool)).all(), True),
    "a position": (lambda: torch.randn(7).argmax() < 7, True),
    "a share": (lambda: torch.sigmoid(torch.rand([])) <= 1, True),
    "a share of a mask": (lambda: (torch.randn(300) > 0).float().mean() <= 1.1, True),
    "elements that were drawn": (
        lambda: torch.cat([torch.rand(3), torch.rand(2).flip(0)]).sort()[0].max() < 2,
        True,
    ),
    "one of two": (lambda: torch.where(torch.randn(3) > 0, torch.rand(3), 5.0).sum() < 16, True),
}


@pytest.mark.parametrize("is_inference", [False, True])
@pytest.mark.parametrize("name", SURE)
def test_what_follows_from_ranges_needs_no_policy(name: str, is_inference: bool) -> None:
    program, answer = SURE[name]
    assert bool(program()) is answer  # eager
    if is_inference and name == "drawn in place":
        pytest.skip("tensors of inference mode count no writes")
    with FakeTensorMode(), torch.inference_mode(is_inference):
        assert bool(program()) is answer


@pytest.mark.parametrize(
    "write", [torch.Tensor.logical_not_, lambda x: x.fill_(True), lambda x: x.copy_(torch.randn(2) > 0)]
)
def test_a_write_ends_a_range_in_inference_mode(write: Any) -> None:
    with FakeTensorMode(), torch.inference_mode():
        mask = torch.rand(3) < 0.0
        view = mask[1:]
        assert not mask.any()
        write(view)
        with pytest.raises(DataDependentOutputException):
            bool(mask.any())
        with pytest.raises(DataDependentOutputException):
            bool(view.any())


def test_identity() -> None:
    with FakeTensorMode():
        x = torch.randint(0, 9, (3,))
        assert torch.equal(x, x)
        assert bool((x == x).all())
        assert not bool((x != x).any())
        y = torch.randn(3)
        with pytest.raises(DataDependentOutputException):
            torch.equal(y, y)  # NaN is not equal to itself
        with pytest.raises(DataDependentOutputException):
            bool((y == y).all())


def test_a_write_ends_a_range() -> None:
    with FakeTensorMode():
        x = torch.rand([])
        x.mul_(3)
        assert bool(x < 4)
        x.normal_()
        with pytest.raises(DataDependentOutputException):
            bool(x < 4)
        y = torch.rand(2)
        y[0].normal_()  # a write through a view
        with pytest.raises(DataDependentOutputException):
            bool((y < 4).all())


NOTHING: dict[str, Any] = {
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy().shape,
    "a slice": lambda x: torch.randn(3)[3:].tolist(),
    "nonzero": lambda x: x.nonzero().shape,
    "mask": lambda x: x[x > 0].shape,
    "unique": lambda x: x.unique().shape,
    "repeat_interleave": lambda x: x.repeat_interleave(torch.randint(0, 3, (0,))).shape,
    "bincount": lambda x: torch.bincount(torch.randint(0, 3, (0,))).tolist(),
    "equal": lambda x: torch.equal(x, torch.randn(0)),
}


@pytest.mark.parametrize("name", NOTHING)
def test_tensors_without_elements_need_no_data(name: str) -> None:
    expected = NOTHING[name](torch.randn(0))
    with FakeTensorMode():
        assert NOTHING[name](torch.randn(0)) == expected


def preserve_version(x: torch.Tensor) -> None:
    with torch.autograd._unsafe_preserve_version_counter(x):
        x.mul_(9)


def exchange_data(x: torch.Tensor) -> None:
    x.data = torch.randn(3)


def resize_storage(x: torch.Tensor) -> None:
    x.untyped_storage().resize_(0)
    x.untyped_storage().resize_(12)


UNCOUNTED: dict[str, Any] = {
    "data": lambda x: x.data.mul_(9),
    "data, drawn": lambda x: x.data.normal_(0.0, 1.0),
    "data, filled": lambda x: x.data.fill_(9),
    "a part of the data": lambda x: x.data[1:].mul_(9),
    "exchanged data": exchange_data,
    "another tensor on the storage": lambda x: torch.empty(0).set_(x.untyped_storage()).mul_(9),
    "resized storage": resize_storage,
    "preserved version": preserve_version,
}


@pytest.mark.parametrize("name", UNCOUNTED)
def test_a_write_that_no_version_counter_tells_of(name: str) -> None:
    write = UNCOUNTED[name]
    with FakeTensorMode(shape_env=ShapeEnv()):
        x = torch.rand(3)
        assert bool((x < 4).all())
        write(x)
        with pytest.raises(GuardOnDataDependentSymNode):
            bool((x < 4).all())
        before = x.nonzero().shape[0]
        assert str(x.nonzero().shape[0]) == str(before)
        write(x)
        assert str(x.nonzero().shape[0]) != str(before)


@pytest.mark.parametrize("name", UNCOUNTED)
def test_a_write_to_another_tensor_that_no_version_counter_tells_of(name: str) -> None:
    """A model's parameters get other data when it is moved to a device: the range of labels holds."""
    with FakeTensorMode(answers="plausible"), torch.no_grad():
        labels = torch.randint(0, 5, (256,))
        UNCOUNTED[name](torch.rand(3))
        torch.nn.Linear(3, 3).half()
        assert bool((labels < 5).all())
        assert labels.unique().shape == (5,)


def test_aliases_with_counters_of_their_own() -> None:
    with FakeTensorMode(shape_env=ShapeEnv()):
        x = torch.rand(3)
        data = x.data
        x.uniform_()
        assert bool((x < 4).all())
        data.mul_(9)
        data.mul_(9)
        with pytest.raises(GuardOnDataDependentSymNode):
            bool((x < 4).all())
        y = torch.rand(3)
        data = y.data
        before = data.nonzero().shape[0]
        y.normal_()
        with pytest.raises(GuardOnDataDependentSymNode):
            bool((data < 4).all())
        assert str(data.nonzero().shape[0]) != str(before)


def test_a_model_is_converted_without_records() -> None:
    """Parameters with records are off the hot path."""
    with FakeTensorMode():
        layer = torch.nn.Linear(3, 4)
        layer.weight.data.normal_(0.0, 1.0)
        assert layer.to(torch.float32).weight._determined is None
        assert layer.half().weight._determined is None


def test_ranges_hold_for_real_values() -> None:
    """Each rule against the real operator, on numbers drawn from the ranges that it is given."""
    torch.manual_seed(0)
    unary = [
        torch.abs,
        torch.neg,
        torch.sigmoid,
        torch.floor,
        torch.isnan,
        torch.isinf,
        torch.isfinite,
        torch.logical_not,
    ]
    unary += [
        torch.sum,
        torch.mean,
        lambda x: x.view(8, 8).sum(1),
        lambda x: x.flip(0),
        lambda x: x.sort()[0],
        lambda x: x[:3],
    ]
    unary += [
        lambda x: torch.cat([x, x + 7]),
        lambda x: x.masked_fill(x > 0.5, 9.0),
        lambda x: (x > 0.5).float().mean(),
    ]
    binary = [
        torch.add,
        torch.sub,
        torch.mul,
        torch.eq,
        torch.ne,
        torch.lt,
        torch.le,
        torch.gt,
        torch.ge,
        torch.logical_or,
    ]
    binary += [
        lambda x, y: torch.where(x > y, x, y),
        lambda x, y: torch.stack([x, y]),
        lambda x, y: x / y.sum(),
    ]
    for low, high in [(0.0, 1.0), (-2.0, 3.0), (-5.0, -4.0)]:
        real = [torch.empty(64).uniform_(low, high) for _ in range(2)]
        with FakeTensorMode():
            fake: list[Any] = [torch.empty(64).uniform_(low, high) for _ in range(2)]
            for function in (*unary, *binary):
                count = 1 if function in unary else 2
                result = range_of(function(*fake[:count]))
                with unset_fake_temporarily():
                    expected = function(*real[:count]).double()
                    assert result.low <= expected.min().item(), function
                    assert expected.max().item() <= result.high, function


def test_every_rule_is_of_an_operator_that_exists() -> None:
    for name in value_range:
        assert hasattr(torch.ops.aten, name.removeprefix("aten::")), name


def test_sizes_that_follow_from_the_program() -> None:
    with plausible() as mode:
        ranks, x = torch.tensor([0, 1, 2, 3]), torch.randn(4)
        assert (ranks == 2).nonzero().tolist() == [[2]]
        assert ranks[ranks > 1].tolist() == ranks.masked_select(ranks > 1).tolist() == [2, 3]
        assert torch.unique(torch.tensor([1, 1, 2]), return_counts=True)[1].tolist() == [2, 1]
        assert torch.bincount(ranks).tolist() == [1, 1, 1, 1] and torch.bincount(ranks, x).shape == (4,)
        assert x[ranks > 2].shape == (1,) and x.repeat_interleave(ranks).shape == (6,)
    assert given(mode) == []


def test_a_write_by_several_masks_asks_for_sizes() -> None:
    with plausible() as mode:
        x, mask = torch.randn(4, 4), torch.randn(4) > 0
        x[mask, mask] = 1.0
    assert [question.what for question in given(mode)] == ["nonzero"]


def test_a_number_in_a_text() -> None:
    with plausible():
        assert f"{torch.randn(3).square().mean()} {torch.tensor(2)}" == "2.5 2"


# --- plausible -------------------------------------------------------------------------------------------------------


def test_losses_are_positive_and_fall() -> None:
    with plausible():
        seen = [torch.nn.functional.mse_loss(torch.randn(8), torch.randn(8)).item() for _ in range(5)]
    assert all(0 < later < earlier for earlier, later in itertools.pairwise(seen))
    assert type(seen[0]) is float


def test_a_loss_that_is_read_again_is_the_same() -> None:
    with plausible() as mode:
        for _ in range(2):
            loss = torch.randn(8).square().mean()
            read = [loss.item(), float(loss), float(f"{loss}"), loss.tolist(), loss.numpy().item()]
            seen = {round(number, 5) for number in read}  # NumPy has fewer digits
            assert len(seen) == 1
        assert sum(given.count for given in mode.answers.given) == 10  # all reads are listed
        numbers = torch.randn(4)
        assert numbers.tolist() == numbers.numpy().tolist()
        first = [numbers.tolist()[0], numbers.mul_(2).tolist()[0]]
        assert first[0] > first[1]  # after a write, another number


def test_nothing_overflows() -> None:
    with plausible():
        x = torch.randn(8)
        assert not torch.isnan(x).any()
        assert torch.isfinite(x.sum())
        assert not torch.isinf(x).any().item()
        found = torch.isnan(x).any() or torch.isinf(x).any()
        assert not found


def test_the_scaler_takes_its_step() -> None:
    with plausible():
        weight = torch.nn.Parameter(torch.randn(3))
        optimizer = torch.optim.SGD([weight])
        steps: list[int] = []
        optimizer.register_step_post_hook(lambda *_: steps.append(1))
        scaler = torch.amp.GradScaler("cpu")
        for _ in range(2):
            scaler.scale(weight.sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == 65536.0
    assert len(steps) == 2


def test_checks_pass() -> None:
    with plausible():
        x = torch.randn(4, 5)
        assert (x < 0).all()
        assert not (x < 0).all()
        assert torch.equal(x, x + 1)
        assert torch.allclose(x, x + 1)
        if (x.sum(-1) > 1).any():
            raise ValueError("more than one")
        torch.distributions.Categorical(x.softmax(-1))
        torch.distributions.Normal(x, x).log_prob(x)
        torch.distributions.Bernoulli(probs=x).sample()


@pytest.mark.skipif(
    not hasattr(CodeType, "co_positions"), reason="Python 3.10 has lines of instructions, no columns"
)
class PassOn(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("above", [torch.device("cuda"), PassOn()], ids=["a device", "a function mode"])
def test_checks_pass_below_function_modes(above: Any) -> None:
    with plausible(), above:
        scores = torch.randn(4)
        assert scores.max() == 3
        if scores.sum() < 0.5:
            raise AssertionError
        assert scores.isnan().sum() == 0


def test_a_count_of_what_is_rare_is_equal_to_none() -> None:
    with plausible():
        x = torch.randn(4)
        answers = [bool(number == 0) for number in (x.isnan().sum(), (x > 0).sum(), x.sum())]
    assert answers == [True, False, False]


def test_each_condition_of_a_check_passes() -> None:
    with plausible():
        x = torch.randn(4, 5)
        if (x < 0).any() or not (x > 0).all():
            raise ValueError("negative")


def test_loops_go_on_and_end() -> None:
    """Early stopping does not stop; what iterates until a value is small enough ends all the same."""
    with plausible():
        epochs = 0
        for _ in range(20):
            epochs += 1
            if torch.randn(8).mean() > 0.01:
                print("stopped")
                break
        assert epochs == 20
        rounds, error = 0, torch.randn(())
        while error > 1e-3:
            rounds, error = rounds + 1, torch.randn(3).norm()
        assert 1 < rounds < 100
        tried = 0
        while True:
            tried += 1
            if torch.rand(()) < 0.3:
                break
        assert 1 < tried < 100
        rounds = 0
        while torch.randn(3).norm() > 1e-3 and rounds < 50:
            rounds += 1
        assert rounds == 50


DEEP = {
    "a long sum": "    number = " + " + ".join(["number"] * 1200),
    "a long chain": "    if number: pass\n" + "    elif number: pass\n" * 800,
}


@pytest.mark.parametrize("deep", DEEP.values(), ids=DEEP)
def test_checks_pass_in_files_of_deep_syntax(deep: str, tmp_path: Path) -> None:
    file = tmp_path / "deep.py"
    file.write_text(
        f"def check(mask, number=0):\n    if mask.any():\n        raise ValueError\n{deep}\n    return 'passed'\n"
    )
    with plausible():
        assert runpy.run_path(str(file))["check"](torch.rand(3) > 0.5) == "passed"


def test_a_line_search_finds_its_point() -> None:
    """Memory of L-BFGS grows with the directions that it keeps."""
    evaluations = 0
    with plausible():
        weights = nn.Parameter(torch.randn(100))
        optimizer = torch.optim.LBFGS([weights], max_iter=20, history_size=8, line_search_fn="strong_wolfe")

        def closure() -> torch.Tensor:
            nonlocal evaluations
            evaluations += 1
            optimizer.zero_grad()
            loss = weights.square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        assert len(optimizer.state[weights]["old_dirs"]) == 8
    assert 16 <= evaluations <= 26


def test_a_better_score_is_better() -> None:
    with plausible():
        best = torch.tensor(float("inf"))
        for _ in range(3):
            loss = torch.randn(5).mean()
            assert bool(loss < best)
            best = loss
        assert not bool(loss < 1e-4)
        assert not bool(loss > 1e4)


def test_masks_are_balanced_or_the_worst_case() -> None:
    for answers, share in (("plausible", 0.5), ("worst", 1.0)):
        with FakeTensorMode(answers=answers):
            x = torch.randn(8, 5)
            mask = x > 0
            count = round(40 * share)
            assert x[mask].shape == (count,)
            assert mask.nonzero().shape == (count, 2)
            assert torch.masked_select(x, mask).shape == (count,)
            x[mask] = 0.0


def test_a_mask_selects_as_many_elements_as_were_put_into_it() -> None:
    """As samplers of detectors make it: some of the positions of unknown masks, in masks of bytes."""
    with plausible():
        labels = torch.randn(2000) * 4
        chosen = []
        for found, count in ((labels >= 1, 128), (labels < 1, 384)):
            positions = torch.where(found)[0]
            mask = torch.zeros_like(labels, dtype=torch.uint8)
            mask[positions[torch.randperm(positions.numel())[:count]]] = 1
            chosen.append(mask)
        assert torch.where(chosen[0] | chosen[1])[0].shape == (512,)
        assert torch.where(torch.cat(chosen))[0].shape == (512,)
        grid = torch.zeros(8, 40, 6, dtype=torch.bool)
        grid[:, torch.randint(0, 40, (10,))] = True
        assert grid.nonzero().shape == (8 * 40 * 6 // 4, 3)
        grid[grid & (torch.randn(8, 40, 6) > 0)] = False
        assert 0 < grid.sum().item() < 480 and range_of(grid).value is None
        assert range_of(chosen[0]) == ValueRange(0, 1, False, 0.064)
        chosen[0].index_put_(
            (torch.randint(0, 2000, (5,)),), torch.tensor(3, dtype=torch.uint8), accumulate=True
        )
        assert range_of(chosen[0]).high == 255


@pytest.mark.parametrize(
    "probabilities", [torch.sigmoid, lambda x: torch.softmax(x, -1)], ids=["sigmoid", "softmax"]
)
def test_what_is_read_of_probabilities_is_one(probabilities: Any) -> None:
    with plausible():
        found = probabilities(torch.randn(64, 8, requires_grad=True)).detach()
        for read in (found.mean(), found.max(), found.min(), found[3, 4], found.view(-1)[2:9].mean()):
            assert 0 <= read.item() <= 1.01  # a bound of the rounding of a mean is a little more than 1
        assert 0 <= found.numpy().mean() <= 1
        found.mul_(100)
        assert range_of(found).high > 1


@pytest.mark.parametrize("is_inference", [False, True])
def test_an_accuracy_is_a_share(is_inference: bool) -> None:
    with plausible(), torch.inference_mode(is_inference):
        logits, labels, counted = torch.randn(32, 1000), torch.randint(0, 1000, (32,)), torch.randn(32) > 0
        is_right = logits.argmax(1) == labels
        for accuracy in (
            is_right.float().mean(),
            is_right.sum() / 32,
            (is_right & counted).sum() / counted.sum(),
        ):
            assert 0 <= accuracy.item() <= 1


def test_shares_of_unknown_masks_and_mixing_weights_are_shares() -> None:
    with plausible():
        rewards = torch.randn(8, dtype=torch.bfloat16)
        assert 0 < (rewards > 0).float().mean().item() < 1
        assert 0 < torch.distributions.Beta(0.8, 0.8).sample().item() < 1


def test_a_count_of_what_is_rare_is_none() -> None:
    """`generate` warns of padding on the wrong side where one of 8 tokens is the one that pads."""
    with plausible():
        tokens = torch.randint(0, 50_000, (8, 16))
        assert not torch.sum(tokens[:, -1] == 0) > 0
        assert torch.sum(tokens[:, -1] >= 25_000) > 0


@pytest.mark.parametrize("is_inference", [False, True])
def test_routing_is_balanced(is_inference: bool) -> None:
    with plausible(), torch.inference_mode(is_inference):
        scores = torch.randn(64, 8)
        chosen = scores.argmax(-1)
        assert (chosen == 3).nonzero().shape == (8, 1)
        assert (chosen == 3).any()
        assert torch.unique(chosen).shape == (8,)
        _, experts = scores.repeat(100, 1).softmax(-1).topk(2)
        mask = torch.nn.functional.one_hot(experts, 8).permute(2, 1, 0)
        assert torch.where(mask[3])[0].shape == (1600,)
        assert torch.where(experts == 3)[0].shape == (1600,)
        hit = (mask.sum(dim=(-1, -2)) > 0).nonzero()
        assert hit.shape == (8, 1)
        assert torch.where(mask[hit[5]].squeeze(0))[1].shape == (1600,)
        zeros = torch.zeros_like(scores.repeat(100, 1))
        for empty in (zeros, zeros.int(), zeros.int().long()):
            assert torch.where(empty.scatter(1, experts, 1).bool()[:, 3])[0].shape == (1600,)


@pytest.mark.parametrize("is_inference", [False, True])
def test_gates_written_over_zeros_agree_with_their_mask(is_inference: bool) -> None:
    """Sparse dispatchers count the chosen experts by `gates > 0`, and find them by `nonzero`."""
    for mode in (contextlib.nullcontext(), plausible()):
        with mode, torch.inference_mode(is_inference):
            top, experts = torch.rand(100, 8).topk(2)
            gates = torch.zeros_like(torch.empty(100, 8)).scatter(1, experts, top.softmax(1))
            for mask in (gates > 0, gates != 0, gates.bool(), ~(gates == 0), ~(gates <= 0)):
                rows = torch.randn(100, 4)[gates.nonzero()[:, 0]]
                assert rows.shape == (200, 4)
                assert len(rows.split(mask.sum(0).tolist())) == 8
                assert torch.where(mask)[0].shape == (200,)
            assert (gates >= 0).all()


def test_an_error_after_assumed_sizes_names_them() -> None:
    with plausible():
        rows = torch.randn(10, 2)[torch.randn(10) > 0]
        with pytest.raises(RuntimeError, match=r"made up for missing data .*nonzero of b8\[10\]@cpu → 5"):
            rows + torch.ones(4, 2)
    with FakeTensorMode(), pytest.raises(RuntimeError, match="real tensors of these shapes fail as well"):
        torch.ones(5, 2) + torch.ones(4, 2)


def add_ones(zeros: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    return zeros.scatter_add_(0, chosen.flatten(), torch.ones_like(chosen.flatten()))


COUNTS = {
    "scatter": lambda chosen: torch.zeros(len(chosen), 3).scatter(1, chosen, 1).long().sum(0).tolist(),
    "scatter_": lambda chosen: (
        chosen.new_zeros(len(chosen), 3).scatter_(1, chosen, 1).sum(0).numpy().tolist()
    ),
    "one_hot": lambda chosen: torch.nn.functional.one_hot(chosen, 3).sum((0, 1)).tolist(),
    "bincount": lambda chosen: torch.bincount(chosen.flatten(), minlength=3).tolist(),
    "histc": lambda chosen: torch.histc(chosen.float(), bins=3, min=0, max=2).long().tolist(),
    "scatter_add_": lambda chosen: add_ones(chosen.new_zeros(3), chosen).tolist(),
    "index_add": lambda chosen: (
        chosen.new_zeros(3).index_add(0, chosen.flatten(), torch.ones(14, dtype=torch.int64)).tolist()
    ),
    "unique": lambda chosen: chosen.unique(return_counts=True)[1].tolist(),
}


@pytest.mark.parametrize("name", COUNTS)
def test_counts_of_tokens_add_up(name: str) -> None:
    """14 tokens for 3 experts: the rows of all of them are split by their number."""
    torch.manual_seed(0)
    for mode in (contextlib.nullcontext(), plausible()):
        with mode:
            counts = COUNTS[name](torch.randn(7, 3).topk(2)[1])
            assert len(torch.randn(14, 4).split(counts)) == 3
    with plausible():
        assert sorted(COUNTS[name](torch.randn(7, 3).topk(2)[1])) == [4, 5, 5]


def test_rows_with_any_or_all_true() -> None:
    with plausible():
        chosen = torch.randint(0, 4, (1024, 2))
        assert torch.randn(1024)[(chosen == 1).any(-1)].shape == (448,)  # 7 of 16
        assert torch.randn(1024)[(chosen == 1).all(-1)].shape == (64,)
        assert (chosen == 1).any()
        assert not (chosen == 1).all()


def test_masks_of_what_was_drawn_have_its_share() -> None:
    with plausible():
        assert torch.randn(1000)[torch.rand(1000) < 0.1].shape == (100,)
        assert torch.randn(1000)[torch.rand(1000) > 0.25].shape == (750,)
        assert torch.randn(1000)[torch.randint(0, 10, (1000,)) >= 7].shape == (300,)
        assert torch.randn(1000)[torch.randint(0, 10, (1000,)) < 1].shape == (100,)
        assert (
            torch.zeros(9, 2000, dtype=torch.int64).scatter_(0, torch.randint(0, 9, (1, 2000)), 1) > 0
        ).sum().item() == 2000


def test_values_for_other_libraries() -> None:
    with plausible():
        x = torch.randn(2, 3)
        assert x.tolist() == [[2.5] * 3] * 2
        assert isinstance(x.numpy(), np.ndarray)
        assert float(np.asarray(x).mean()) > 0
        assert x.argmax(-1).tolist() == [1, 1]
        assert int(torch.randint(0, 10, ()).item()) in range(10)
        assert (x.argmax(-1) == torch.randint(0, 3, (2,))).sum().item() in range(3)


def test_packed_sequences_of_unknown_lengths() -> None:
    with plausible():
        lengths = torch.randint(1, 5, (3,))
        packed = torch.nn.utils.rnn.pack_padded_sequence(torch.randn(3, 5, 2), lengths, batch_first=True)
        output, _ = torch.nn.GRU(2, 4, batch_first=True)(packed)
    assert output.data.shape[-1] == 4


def test_every_answer_is_listed_once_with_its_line() -> None:
    with plausible() as mode:
        loss = torch.randn(5).mean()
        for _ in range(3):
            loss.item()  # the line
        bool(torch.rand([]) < 2)  # sure: not listed
    (entry,) = given(mode)
    assert entry.count == 3
    assert "loss.item()  # the line" in entry.line
    assert entry.to_record() == {
        "line": entry.line, "read": "item", "tensor": "f32[]@cpu", "answer": 2.5, "count": 3,
    }  # fmt: skip
    assert str(entry).endswith("item of f32[]@cpu → 2.5, 3 times")


# --- other policies --------------------------------------------------------------------------------------------------


def test_error_is_the_default() -> None:
    with FakeTensorMode():
        with pytest.raises(DataDependentOutputException, match="reads a value"):
            torch.randn(3).sum().item()
        with pytest.raises(DynamicOutputShapeException):
            torch.randn(3).nonzero()


def test_symbols() -> None:
    with FakeTensorMode(answers="symbol") as mode:
        assert isinstance(torch.randn(3).sum().item(), torch.SymFloat)
        assert isinstance(torch.randn(3).nonzero().shape[0], torch.SymInt)
    assert isinstance(mode.shape_env, ShapeEnv)


def test_a_policy_of_ones_own() -> None:
    class Sevens:
        def answer(self, read: Read) -> Any:
            return NotImplemented if read.is_size else 7

    with FakeTensorMode(answers=Sevens()) as mode:
        assert torch.randn(3).sum().item() == 7.0
        assert torch.randint(0, 100, ()).item() == 7
        with pytest.raises(DynamicOutputShapeException):
            torch.randn(3).nonzero()
    assert [entry.answer for entry in given(mode)] == [7, 7]


def test_an_unknown_policy() -> None:
    with pytest.raises(
        ArgumentError, match=r"answers='sure': expected one of error, symbol, plausible, worst, or an object"
    ):
        FakeTensorMode(answers="sure")


def test_tensors_that_were_asked_about_are_freed_at_once() -> None:
    """What refused the call, and was answered, held the frames of the call."""

    def select() -> list[weakref.ref[torch.Tensor]]:
        x = torch.randn(8, 4)
        chosen = x[torch.arange(8) < 5]
        return [weakref.ref(x), weakref.ref(chosen)]

    gc.disable()
    try:
        with FakeTensorMode(answers="plausible"):
            assert [reference() for reference in select()] == [None, None]
    finally:
        gc.enable()
