"""What is asked of an export, what it refuses, and the guards that it leaves in the program."""

from __future__ import annotations

import io
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import understudy
from tests.exporting.programs import Asserts, AssertsOfTensors, split_off
from understudy import ConstraintViolationError, check_inputs, dims, export, guards_of


class Halves(nn.Module):
    def forward(self, x: Any) -> Any:
        if x.shape[0] % 2 != 0:
            raise ValueError("odd")
        return x.view(2, -1)


class Sum(nn.Module):
    def forward(self, x: Any, y: Any) -> Any:
        return x + y


class Fixes(nn.Module):
    def forward(self, x: Any, y: Any) -> Any:
        if x.shape[0] == 4:
            x = x + 1
        return x.sum() + (y * torch.ones(5)).sum()


def test_all_requests_that_are_broken_are_listed_with_their_lines() -> None:
    a, b = dims("a", "b")
    with pytest.raises(ConstraintViolationError) as caught:
        export(Fixes(), (torch.randn(4, 3), torch.randn(2, 5)), dynamic_shapes={"x": {0: a}, "y": {1: b}})
    text = str(caught.value)
    assert "2 of the dimensions that were requested as dynamic" in text
    assert "x.size(0), requested as dynamic (a), is always 4" in text
    assert "y.size(1), requested as dynamic (b), is always 5" in text
    assert "if x.shape[0] == 4:" in text
    assert "y * torch.ones(5)" in text
    assert text.count("ways out:") == 2


def test_two_names_that_must_be_equal() -> None:
    a, b = dims("a", "b")
    with pytest.raises(ConstraintViolationError, match=r"requested as dynamic \(b\), is always equal to a"):
        export(Sum(), (torch.randn(4), torch.randn(4)), dynamic_shapes={"x": {0: a}, "y": {0: b}})


def test_auto_may_be_fixed_and_related() -> None:
    program = export(
        Fixes(), (torch.randn(4, 3), torch.randn(2, 5)), dynamic_shapes=({0: Dim.AUTO}, {1: Dim.AUTO})
    )
    assert not program.range_constraints
    export(Sum(), (torch.randn(4), torch.randn(4)), dynamic_shapes=({0: Dim.AUTO}, {0: Dim.AUTO}))


@pytest.mark.parametrize(
    "asked",
    [
        {"x": {0: "n"}, "y": {0: "n"}},
        {"x": dims("n"), "y": dims("n")},
        ({0: Dim("n")}, {0: Dim("n")}),
        [{0: Dim.DYNAMIC}, {0: Dim.DYNAMIC}],
        {"x": (Dim.AUTO,), "y": [Dim.AUTO]},
    ],
)
def test_forms_of_requests(asked: Any) -> None:
    program = export(Sum(), (torch.randn(4), torch.randn(4)), dynamic_shapes=asked).module()
    assert program(torch.ones(7), torch.ones(7)).shape == (7,)
    with pytest.raises(AssertionError, match="Guard failed"):
        program(torch.ones(7), torch.ones(6))


def test_shapes_collection_and_additional_inputs() -> None:
    x, y = torch.randn(4), torch.randn(4)
    collection = torch.export.ShapesCollection()
    collection[x], collection[y] = ({0: Dim("n")},) * 2
    assert export(Sum(), (x, y), dynamic_shapes=collection).module()(torch.ones(9), torch.ones(9)).shape == (
        9,
    )
    additional = torch.export.AdditionalInputs()
    additional.add((torch.ones(6), torch.ones(6)))
    assert export(Sum(), (x, y), dynamic_shapes=additional).module()(torch.ones(9), torch.ones(9)).shape == (
        9,
    )


def test_keywords_and_numbers() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Any, *, times: int = 1) -> Any:
            return x * times

    program = export(
        Scaled(), (torch.ones(4),), {"times": 3}, dynamic_shapes={"x": None, "times": Dim.DYNAMIC}
    ).module()
    assert program(torch.ones(4), times=5).sum() == 20
    fixed = export(Scaled(), (torch.ones(4),), {"times": 3}).module()
    with pytest.raises(AssertionError, match="times == 3"):
        fixed(torch.ones(4), times=5)


