"""Writes in decomposed programs: memory that is separate in the program, or shared, stays so."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import understudy
from tests.exporting.models import leaves_of

CORE = torch.export.default_decompositions
PROGRAMS: dict[str, type[nn.Module]] = {}


def program(kind: type[nn.Module]) -> type[nn.Module]:
    PROGRAMS[kind.__name__] = kind
    return kind


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Square(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", torch.zeros(3, 3))
        self.register_buffer("second", torch.zeros(3, 3))


@program
class CopiesAnInputThatIsWrittenLater(Square):
    def forward(self, x: Any, y: Any) -> Any:
        y.copy_(x)
        x.add_(1)
        return y * 1


@program
class ReturnsACopyOfAWrittenInput(Square):
    def forward(self, x: Any, y: Any) -> Any:
        copied = torch.empty_like(x)
        copied.copy_(x)
        x.add_(1)
        return copied


@program
class CopiesAViewOfAnInput(Square):
    def forward(self, x: Any, y: Any) -> Any:
        y[:2].copy_(x[1:])
        x.t()[0].zero_()
        return x, y


@program
class WritesIntoAnOutArgument(Square):
    def forward(self, x: Any, y: Any) -> Any:
        result = torch.empty_like(x)
        torch.sub(x, y, alpha=2, out=result)
        torch.add(x, y, out=self.first)
        return result, self.first * 1


@torch.library.custom_op("writes::corner", mutates_args=())
def corner() -> torch.Tensor:
    return torch.eye(3)


@corner.register_fake
def _() -> torch.Tensor:
    return torch.empty(3, 3)


@program
class CallsAnOperatorWithoutArguments(Square):
    def forward(self, x: Any, y: Any) -> Any:
        x.add_(corner())
        return x + y


@program
class Swaps(Square):
    def forward(self, x: Any, y: Any) -> Any:
        before = x.clone()
        x.copy_(y.t())
        y.copy_(before)


@program
class WritesOneValueToSeveralPlaces(Square):
    def forward(self, x: Any, y: Any) -> Any:
        self.first += x
        self.second.copy_(self.first)
        total = self.second + y
        x.copy_(total)
        y.copy_(total)
        return total, self.second, x


@program
class ReadsBetweenAValueAndItsWrite(Square):
    def forward(self, x: Any, y: Any) -> Any:
        new = y * 2
        old = x + 1
        x.copy_(new)
        return old, x


@program
class BroadcastsIntoViews(Square):
    def forward(self, x: Any, y: Any) -> Any:
        x[1].copy_(y[0, 0])
        self.first[:, 0] = y[0].double()
        y.copy_(x[2])
        return x, self.first * 1


@program
class ChangesShapesInPlace(Square):
    def forward(self, x: Any, y: Any) -> Any:
        made = x * 2
        flat = made.view(-1)
        made.unsqueeze_(1).transpose_(0, 1).squeeze_(0).swapaxes_(0, 1)
        made[0].add_(5)
        flat[1] = 8
        return made, flat


class TiedBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", torch.zeros(3, 3))
        self.register_buffer("second", self.first)


@program
class WritesTiedBuffers(TiedBuffers):
    def forward(self, x: Any, y: Any) -> Any:
        self.first.add_(1)
        return x + self.second


@program
class WritesTiedBuffersByTheSecondName(TiedBuffers):
    def forward(self, x: Any, y: Any) -> Any:
        self.second.add_(x)
        return y + self.first


@program
class WritesToTheResultOfAModule(Square):
    """The new value belongs to the calling module."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Flatten(0, 1), nn.Identity(), nn.Unflatten(0, (3, 3)))

    def forward(self, x: Any, y: Any) -> Any:
        made = self.part(x * 2)
        made[0] = 1
        made.view(-1)[4] = 2
        return self.part(made + 1), made


@program
class WritesInABranch(Square):
    def forward(self, x: Any, y: Any) -> Any:
        def yes(a: Any) -> Any:
            b = a.clone()
            b[0] = a.sum()
            return b

        def no(a: Any) -> Any:
            b = a * 2
            b.t().add_(torch.ones(3))
            return b

        return torch.cond(x.sum() > 0, yes, no, (x,))


def make_inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(9.0).reshape(3, 3), 0.5 - torch.arange(9.0).reshape(3, 3)


def export_both_ways(model: nn.Module) -> list[Any]:
    direct = understudy.export(model, make_inputs(), decompositions=CORE())
    return [direct, understudy.export(model, make_inputs()).run_decompositions()]


