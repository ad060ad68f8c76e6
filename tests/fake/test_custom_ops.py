"""Operators of the user's own: registered fakes, meta kernels, rules, mutation, the fallback to the real kernel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import understudy
from tests.fake.sides import on_each_device, with_index
from understudy import FakeTensorMode, OperatorError, ShapeEnv, TensorSpec, UnsupportedOperatorException, View
from understudy.errors import GuardOnDataDependentSymNode
from understudy.infer import engine
from understudy.ops import registry


@torch.library.custom_op("understudy_test::scaled", mutates_args=())
def scaled(x: Tensor, factor: float) -> Tensor:
    return x * factor


@scaled.register_fake
def _(x: Tensor, factor: float) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.factor = inputs[1]


scaled.register_autograd(lambda ctx, grad: (scaled(grad, ctx.factor), None), setup_context=_keep)


@torch.library.custom_op("understudy_test::bare", mutates_args=())
def bare(x: Tensor) -> Tensor:
    return x.clone()


@torch.library.custom_op("understudy_test::fill", mutates_args={"x"})
def fill(x: Tensor, value: float) -> None:
    x.fill_(value)


@fill.register_fake
def _(x: Tensor, value: float) -> None:
    return None


@torch.library.custom_op("understudy_test::pieces", mutates_args=())
def pieces(xs: list[Tensor], count: int) -> list[Tensor]:
    return [x[:count].clone() for x in xs]


@pieces.register_fake
def _(xs: list[Tensor], count: int) -> list[Tensor]:
    return [x.new_empty(count, *x.shape[1:]) for x in xs]


@torch.library.custom_op("understudy_test::several", mutates_args=())
def several(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.sum(), x.clone()


@several.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    torch._check(x.dim() > 0, lambda: "a vector at least")
    return x.new_empty(()), torch.empty_like(x)


@torch.library.custom_op("understudy_test::picked", mutates_args=())
def picked(x: Tensor) -> Tensor:
    return x[x > 0]


@picked.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(torch.library.get_ctx().new_dynamic_size())


@pytest.fixture(scope="module")
def library() -> Iterator[torch.library.Library]:
    with torch.library._scoped_library("understudy_lib", "FRAGMENT") as library:
        library.define("doubled(Tensor x) -> Tensor")
        library.define("unknown(Tensor x) -> Tensor")
        library.define("add_one_(Tensor(a!) x) -> Tensor(a!)")
        library.define("tail(Tensor(a) x) -> Tensor(a)")
        library.define("composite(Tensor x) -> Tensor")
        library.define("put(Tensor x, *, Tensor(a!) out) -> Tensor(a!)")
        library.impl("doubled", lambda x: x * 2, "CPU")
        library.impl("doubled", lambda x: torch.empty_like(x), "Meta")
        library.impl("unknown", lambda x: x * 2, "CPU")
        library.impl("add_one_", lambda x: x.add_(1), "CPU")
        library.impl("add_one_", lambda x: x, "Meta")
        library.impl("tail", lambda x: x[1:], "CPU")
        library.impl("tail", lambda x: x[1:], "Meta")
        library.impl("composite", lambda x: x.sin() + x.cos(), "CompositeImplicitAutograd")
        yield library


@pytest.fixture(autouse=True)
def own_rules() -> Iterator[None]:
    """Rules registered in a test end with it."""
    before = set(registry.user_rule)
    FakeTensorMode.cache_clear()
    yield
    registry.user_rule.replace(None, *(set(registry.user_rule) - before))
    FakeTensorMode.cache_clear()


@on_each_device
def test_a_registered_fake(device: str) -> None:
    with FakeTensorMode():
        x = torch.randn(3, 4, device=device).t().requires_grad_()
        y = scaled(x, 2.0)
        assert (y.shape, y.stride(), y.device) == (x.shape, x.stride(), x.device)
        y.sum().backward()
        assert x.grad.shape == x.shape
        total, copy = several(x)
        assert total.shape == ()
        assert copy.device == torch.device(with_index(device))


@on_each_device
def test_lists(device: str) -> None:
    with FakeTensorMode():
        out = pieces([torch.randn(4, 2, device=device), torch.randn(5, device=device)], 3)
        assert [tuple(part.shape) for part in out] == [(3, 2), (3,)]
        assert {str(part.device) for part in out} == {with_index(device)}


def test_errors_in_a_registered_fake_are_the_users() -> None:
    with FakeTensorMode(), pytest.raises(RuntimeError, match="a vector at least"):
        several(torch.randn(()))


@on_each_device
def test_mutation(device: str) -> None:
    real = torch.zeros(3)
    fill(real, 2.0)
    with FakeTensorMode():
        x = torch.zeros(3, device=device)
        view = x[1:]
        assert fill(x, 2.0) is None
        assert x._version == view._version == real._version
        with pytest.raises(understudy.DataDependentOutputException):
            x.sum().item()


def test_a_size_that_depends_on_data() -> None:
    with FakeTensorMode(), pytest.raises(understudy.DynamicOutputShapeException, match="picked"):
        picked(torch.randn(3))


def test_the_range_of_a_dynamic_size(library: Any) -> None:
    library.define("some(Tensor x, int least, int? most) -> Tensor")

    @torch.library.register_fake(f"{library.ns}::some", lib=library)
    def _(x: Tensor, least: int, most: int | None) -> Tensor:
        context = torch.library.get_ctx()
        return x.new_empty(context.new_dynamic_size(min=x.shape[0] if least == 7 else least, max=most))

    some = getattr(torch.ops, library.ns).some.default
    mode = FakeTensorMode(shape_env=understudy.ShapeEnv(), static_shapes=False)
    symbolic = mode.from_tensor(torch.ones(5))
    with mode:
        x = torch.randn(3)
        size = some(x, 2, 9).shape[0]
        assert size >= 2 and size < 10
        assert some(x, 0, None).shape[0] >= 0
        with pytest.raises(ValueError, match="min has to be greater than or equal to 0"):
            some(x, -1, None)
        with pytest.raises(ValueError, match="not SymInt"):
            some(symbolic, 7, None)
    env = understudy.ShapeEnv(allow_dynamic_output_shape_ops=False)
    with FakeTensorMode(shape_env=env), pytest.raises(understudy.DynamicOutputShapeException, match="some"):
        some(torch.randn(3), 2, 9)


def test_a_size_that_is_nobodys_to_bind(library: Any) -> None:
    library.define("scratch(Tensor x, bool told) -> Tensor")

    @torch.library.register_fake(f"{library.ns}::scratch", lib=library)
    def _(x: Tensor, told: bool) -> Tensor:
        context = torch.library.get_ctx()
        env = context._shape_env  # type: ignore[attr-defined]
        with nullcontext() if told else env.ignore_fresh_unbacked_symbols():
            context.new_dynamic_size()
        return x.clone()

    scratch = getattr(torch.ops, library.ns).scratch.default
    x = torch.randn(3)
    understudy.make_fx(lambda x: scratch(x, False), tracing_mode="symbolic")(x)
    with pytest.raises(ValueError, match=r"u0 .* can't be computed from the result"):
        understudy.make_fx(lambda x: scratch(x, True), tracing_mode="symbolic")(x)


def test_without_anything_it_says_how() -> None:
    with FakeTensorMode(), pytest.raises(UnsupportedOperatorException) as caught:
        bare(torch.randn(3))
    text = str(caught.value)
    assert "torch.library.register_fake('understudy_test::bare')" in text
    assert "understudy.rule" in text
    assert "test_custom_ops.py" in text
    assert caught.value.func is torch.ops.understudy_test.bare.default


@on_each_device
def test_meta_kernels(library: Any, device: str) -> None:
    with FakeTensorMode():
        x = torch.randn(3, 2, device=device)
        y = torch.ops.understudy_lib.doubled(x)
        assert (y.shape, y.device) == (x.shape, x.device)
        z = torch.ops.understudy_lib.add_one_(x)
        assert z is x
        tail = torch.ops.understudy_lib.tail(x)
        assert tail.shape == (2, 2)
        assert tail.untyped_storage()._cdata == x.untyped_storage()._cdata
        assert tail.storage_offset() == 2


@on_each_device
def test_composites(library: Any, device: str) -> None:
    with FakeTensorMode():
        x = torch.randn(3, device=device, requires_grad=True)
        torch.ops.understudy_lib.composite(x).sum().backward()
        assert x.grad.shape == (3,)
        with torch.no_grad():
            assert torch.ops.understudy_lib.composite(x).device == x.device


def test_the_real_kernel_of_a_custom_operator_never_runs(library: Any) -> None:
    with FakeTensorMode(), pytest.raises(UnsupportedOperatorException, match="unknown"):
        torch.ops.understudy_lib.unknown(torch.randn(3))


# --- rules -------------------------------------------------------------------------------------------------------------


def test_a_rule_for_a_custom_operator(library: Any) -> None:
    @understudy.rule("understudy_lib::unknown")
    def unknown(x: TensorSpec) -> TensorSpec:
        return x.like((*x.shape, 2), dtype=torch.float64)

    with FakeTensorMode():
        y = torch.ops.understudy_lib.unknown(torch.randn(3, device="cuda:1"))
    assert (tuple(y.shape), y.dtype, str(y.device)) == ((3, 2), torch.float64, "cuda:1")


def test_a_rule_comes_before_the_registered_fake() -> None:
    @understudy.rule(torch.ops.understudy_test.scaled.default)
    def other(x: TensorSpec, factor: float) -> TensorSpec:
        return x.like(dtype=torch.float16)

    with FakeTensorMode():
        assert scaled(torch.randn(3), 1.0).dtype is torch.float16


def test_a_rule_may_return_views(library: Any) -> None:
    @understudy.rule("understudy_lib::tail")
    def tail(x: TensorSpec) -> View:
        return View(0, TensorSpec((x.shape[0] - 2,), x.stride, x.offset + 2, dtype=x.dtype, device=x.device))

    with FakeTensorMode():
        x = torch.randn(5)
        y = torch.ops.understudy_lib.tail(x)
        assert (y.shape, y.storage_offset()) == ((3,), 2)
        assert y.untyped_storage()._cdata == x.untyped_storage()._cdata


def test_a_rule_for_an_operator_of_torch() -> None:
    with FakeTensorMode():
        assert torch.randn(3).erf().shape == (3,)

        @understudy.rule("erf")
        def erf(x: TensorSpec) -> TensorSpec:
            return x.like((*x.shape, 7))

        assert torch.randn(3).erf().shape == (3, 7), "a rule takes effect at once, whatever was kept before"


def test_a_rule_that_does_not_know_leaves_the_call_to_others() -> None:
    @understudy.rule("erf")
    def erf(x: TensorSpec) -> Any:
        return NotImplemented if x.ndim == 1 else x.like((1,))

    with FakeTensorMode():
        assert torch.randn(3).erf().shape == (3,)
        assert torch.randn(3, 3).erf().shape == (1,)


def test_a_rule_may_refuse() -> None:
    @understudy.rule("understudy_test::bare")
    def refuse(x: TensorSpec) -> TensorSpec:
        raise OperatorError(f"bare: {x} is not to its taste")

    with FakeTensorMode(), pytest.raises(OperatorError, match="not to its taste") as caught:
        bare(torch.randn(3))
    assert "called:" in str(caught.value)


# --- the cache -----------------------------------------------------------------------------------------------------------


def test_custom_operators_are_not_kept_unless_marked_pure() -> None:
    calls = []

    @understudy.rule("understudy_test::bare")
    def counted(x: TensorSpec) -> TensorSpec:
        calls.append(x)
        return x.like()

    with FakeTensorMode():
        x = torch.randn(3)
        bare(x)
        bare(x)
        assert len(calls) == 2
        assert FakeTensorMode.cache_info().bypasses["custom operator not marked pure"] == 2
        understudy.mark_pure(torch.ops.understudy_test.bare.default)
        try:
            bare(x)
            bare(x)
            assert len(calls) == 3
            bare(torch.randn(4))
            assert len(calls) == 4
        finally:
            understudy.mark_pure(torch.ops.understudy_test.bare.default, pure=False)
        bare(x)
        assert len(calls) == 5


def test_a_pure_operator_may_be_named() -> None:
    understudy.mark_pure("understudy_test::scaled")
    try:
        with FakeTensorMode():
            scaled(torch.randn(3), 2.0)
            hits = FakeTensorMode.cache_info().hits
            assert scaled(torch.randn(3), 2.0).shape == (3,)
            assert FakeTensorMode.cache_info().hits > hits
    finally:
        understudy.mark_pure("understudy_test::scaled", pure=False)


# --- the real kernel on zeros ----------------------------------------------------------------------------------------------


def needs_the_real_kernel(size: int) -> Any:
    return torch.ops.aten._masked_softmax(
        torch.randn(1, 1, 1, size), torch.ones(1, 1, 1, size, dtype=torch.bool)
    )


def test_the_real_kernel_is_the_last_resort() -> None:
    with FakeTensorMode():
        assert needs_the_real_kernel(10).shape == (1, 1, 1, 10)


def test_the_real_kernel_can_be_forbidden() -> None:
    with (
        FakeTensorMode(allow_fallback_kernels=False),
        pytest.raises(UnsupportedOperatorException, match="allow_fallback_kernels"),
    ):
        needs_the_real_kernel(10)


def test_the_real_kernel_is_not_given_more_than_the_limit() -> None:
    size = engine.FALLBACK_LIMIT // 4 + 1
    with FakeTensorMode(), pytest.raises(UnsupportedOperatorException, match="64 MiB"):
        needs_the_real_kernel(size)


def test_the_real_kernel_leaves_the_random_state_alone() -> None:
    state = torch.random.get_rng_state()
    with FakeTensorMode():
        needs_the_real_kernel(10)
    assert torch.equal(state, torch.random.get_rng_state())


def test_opcheck_accepts_what_works_on_stand_ins() -> None:
    torch.library.opcheck(scaled, (torch.randn(3), 2.0), test_utils=["test_schema"])


def test_a_triton_like_wrapper_works_through_its_fake() -> None:
    with FakeTensorMode():
        compiled = torch.vmap(lambda x: x * 2)(scaled(torch.randn(3, 2), 2.0))
        assert compiled.shape == (3, 2)


@pytest.mark.skipif(not hasattr(torch.Tag, "inplace"), reason="this torch has no such tags")
def test_tags_that_say_what_is_returned_need_no_fake_function() -> None:
    library = torch.library.Library("tagged_ops", "FRAGMENT")
    out_tag = getattr(torch.Tag, "out", None) or torch.Tag.out_variant
    library.define("double_(Tensor(a!) x) -> Tensor(a!)", tags=(torch.Tag.inplace,))
    library.define("double(Tensor x, *, Tensor(a!) out) -> Tensor(a!)", tags=(out_tag,))
    with FakeTensorMode():
        x, out = torch.ones(3, 2).t(), torch.empty(4)
        assert torch.ops.tagged_ops.double_(x) is x
        assert torch.ops.tagged_ops.double(x, out=out) is out


writes = torch.library.Library("understudy_test_writes", "DEF")
writes.define("add_one_(Tensor(a!) x) -> Tensor(a!)")
writes.impl("add_one_", lambda x: x.add_(1), "CPU")
writes.define("add_one_to_all(Tensor(a!)[] xs) -> ()")
writes.impl("add_one_to_all", lambda xs: [x.add_(1) for x in xs] and None, "CPU")


@torch.library.custom_op("understudy_test::add_one", mutates_args={"x"})
def add_one(x: Tensor) -> None:
    x.add_(1)


WRITES: dict[str, Any] = {
    "in place": torch.ops.understudy_test_writes.add_one_,
    "a list": lambda x: torch.ops.understudy_test_writes.add_one_to_all([x]),
    "custom_op": add_one,
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_are_counted_and_end_what_is_known(name: str) -> None:
    real = torch.zeros(3)
    WRITES[name](real)
    with FakeTensorMode(shape_env=ShapeEnv()):
        x = torch.rand(3)
        assert bool((x < 1.5).all())
        rows = x.nonzero().shape[0]
        WRITES[name](x)
        assert x._version == real._version
        assert str(x.nonzero().shape[0]) != str(rows)
        with pytest.raises(GuardOnDataDependentSymNode):
            bool((x < 1.5).all())


@pytest.mark.parametrize("answers", ["plausible", "worst"])
def test_sizes_by_the_policy_for_answers(answers: str) -> None:
    """Without a bound by the author, as many as the argument has rows."""
    with FakeTensorMode(answers=answers) as mode:
        assert picked(torch.randn(6)).shape == (6,)
    assert mode.answers is not None
    assert [(given.what, given.spec, given.answer) for given in mode.answers.given] == [
        ("picked", "f32[6]@cpu", 6)
    ]
    with FakeTensorMode(answers="error"), pytest.raises(understudy.DynamicOutputShapeException):
        picked(torch.randn(6))


SEEN: list[tuple[bool, bool]] = []


@torch.library.custom_op("understudy_test::asks", mutates_args=())
def asks(weights: list[Tensor], x: Tensor) -> Tensor:
    return x * weights[0]


@asks.register_fake
def _(weights: list[Tensor], x: Tensor) -> Tensor:
    SEEN[:] = [(isinstance(tensor, torch.nn.Parameter), tensor.requires_grad) for tensor in (*weights, x)]
    return torch.empty_like(x)


def test_a_registered_fake_may_ask_for_parameters() -> None:
    class Scale(torch.nn.Parameter): ...

    made = [Scale(torch.ones(3)), torch.nn.Parameter(torch.ones(3), requires_grad=False), torch.ones(3)]
    mode = FakeTensorMode()
    *weights, x = (mode.from_tensor(tensor) for tensor in made)
    with mode:
        assert asks(weights, x).shape == (3,)
    assert SEEN == [(True, True), (True, False), (False, False)]
    with mode:
        asks([x], weights[1])
    assert SEEN == [(False, False), (True, False)]