@pytest.mark.parametrize("is_nested", [True, False])
def test_keywords_of_any_name(is_nested: bool) -> None:
    class Keywords(nn.Module):
        def forward(self, x: Any, **others: Any) -> Any:
            return x + others["y"]

    rows = {0: Dim.DYNAMIC}
    asked = {"x": rows, "others": {"y": rows}} if is_nested else {"x": rows, "y": rows}
    program = export(Keywords(), (torch.ones(4),), {"y": torch.ones(4)}, dynamic_shapes=asked).module()
    assert program(torch.ones(3), y=torch.ones(3)).sum() == 6


def test_bounds_of_hints() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Any, n: int) -> Any:
            return x * n

    for hint in (Dim.AUTO, Dim.DYNAMIC):
        program = export(
            Scaled(), (torch.ones(4), 3), dynamic_shapes=({0: hint(max=9)}, hint(max=5))
        ).module()
        assert program(torch.ones(9), 5).sum() == 45
        with pytest.raises(AssertionError, match=r"x.size\(\)\[0\] <= 9"):
            program(torch.ones(10), 5)
        with pytest.raises(AssertionError, match="n <= 5"):
            program(torch.ones(9), 6)


def test_names_of_dimensions_are_no_names_of_other_things() -> None:
    """A number among the inputs, and a size without a name, may be called as a dimension is."""

    class Uses(nn.Module):
        def forward(self, x: Any, y: Any, n: int) -> Any:
            return x.sum() * n + y.sum()

    for name in ("n", "x_0", "s0"):
        asked = ({0: Dim.AUTO}, {0: Dim(name)}, Dim.DYNAMIC)
        program = export(Uses(), (torch.ones(4), torch.ones(4), 4), dynamic_shapes=asked)
        assert guards_of(program) == []
        assert program.module()(torch.ones(3), torch.ones(5), 7) == 26


def test_a_parameter_as_input_may_vary() -> None:
    x = nn.Parameter(torch.ones(4, 3))
    program = export(nn.ReLU(), (x,), dynamic_shapes=({0: Dim("rows")},))
    assert program.module()(torch.ones(7, 3)).shape == (7, 3)


def test_ranges_of_unknown_sizes_follow_from_checks() -> None:
    class Reads(nn.Module):
        def forward(self, x: Any) -> Any:
            n = x.sum().long().item()
            torch._check(n >= 2)
            torch._check(n <= 5)
            return torch.ones(n)

    x = torch.ones(3)
    ours, theirs = (f(Reads(), (x,)).range_constraints.values() for f in (export, torch.export.export))
    assert list(map(str, ours)) == list(map(str, theirs)) == ["VR[2, 5]"]


def test_assert_statements_about_data_are_runtime_asserts() -> None:
    """As in torch.export, an `assert` decides nothing: it is checked when the program runs."""

    class Asks(nn.Module):
        def forward(self, x: Any, n: Any) -> Any:
            return x * 2 if n.item() <= x.shape[0] else x

    x, asked = torch.ones(4), ({0: Dim.DYNAMIC}, None)
    run = export(Asserts(), (x, torch.tensor(2)), dynamic_shapes=asked).module()
    assert torch.equal(run(torch.ones(6), torch.tensor(5)), torch.full((6,), 2.0))
    for number in (7, 0, 3):
        with pytest.raises(RuntimeError, match=r"u[0-9].*assert .*n.item\(\)"):
            run(torch.ones(6), torch.tensor(number))
    with pytest.raises(RuntimeError, match="data-dependent"):
        export(Asks(), (x, torch.tensor(2)), dynamic_shapes=asked)


def test_assert_statements_about_tensors_are_runtime_asserts() -> None:
    """`bool(x)` reads a value inside of an operator that is one above autograd."""
    run = export(AssertsOfTensors(), (torch.ones(3),)).module()
    assert torch.equal(run(torch.ones(3)), torch.full((3,), 2.0))
    for number in (200, torch.nan, -200, 7):
        with pytest.raises(RuntimeError, match=r"u[0-9].*assert "):
            run(torch.full((3,), number))