def memory_shared_by(values: list[Any]) -> set[tuple[int, int]]:
    pointers = [
        value.untyped_storage().data_ptr() if isinstance(value, torch.Tensor) else None for value in values
    ]
    return {
        (i, j) for j, pointer in enumerate(pointers) for i in range(j) if pointer and pointers[i] == pointer
    }


@pytest.mark.parametrize("name", PROGRAMS)
def test_memory_of_decomposed_programs(name: str) -> None:
    """Results and inputs after two runs; nothing shares memory that does not in the program."""
    for made in export_both_ways(PROGRAMS[name]()):
        made.validate()
        for run in (copy.deepcopy(made).module(), torch.export.unflatten(copy.deepcopy(made))):
            eager = PROGRAMS[name]()
            for _ in range(2):
                given, wanted = make_inputs(), make_inputs()
                got, expected = leaves_of(run(*given)), leaves_of(eager(*wanted))
                torch.testing.assert_close([*got, *given], [*expected, *wanted], atol=0, rtol=0)
                assert memory_shared_by([*got, *given]) <= memory_shared_by([*expected, *wanted])


def test_tied_buffers_are_saved_and_loaded_with_their_writes() -> None:
    file, eager = io.BytesIO(), WritesTiedBuffers()
    torch.export.save(export_both_ways(WritesTiedBuffers())[0], file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for _ in range(2):
        assert torch.equal(loaded(*make_inputs()), eager(*make_inputs()))


class WritesOverlappingBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("whole", torch.zeros(3, 3))
        self.register_buffer("row", self.whole[1])

    def forward(self, x: Any, y: Any) -> Any:
        self.row.add_(1)
        return x + self.whole


class WritesItsFirstInput(nn.Module):
    def forward(self, x: Any, y: Any) -> Any:
        x.add_(1)
        return x + y


class TransposesItsInput(nn.Module):
    def forward(self, x: Any, y: Any) -> Any:
        x.t_()
        return x + y


class WritesToAnOperandInABranch(nn.Module):
    def forward(self, x: Any, y: Any) -> Any:
        return torch.cond(x.sum() > 0, lambda a: a.add_(1) * 1, lambda a: a * 2, (x,))


def test_refused_writes() -> None:
    x, y = make_inputs()
    cases: list[tuple[nn.Module, tuple[Any, Any], str, str]] = [
        (
            WritesOverlappingBuffers(),
            (x, y),
            "a write to the shared memory of (b_whole and b_row|b_row and b_whole)",
            "self.row.add_",
        ),
        (WritesItsFirstInput(), (x, x), "a write to the shared memory of x and y", "x.add_"),
        (TransposesItsInput(), (x, y), "changes the shape or strides of x", "x.t_"),
    ]
    for model, inputs, reason, line in cases:
        training = understudy.export(copy.deepcopy(model), inputs)
        expected = model(x.clone(), y.clone())
        assert torch.equal(training.module()(x.clone(), y.clone()), expected), (
            "the training dialect has the write itself"
        )
        for decompose in (
            training.run_decompositions,
            lambda m=model, i=inputs: understudy.export(m, i, decompositions=CORE()),
        ):
            with pytest.raises(RuntimeError, match=reason) as error:
                decompose()
            assert line in str(error.value)


def test_a_write_of_a_branch_to_what_is_outside_is_refused() -> None:
    with pytest.raises((RuntimeError, torch._dynamo.exc.UncapturedHigherOrderOpError)):
        understudy.export(WritesToAnOperandInABranch(), make_inputs(), decompositions=CORE())


def test_one_tensor_as_two_inputs() -> None:
    """Each is an input of its own: other tensors may be given later."""

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((3, 3), 5.0))

        def forward(self, x: Any, y: Any) -> Any:
            return x + 2 * y + 3 * self.weight

    model, (x, y) = Weighted(), make_inputs()
    for inputs in ((x, x), (model.weight, y), (model.weight, model.weight)):
        for made in (
            understudy.export(model, inputs),
            understudy.export(model, inputs, decompositions=CORE()),
        ):
            torch.testing.assert_close(made.module()(x, y), model(x, y), atol=0, rtol=0)


def test_data_of_a_tensor_is_an_alias_in_both_dialects() -> None:
    class WritesData(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Any, y: Any) -> Any:
            made = x * 2
            made.data.mul_(3)
            self.weight.data.add_(1)
            return made * self.weight

    training = understudy.export(WritesData(), make_inputs())
    eager = WritesData()
    with torch.no_grad():
        decomposed = training.run_decompositions().module()
        run = copy.deepcopy(training).module()
        for _ in range(2):
            expected = eager(*make_inputs())
            assert torch.equal(run(*make_inputs()), expected)
            assert torch.equal(decomposed(*make_inputs()), expected)
