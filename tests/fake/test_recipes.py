"""Composite operators: what C++ did once is done again from memory, and nobody can tell."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.oracle.cases import OPS, Limits, cases_of, dtypes_of
from tests.oracle.run import judge, run_fake, run_real
from understudy import FakeTensorMode, ShapeEnv
from understudy.fake.kernels import recipes
from understudy.infer.engine import cache
from understudy.ops.traits.caching import has_recipe, has_recipe_if_static

BATCH, LENGTH, WIDTH = 3, 10, 16


class Heard(TorchDispatchMode):
    """The names of the operators that pass."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


Program = Callable[[Tensor, Tensor, Tensor], Tensor]


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (4, WIDTH // 4)).transpose(1, 2)


PROGRAMS: dict[str, Program] = {
    "linear": lambda x, w, b: F.linear(x, w),
    "linear with bias": lambda x, w, b: F.linear(x, w, b),
    "linear of a transposed": lambda x, w, b: F.linear(x.transpose(0, 1), w, b),
    "matmul 3d 2d": lambda x, w, b: x @ w,
    "matmul 3d 3d": lambda x, w, b: x @ x.mT,
    "matmul 4d 4d": lambda x, w, b: heads(x) @ heads(x).mT,
    "matmul broadcast": lambda x, w, b: heads(x) @ w[:4, :4],
    "matmul 3d 1d": lambda x, w, b: x @ b,
    "attention": lambda x, w, b: F.scaled_dot_product_attention(heads(x), heads(x), heads(x)),
    "causal attention": lambda x, w, b: F.scaled_dot_product_attention(
        heads(x), heads(x), heads(x), is_causal=True
    ),
    "masked attention": lambda x, w, b: F.scaled_dot_product_attention(
        heads(x), heads(x), heads(x), attn_mask=heads(x) @ heads(x).mT
    ),
    "einsum": lambda x, w, b: torch.einsum("bsd,de->bse", x, w),
    "einsum of heads": lambda x, w, b: torch.einsum("bhsd,bhtd->bhst", heads(x), heads(x)),
    "tensordot": lambda x, w, b: torch.tensordot(x, w, dims=1),
    "repeat_interleave": lambda x, w, b: x.repeat_interleave(2, dim=1),
    "dropout": lambda x, w, b: F.dropout(x, 0.5, training=True),
    "no dropout": lambda x, w, b: F.dropout(x, 0.5, training=False),
    "layer_norm": lambda x, w, b: F.layer_norm(x, (WIDTH,), b, b),
    "group_norm": lambda x, w, b: F.group_norm(x.mT, 4, b, b),
    "batch_norm": lambda x, w, b: F.batch_norm(x.mT, b.detach(), b.detach(), b, b),
    "batch_norm in training": lambda x, w, b: F.batch_norm(x.mT, b.detach(), b.detach(), b, b, training=True),
    "reshape": lambda x, w, b: x.reshape(x.shape[0], -1),
    "reshape of a transposed": lambda x, w, b: x.mT.reshape(x.shape[0], -1),
    "cross_entropy": lambda x, w, b: F.cross_entropy(x.flatten(0, 1), x.argmax(-1).flatten()),
}


def real_inputs() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(BATCH, LENGTH, WIDTH), torch.randn(WIDTH, WIDTH), torch.randn(WIDTH)


def stand_ins(mode: FakeTensorMode, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    x, w, b = real_inputs()
    fake = mode.from_tensor(x, source="x", symbolic_context=("batch", "seq", "static"))
    weights = [mode.from_tensor(t, static_shapes=True) for t in (w, b)]
    with mode:
        return tuple(t.to(device) for t in (fake, *weights))  # type: ignore[return-value]


def new_mode() -> FakeTensorMode:
    return FakeTensorMode(shape_env=ShapeEnv())


def plain_stand_ins(mode: FakeTensorMode, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """With plain sizes, made where no gradient is recorded: only those have recipes."""
    with mode, torch.no_grad():
        return tuple(mode.from_tensor(t).to(device, copy=True) for t in real_inputs())  # type: ignore[return-value]


KINDS: dict[str, tuple[Callable[[], FakeTensorMode], Callable[..., tuple[Tensor, Tensor, Tensor]]]] = {
    "symbolic": (new_mode, stand_ins),
    "plain": (FakeTensorMode, plain_stand_ins),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Any:
    """How to make a mode, and stand-ins in it."""
    FakeTensorMode.cache_clear()
    return KINDS[request.param]


def sizes(t: Tensor) -> list[int]:
    return [int(getattr(getattr(s, "node", None), "hint", s)) for s in (*t.shape, *t.stride())]


def graph_of(t: Tensor) -> list[str]:
    """The names of the functions that autograd would run, depth first."""
    names: list[str] = []
    stack: list[Any] = [t.grad_fn]
    while stack:
        function = stack.pop()
        if function is not None:
            names.append(type(function).__name__)
            stack.extend(following for following, _ in function.next_functions)
    return names


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_same_operators_are_heard(name: str, kind: Any) -> None:
    program = PROGRAMS[name]
    reals = real_inputs()
    with Heard() as real:
        program(*reals)
    mode = kind[0]()
    inputs = kind[1](mode)
    with mode:
        program(*inputs)  # where nobody listens
    for _ in range(3):
        with mode, Heard() as heard:
            program(*inputs)
        assert heard.names == real.names


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_result_is_the_same_without_listeners(name: str, device: str, kind: Any) -> None:
    program = PROGRAMS[name]
    reals = real_inputs()
    with Heard():  # where nobody listens, C++ writes in place
        expected = program(*reals)
    mode = kind[0]()
    inputs = kind[1](mode, device)
    for _ in range(3):
        with mode, torch.no_grad():
            result = program(*inputs)
        assert result.device.type == device and result.dtype is expected.dtype
        assert result._version == expected._version
        assert [t._version for t in inputs[1:]] == [t._version for t in reals[1:]]
        if device == "cpu":
            assert sizes(result) == sizes(expected)
            assert result._is_view() == expected._is_view()
            if expected._is_view() and expected._base is not None:
                assert sizes(result._base) == sizes(expected._base)  # type: ignore[arg-type]
    # C++ has nothing to ask of a contiguous tensor that it reshapes.
    if mode.shape_env is not None:
        assert bool(mode._cache.recipes) == (name != "reshape")
    elif device == "cpu":
        is_single = name in (
            "layer_norm",
            "group_norm",
            "reshape",
            "reshape of a transposed",
            "cross_entropy",
        )
        assert bool(mode._cache.recipes) != is_single


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_go_the_same_way(name: str, kind: Any) -> None:
    program = PROGRAMS[name]
    reals = [t.requires_grad_() for t in real_inputs()]
    with Heard():  # where nobody listens, C++ reshapes in another way
        expected = graph_of(program(*reals))  # type: ignore[arg-type]
    mode = kind[0]()
    inputs = [t.requires_grad_() for t in kind[1](mode)]
    for _ in range(3):
        with mode, torch.no_grad():
            assert program(*inputs).grad_fn is None
        with mode:
            result = program(*inputs)
            assert graph_of(result) == expected
            result.sum().backward()
        assert inputs[0].grad is not None and inputs[0].grad.shape == inputs[0].shape


DATABASE = (
    "nn.functional.linear", "nn.functional.bilinear", "matmul", "__rmatmul__", "einsum", "tensordot", "repeat_interleave",
    "nn.functional.scaled_dot_product_attention", "nn.functional.dropout", "nn.functional.batch_norm",
    "nn.functional.cross_entropy", "nn.functional.multi_head_attention_forward",
)  # fmt: skip


@pytest.mark.parametrize("name", DATABASE)
def test_samples_of_the_operator_database(name: str) -> None:
    mode = FakeTensorMode()
    count = 0
    for dtype in dtypes_of(OPS[name], ("float32", "bfloat16", "complex64", "int64")):
        for case in cases_of(OPS[name], dtype, Limits.of_samples(8)):
            if case.variant == "backward":
                continue
            with torch.no_grad():
                real = run_real(case, Heard())  # C++ takes another path where nobody listens
                for _ in range(2):  # the second finds the recipe of the first
                    verdict = judge(case, real, run_fake(case, mode))
                    assert verdict.outcome in ("ok", "refused", "data-dependent"), (case, verdict)
            count += 1
    assert count


def test_no_guard_is_lost_or_added() -> None:
    def guards(times: int) -> list[str]:
        mode = new_mode()
        x, w, _ = stand_ins(mode)
        y = mode.from_tensor(
            torch.randn(BATCH, LENGTH, WIDTH), source="y", symbolic_context=("batch", "other", "static")
        )
        with mode:
            for _ in range(times):
                (x @ y.mT).reshape(-1, 10)
                F.cross_entropy(x[:, 0] @ w, x[:, 0].argmax(-1))
        return [str(guard.condition) for guard in mode.shape_env.guards]

    assert guards(3) == guards(1) != []


def test_a_tensor_that_comes_twice_is_no_two_tensors() -> None:
    mode = new_mode()
    x, *_ = stand_ins(mode)
    with mode:
        other = x.clone().requires_grad_()
        x = x.clone().requires_grad_()
        for a, b in ((x, x), (x, other), (other, x)):
            x.grad = other.grad = None
            torch.einsum("bsd,btd->bst", a, b).sum().backward()
            assert (x.grad is not None) == (a is x or b is x)
            assert (other.grad is not None) == (a is other or b is other)


def test_autocast_has_its_say(kind: Any) -> None:
    mode = kind[0]()
    x, w, _ = kind[1](mode)
    with mode, torch.no_grad():
        assert F.linear(x, w).dtype is torch.float32
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert F.linear(x, w).dtype is torch.bfloat16
        assert F.linear(x, w).dtype is torch.float32


def test_modes_for_functions_hear_what_was_called(kind: Any) -> None:
    class Functions(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            heard.append(func)
            return func(*args, **(kwargs or {}))

    mode = kind[0]()
    x, w, _ = kind[1](mode)
    for _ in range(3):
        heard: list[Any] = []
        with mode, Functions():
            torch.matmul(x, w)
        assert heard == [torch.matmul]


def test_in_inference_mode_the_composite_itself_is_heard(kind: Any) -> None:
    mode = kind[0]()
    x, w, _ = kind[1](mode)
    with mode:
        F.linear(x, w)
        for _ in range(2):
            with torch.inference_mode(), Heard() as heard:
                F.linear(x, w)
            assert heard.names == ["aten.linear.default"]


def test_transforms(kind: Any) -> None:
    mode = kind[0]()
    x, w, _ = kind[1](mode)
    with mode:
        for _ in range(2):
            F.linear(x, w)
            assert torch.func.vmap(lambda row: F.linear(row, w))(x).shape == x.shape
            assert torch.func.grad(lambda t: F.linear(t, w).sum())(x).shape == x.shape
            assert torch.func.vmap(torch.matmul, in_dims=(0, None))(x, w).shape == x.shape


def test_attention_listens_to_its_switches(kind: Any) -> None:
    mode = kind[0]()
    x, *_ = kind[1](mode)
    with mode:
        q = heads(x)
        for _ in range(2):
            with Heard() as fused:
                F.scaled_dot_product_attention(q, q, q)
            with Heard() as plain, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                F.scaled_dot_product_attention(q, q, q)
            assert fused.names == ["aten._scaled_dot_product_flash_attention_for_cpu.default"]
            assert "aten.bmm.default" in plain.names


def test_errors_are_those_of_the_operator(kind: Any) -> None:
    mode = kind[0]()
    x, w, _ = kind[1](mode)
    with mode:
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"mat1.*mat2|mm"):
                F.linear(x, w[:, :4])


def test_nothing_is_kept_while_guards_are_suppressed() -> None:
    FakeTensorMode.cache_clear()  # what other environments share
    mode = new_mode()
    x, w, _ = stand_ins(mode)
    with mode, mode.shape_env.suppress_guards():
        F.linear(x, w)
    assert not mode._cache.recipes


def test_recipes_are_forgotten_with_the_plans() -> None:
    FakeTensorMode.cache_clear()  # what other environments share
    mode = new_mode()
    x, w, _ = stand_ins(mode)
    with mode:
        F.linear(x, w)
    assert mode._cache.recipes and mode._cache.plans
    cache.forget_plans()
    assert not mode._cache.recipes and not mode._cache.plans


def test_recipes_are_shared_between_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    def attended() -> list[str]:
        mode = new_mode()
        x, w, _ = stand_ins(mode)
        with mode:
            y = F.linear(x, w)
            score = torch.matmul(y, x.transpose(1, 2))
            results = (
                score,
                torch.matmul(score, x),
                torch.einsum("bij,bkj->bik", x, y),
                y.transpose(0, 1).reshape(-1),
            )
        assert all(result.shape[0].node.shape_env is mode.shape_env for result in results)
        return [str(result._spec) for result in results] + [str(guard) for guard in mode.shape_env.guards]

    FakeTensorMode.cache_clear()
    first = attended()
    monkeypatch.setattr(recipes, "_record_recipe", None)  # nothing is recorded again
    assert attended() == first


def test_results_are_apart(kind: Any) -> None:
    mode = kind[0]()
    x, w, _ = kind[1](mode)
    with mode, torch.no_grad():
        first, second = F.linear(x, w), F.linear(x, w)
        assert first.untyped_storage()._cdata != second.untyped_storage()._cdata
        first.add_(1)
        assert (first._version, second._version) == (1, 0)


def test_the_table_names_composites() -> None:
    for name in (*has_recipe, *has_recipe_if_static):
        op = recipes._torch.operator_named(name)
        assert recipes._torch.has_composite_kernel(op), name


def test_what_is_written_in_training_is_not_known_any_more(kind: Any) -> None:
    """The schema does not tell: the second module finds the recipe of the first."""
    mode = kind[0]()
    x = kind[1](mode)[0]
    with mode, torch.no_grad():
        for norm in [torch.nn.BatchNorm1d(WIDTH) for _ in range(3)]:
            assert norm.running_mean is not None and mode.value_of(norm.running_mean) is not None
            norm(x.mT)
            assert mode.value_of(norm.running_mean) is None


def test_symbols_have_no_function_of_their_own() -> None:
    """C++ asks each symbol among the arguments; it is told so without an error for as long as a mode is active."""
    mode = new_mode()
    x = stand_ins(mode)[0]
    with mode:
        assert torch.SymInt.__torch_function__ is torch._C._disabled_torch_function_impl  # type: ignore[attr-defined]
        assert not torch.overrides.has_torch_function((x.shape[0],))
        assert x.view(x.shape[0], -1).shape[0] is not None
    assert not hasattr(torch.SymInt, "__torch_function__")


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.mT.contiguous().mT,
    "heads last": lambda t: t.transpose(0, -2).contiguous().transpose(0, -2),
    "expanded": lambda t: t[:1].expand_as(t),
    "sliced": lambda t: torch.cat((t, t), -1)[..., : t.shape[-1]],
    "with an offset": lambda t: torch.cat((t, t))[t.shape[0] :],
}
SHAPES = ((2, 5, 8), (1, 5, 8), (2, 1, 1), (2, 3, 5, 8), (1, 3, 1, 8), (2, 2, 3, 5, 8))


def products(x: Tensor, weight: Tensor) -> Iterator[Callable[[], Tensor]]:
    """Calls of composites on an operand in some layout."""
    for bias in (
        None,
        weight.new_empty(4),
        weight.new_empty(1),
        weight.new_empty(()),
        weight.new_empty(1, 4),
    ):
        for matrix in (weight, weight.T.contiguous().T, weight[:1], weight[0]):
            yield lambda bias=bias, matrix=matrix: F.linear(x, matrix, bias)  # type: ignore[misc]
    for other in (x.mT, x.mT.contiguous(), x[:1].mT, x[0].mT, weight.T, weight[0]):
        yield lambda other=other: x @ other  # type: ignore[misc]
        yield lambda other=other: other.mT @ x.mT if other.ndim > 1 else other @ x.mT  # type: ignore[misc]
    for training in (False, True):
        for own in (None, x.new_empty(x.shape[1]), x.new_empty(7)):
            for kept in (None, x.new_empty(x.shape[1]), x.new_empty(1, x.shape[1])):
                yield lambda own=own, kept=kept, training=training: torch.batch_norm(  # type: ignore[misc]
                    x, own, own, kept, kept, training, 0.1, 1e-5, True
                )
    for chance in (0.0, 0.25, 1.0):
        yield lambda chance=chance: F.dropout(x, chance)  # type: ignore[misc]
        if x.ndim >= 3:
            masks = [
                None,
                x.new_empty(x.shape[-2], x.shape[-2]),
                x.new_empty(x.shape[0], *[1] * (x.ndim - 1)),
                x @ x.mT,
            ]
            masks += [(x @ x.mT) > 0, (x.shape[-2] > 1) & (x[..., 0, :1] > 0), (x @ x.mT).half()]
            for mask in masks:
                for value in (x, x.clone(), x[..., :1], x[:1]):
                    yield lambda value=value, mask=mask, chance=chance: F.scaled_dot_product_attention(  # type: ignore[misc]
                        x, x, value, mask, chance
                    )
            for mask in masks[:2]:
                yield lambda mask=mask, chance=chance: F.scaled_dot_product_attention(  # type: ignore[misc]
                    x, x, x, mask, chance, is_causal=True
                )


def outcome_of(program: Callable[[], Tensor]) -> object:
    try:
        result: Any = program()
    except Exception as error:
        return type(error).__name__, str(error).splitlines()[0]
    base = result._base
    return result._spec, result._is_view(), None if base is None else base._spec, result._version


@pytest.mark.parametrize(
    ("device", "dtype"), [("cpu", torch.float32), ("cpu", torch.bfloat16), ("cuda", torch.float32)]
)
def test_what_is_told_at_once_is_what_the_operators_inside_tell(
    dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`whole_result` of an operator against the operators that C++ makes of it, in many layouts."""
    told = 0
    infer_whole = recipes._infer_whole

    def count(*args: Any) -> Any:
        nonlocal told
        recipe = infer_whole(*args)
        told += recipe is not None
        return recipe

    for shape in SHAPES:
        for layout in LAYOUTS.values():
            mode = FakeTensorMode()
            with mode, torch.no_grad():
                x = layout(torch.empty(shape, dtype=dtype, device=device))
                weight = torch.empty(4, shape[-1], dtype=dtype, device=device)
                found = []
                for infer in (count, lambda *args: None):
                    FakeTensorMode.cache_clear()
                    monkeypatch.setattr(recipes, "_infer_whole", infer)
                    found.append([outcome_of(program) for program in products(x, weight)])
                assert found[0] == found[1]
    assert told