def test_assertions_stay_in_the_program() -> None:
    class Checks(nn.Module):
        def forward(self, x: Any) -> Any:
            torch._assert_async((x > 0).all())
            return x * 2

    x = torch.ones(3)
    program = export(Checks(), (x,))
    assert torch.equal(program.module()(x), x * 2)
    with pytest.raises(RuntimeError, match="Expected Tensor with single nonzero value"):
        program.module()(-x)
    assert "aten._assert_async.default" in {
        str(node.target) for node in program.run_decompositions().graph.nodes
    }


def test_guards_have_lines_and_survive_saving() -> None:
    n, m = dims("n", "m")
    program = export(Halves(), (torch.randn(4, 6),), dynamic_shapes={"x": {0: n, 1: m}})
    (guard,) = guards_of(program)
    assert guard.condition == "x.size(0) % 2 == 0"
    assert "if x.shape[0] % 2 != 0:" in guard.line
    assert check_inputs(program, torch.randn(6, 5)) == []
    (broken,) = check_inputs(program, torch.randn(3, 5))
    assert "x.size(0) % 2 == 0" in broken
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file)
    assert guards_of(loaded) == [guard]
    for one in (program, loaded):
        with pytest.raises(AssertionError, match=r"x.size\(0\) % 2 == 0.*because.*if x.shape\[0\] % 2 != 0"):
            one.module()(torch.randn(3, 5))


def test_a_size_of_one_that_the_program_asks_about() -> None:
    class Asks(nn.Module):
        def forward(self, x: Any) -> Any:
            return x * 2 if x.shape[0] == 1 else x * 3

    strict = export(Asks(), (torch.ones(4),), dynamic_shapes=({0: "n"},))
    (guard,) = guards_of(strict)
    assert guard.condition == "x.size(0) != 1"
    assert guard.line.endswith("return x * 2 if x.shape[0] == 1 else x * 3")
    with pytest.raises(
        AssertionError,
        match=r"x.size\(0\) != 1 .*else x \* 3; to run it .*: export\(…, guard_zero_one=False\)",
    ):
        strict.module()(torch.ones(1))
    asked = ({0: "n"},)
    ours = export(Asks(), (torch.ones(4),), dynamic_shapes=asked, guard_zero_one=False)
    theirs = torch.export.export
    assert guards_of(ours) == []
    wanted = theirs(Asks(), (torch.ones(4),), dynamic_shapes=({0: Dim("n")},)).module()(torch.ones(1))
    assert torch.equal(ours.module()(torch.ones(1)), wanted), "on the path of the example"
    relu = export(nn.Linear(3, 3), (torch.ones(4, 3),), dynamic_shapes=({0: "n"},))
    assert guards_of(relu) == []
    assert relu.module()(torch.ones(1, 3)).shape == (1, 3)


@pytest.mark.parametrize(
    ("model", "args", "options", "text"),
    [
        (torch.sin, (torch.ones(2),), {}, "put the function into a module"),
        (nn.ReLU(), [torch.ones(2)], {}, "expected args as a tuple"),
        (nn.ReLU(), (torch.ones(2),), {"strict": True}, "TorchDynamo"),
        (torch.jit.script(nn.ReLU()), (torch.ones(2),), {}, "ScriptModule"),
    ],
)
def test_refused_arguments(model: Any, args: Any, options: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        export(model, args, **options)


def test_a_number_and_a_derived_size_that_the_program_fixes() -> None:
    class Repeats(nn.Module):
        def forward(self, x: Any, y: Any, times: int) -> Any:
            for _ in range(times):
                x = x + y.shape[0]
            return x.view(4)

    rows = Dim("rows")
    with pytest.raises(ConstraintViolationError) as caught:
        export(
            Repeats(),
            (torch.ones(4), torch.ones(9), 3),
            dynamic_shapes=({0: rows}, {0: 2 * rows + 1}, Dim.DYNAMIC),
        )
    text = str(caught.value)
    assert "3 of the dimensions that were requested as dynamic" in text
    assert "times, requested as dynamic, is always 3\n    condition:  times == 3\n    because:" in text
    assert "leave times out of dynamic_shapes" in text
    assert "y.size(0), requested as dynamic (2*rows + 1), is always 9\n    condition:  rows == 4" in text
    assert text.count("because:") == text.count("ways out:") == 3
    assert text.count("return x.view(4)") == 2
    assert "for _ in range(times):" in text


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({3: "rows"}, "expected a dimension of input from -1 to 0, got 3"),
        ({-2: "rows"}, "expected a dimension of input from -1 to 0, got -2"),
        ({0: 7}, r"expected input.size\(0\) to be 7, as in dynamic_shapes, got 4 in the example"),
    ],
)
def test_requests_that_the_example_contradicts(asked: Any, text: str) -> None:
    with pytest.raises((ValueError, ConstraintViolationError), match=text):
        export(nn.ReLU(), (torch.ones(4),), dynamic_shapes=(asked,))


def test_an_input_of_an_unknown_class_is_refused() -> None:
    class Ignores(nn.Module):
        def forward(self, x: Any, settings: Any) -> Any:
            return x + settings.number

    with pytest.raises(RuntimeError, match=r"the input settings is a object.*register_dataclass"):
        export(Ignores(), (torch.ones(4), object()))


def test_an_output_of_an_unknown_class_is_refused() -> None:
    class Holds(nn.Module):
        def forward(self, x: Any) -> Any:
            return {1, 2}

    with pytest.raises(RuntimeError, match="returns a set"):
        export(Holds(), (torch.ones(2),))


def test_a_custom_operator_that_writes_to_shared_memory_is_refused_in_a_functional_dialect() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return split_off(x.clone(), x[:, 1], x[0])

    with pytest.raises(RuntimeError, match="shares memory with another argument") as error:
        understudy.export(Model(), (torch.ones(2, 2),), decompositions=torch.export.default_decompositions())
    assert "split_off(x.clone(), x[:, 1], x[0])" in str(error.value)


def test_a_write_to_a_constant_is_refused_in_a_functional_dialect() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen = torch.zeros(2)

        def forward(self, x: Any) -> Any:
            self.seen.add_(x)
            return self.seen * 1

    with pytest.raises(RuntimeError, match="writes to seen, which is neither an input nor a buffer"):
        export(Writes(), (torch.ones(2),), decompositions=torch.export.default_decompositions())


def test_composites_that_a_table_leaves_whole() -> None:
    table = torch.export.default_decompositions()
    del table[torch.ops.aten.linear.default]
    model, x = nn.Sequential(nn.Linear(3, 4), nn.GELU()), torch.randn(2, 3)
    for program in (export(model, (x,), decompositions=table), export(model, (x,)).run_decompositions(table)):
        targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
        assert "aten.linear.default" in targets
        torch.testing.assert_close(program.module()(x), model(x))


def test_signatures_of_modules_are_preserved() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))
    x = torch.randn(2, 3)
    program = export(model, (x,), preserve_module_call_signature=("1",))
    entry = next(entry for entry in program.module_call_graph if entry.fqn == "1")
    assert entry.signature is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = torch.export.unflatten(program)
    assert torch.equal(module(x), model(x))
    assert torch.equal(module.get_submodule("1")(torch.ones(2, 4)), model[1](torch.ones(2, 4)))


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Any, *, more: Any = None) -> Any:
        return {"linear": self.linear(x), "unused": x * 2, "given": more}


class Preserved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain, self.without_grad = Several(), Several()

    def forward(self, x: Any) -> Any:
        y = self.plain(x)["linear"]
        with torch.no_grad():
            z = self.without_grad(y, more=x)
        return y + z["linear"] * z["given"]


def test_signatures_of_modules_follow_the_program() -> None:
    """Results that nobody uses, a module in a region, and names after decompositions."""
    model, x = Preserved(), torch.randn(2, 3)
    training = export(model, (x,), preserve_module_call_signature=("plain", "without_grad"))
    decomposed = training.run_decompositions()
    for program in (training, decomposed):
        program.validate()
        assert torch.equal(program.module()(x), model(x))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(torch.export.unflatten(decomposed)(x), model(x))


def test_a_model_on_stand_ins() -> None:
    with understudy.FakeTensorMode():
        model = nn.Linear(30_000, 30_000)
        x = torch.randn(2, 30_000)
    program = export(model, (x,))
    program.validate()
    assert [str(node.target) for node in program.graph.nodes if node.op == "call_function"] == [
        "aten.linear.default"
    ]


def test_libraries_are_told_that_this_is_an_export() -> None:
    seen = []

    class Asks(nn.Module):
        def forward(self, x: Any) -> Any:
            seen.append((torch.compiler.is_exporting(), torch.compiler.is_compiling()))
            return x + 1

    export(Asks(), (torch.ones(2),))
    assert seen == [(True, True)]
    assert not torch.compiler.is_exporting()
    assert not torch.compiler.is_compiling()


def test_acceleration_and_its_fallback() -> None:
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    with understudy.accelerate_export():
        assert type(torch.export.export(model, (x,))).__module__.startswith("understudy")
        assert type(torch.export.export(model, (x,), strict=True)) is torch.export.ExportedProgram
    assert type(torch.export.export(model, (x,))) is torch.export.ExportedProgram

    class Odd(nn.Module):
        def forward(self, x: Any) -> Any:
            if not isinstance(x, torch._subclasses.fake_tensor.FakeTensor) or type(x).__module__.startswith(
                "understudy"
            ):
                raise NotImplementedError("not with these")
            return x + 1

    with (
        understudy.accelerate_export(),
        pytest.warns(understudy.AccelerationWarning, match="because NotImplementedError: not with these"),
    ):
        program = torch.export.export(Odd(), (x,))
    assert type(program) is torch.export.ExportedProgram
    with (
        understudy.accelerate_export(),
        pytest.warns(
            understudy.AccelerationWarning,
            match=r"input.size\(1\), requested as dynamic \(columns\), is always 3",
        ),
        pytest.raises(Exception, match="Constraints violated"),
    ):
        torch.export.export(nn.Sequential(nn.Linear(3, 2)), (x,), dynamic_shapes=({1: Dim("columns")},))


_B, _C = Dim("B"), Dim("C", min=2)


@pytest.mark.parametrize(
    ("asked", "sizes", "admitted", "refused"),
    [
        (({0: _B}, {0: _B + 1}), (4, 5), [(3, 4), (6, 7)], [(3, 3), (4, 6)]),
        (({0: _B}, {0: 2 * _B}), (4, 8), [(3, 6)], [(3, 5), (4, 6)]),
        (({0: 2 * _C - 1}, {0: _C}), (7, 4), [(5, 3)], [(5, 4), (6, 3)]),
        (({0: 2 * _B}, {0: 3 * _B + 1}), (4, 7), [(6, 10)], [(3, 4), (4, 6)]),
        (({0: 2 * _B}, None), (4, 7), [(6, 7)], [(5, 7)]),
    ],
)
def test_sizes_that_are_computed_of_others_are_checked(
    asked: Any, sizes: Any, admitted: Any, refused: Any
) -> None:
    """The graph reads a size from any input that tells it: sizes that do not fit gave other results."""

    class Joined(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.cat([x, y])[: x.shape[0] + 1]

    program = export(Joined(), (torch.rand(sizes[0]), torch.rand(sizes[1])), dynamic_shapes=asked)
    for given in (sizes, *admitted):
        x, y = (torch.rand(size) for size in given)
        assert torch.equal(program.module()(x, y), Joined()(x, y))
        assert check_inputs(program, x, y) == []
    for given in refused:
        x, y = (torch.rand(size) for size in given)
        with pytest.raises(AssertionError, match="Guard failed"):
            program.module()(x, y)
        assert check_inputs(program, x, y)
