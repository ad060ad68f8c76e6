"""Programs as people write them, at the level of torch: what they keep, catch, pass and return."""

from __future__ import annotations

import collections
import functools
import math
import pickle
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.meta.reality import assert_same, wrong_nodes
from understudy import Dim, MetaTraceError, MetaTracer, symbolic_trace

x34 = torch.randn(3, 4)


def run_both(program: Any, traced: Any, **inputs: Any) -> None:
    assert_same(program(**inputs), traced(**inputs))


# --- structures ------------------------------------------------------------------------------------------------------


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self, a: Any, b: Any) -> None:
        self.a, self.b = a, b


@dataclass
class Doubled:
    a: Tensor
    twice: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.a = self.a * 2


Named = collections.namedtuple("Named", "x y")


def test_an_object_with_slots_leaves_the_program() -> None:
    traced = symbolic_trace(lambda x: Slotted(x + 1, 2), {"x": x34})
    given = traced(x34)
    assert type(given) is Slotted
    assert torch.equal(given.a, x34 + 1) and given.b == 2


def test_collections_leave_the_program() -> None:
    def program(x: Tensor) -> Any:
        return collections.defaultdict(list, a=[x]), collections.deque([x, x + 1], maxlen=3), (x * 2,)

    first, second, _ = symbolic_trace(program, {"x": x34})(x34)
    assert (
        type(first) is collections.defaultdict
        and first.default_factory is list
        and torch.equal(first["a"][0], x34)
    )
    assert type(second) is collections.deque and second.maxlen == 3 and torch.equal(second[1], x34 + 1)


def test_what_a_dataclass_computes_when_it_is_made_is_not_computed_again() -> None:
    given = symbolic_trace(lambda x: Doubled(x), {"x": x34})(x34)
    assert torch.equal(given.a, x34 * 2)


def test_structures_have_metadata() -> None:
    traced = symbolic_trace(lambda p: Named(p["a"][0] + 1, p["b"]), {"p": {"a": [x34], "b": x34}})
    assert wrong_nodes(traced, {"p": {"a": [x34], "b": x34}}) == []
    placeholder = next(iter(traced.graph.nodes))
    assert str(placeholder.meta["val"]["a"][0].spec) == "f32[3, 4]@cpu"


def test_numbers_of_numpy() -> None:
    def program(x: Tensor) -> Tensor:
        return x * np.float64(1.5) + np.int64(2)

    run_both(program, symbolic_trace(program, {"x": x34}), x=x34)


# --- arguments -------------------------------------------------------------------------------------------------------


def scaled(x: Tensor, options: dict[str, Any] | None = None) -> Tensor:
    return x if options is None else x * options["k"]


def test_another_number_in_a_structure_is_refused() -> None:
    traced = symbolic_trace(scaled, {"x": x34}, {"options": {"k": 4}})
    assert torch.equal(traced(x34), x34 * 4)
    assert torch.equal(traced(x34, {"k": 4}), x34 * 4)
    with pytest.raises(ValueError, match=r"options\['k'\] was 4 when this graph was traced, and is 5 now"):
        traced(x34, {"k": 5})


def test_another_length_and_other_keys_are_refused() -> None:
    traced = symbolic_trace(lambda xs: sum(xs), {"xs": [x34, x34]})
    with pytest.raises(ValueError, match="the length of xs was 2 when this graph was traced, and is 3 now"):
        traced([x34, x34, x34])
    traced = symbolic_trace(lambda d: sum(d.values()), {"d": {"a": x34}})
    with pytest.raises(
        ValueError, match="the keys of d was 'a' when this graph was traced, and is 'a b' now"
    ):
        traced({"a": x34, "b": x34})


def test_one_example_for_two_arguments() -> None:
    def program(a: Tensor, b: Tensor) -> Tensor:
        return a.sum(1, keepdim=True) + b.view(b.shape[1], -1).T

    traced = symbolic_trace(program, {"a": x34, "b": x34}, symbolic={"a": {1: Dim("s")}, "b": {1: Dim("t")}})
    other = torch.randn(3, 7)
    assert traced.shape_env.check(x34, other) == []
    run_both(program, traced, a=x34, b=other)


# --- what a program does besides ------------------------------------------------------------------------------------


class Keeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[int, Tensor] = {}
        self.seen: list[Any] = [[]]

    def forward(self, x: Tensor) -> Tensor:
        width = x.shape[-1]
        if width not in self.cache:
            self.cache[width] = torch.arange(width)
        self.seen[0].append(x)
        return x + self.cache[width]


@pytest.mark.parametrize("symbolic", [False, True])
def test_nothing_of_a_trace_is_kept_by_a_module(symbolic: bool) -> None:
    model = Keeping()
    traced = symbolic_trace(model, {"x": x34}, symbolic=symbolic)
    assert model.cache == {} and model.seen == [[]]
    run_both(model, traced, x=x34)


@functools.lru_cache(maxsize=4)
def table(count: int) -> tuple[Tensor, int]:
    return torch.arange(count) * 2, count


def test_nothing_of_a_trace_is_kept_by_a_cache() -> None:
    def program(x: Tensor) -> Tensor:
        return x + table(4)[0]

    table.cache_clear()
    traced = symbolic_trace(program, {"x": x34})
    assert table.cache_info().currsize == 0
    run_both(program, traced, x=x34)


def test_a_value_of_a_trace_that_is_over() -> None:
    kept: list[Any] = []
    symbolic_trace(lambda x: kept.append(x * 2) or x, {"x": x34})
    with pytest.raises(
        MetaTraceError, match=r"a stand-in \(f32\[3, 4\]@cpu\) that was not made in this trace"
    ):
        symbolic_trace(lambda x: x + kept[0], {"x": x34})
    kept.clear()
    symbolic_trace(lambda x: kept.append(x * 2) or x)
    with pytest.raises(MetaTraceError, match="got one of an earlier trace"):
        kept[0] + 1


def test_a_refusal_that_the_program_catches() -> None:
    def program(x: Tensor) -> Tensor:
        try:
            return x.view(5, 7)
        except RuntimeError:
            return x.flatten()

    traced = symbolic_trace(program, {"x": x34})
    assert [node.target for node in traced.graph.nodes if node.op == "call_method"] == ["flatten"]
    run_both(program, traced, x=x34)


def test_grad_modes_that_are_objects() -> None:
    def program(x: Tensor) -> Any:
        with torch.set_grad_enabled(False):
            a = x * 2
        b = x * 3
        off = torch.no_grad()
        with off:
            c = x * 4
        d = x * 5
        with off, torch.enable_grad():
            e = x * 6
        return a, b, c, d, e

    x = x34.clone().requires_grad_()
    traced = symbolic_trace(program, {"x": x})
    assert [y.requires_grad for y in traced(x)] == [y.requires_grad for y in program(x)]
    with torch.no_grad():
        assert [y.requires_grad for y in traced(x)] == [y.requires_grad for y in program(x)]
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()


def test_the_device_of_a_value_as_a_context() -> None:
    def program(x: Tensor) -> Tensor:
        with torch.device(x.device):
            return torch.ones(4) + x

    run_both(program, symbolic_trace(program, {"x": x34}), x=x34)


# --- modules ---------------------------------------------------------------------------------------------------------


class Sliced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return nn.Sequential(*list(self.layers)[:1])(self.layers[:2](x))


def test_a_part_of_a_sequence_is_called_by_its_parts() -> None:
    model = Sliced()
    traced = symbolic_trace(model, {"x": x34})
    called = [node.target for node in traced.graph.nodes if node.op == "call_module"]
    assert called == ["layers.0", "layers.1", "layers.0"]
    run_both(model, traced, x=x34)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
def test_a_module_of_torchscript_is_a_leaf() -> None:
    class Scripted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.jit.script(nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Any:
            return self.inner(x) + 1

    model = Scripted()
    run_both(model, symbolic_trace(model, {"x": x34}), x=x34)


def test_hooks_of_the_root() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model.register_forward_hook(lambda module, args, result: result * 2)
    traced = symbolic_trace(model, {"input": x34})
    assert torch.equal(traced(x34), model(x34))


class Decided(MetaTracer):
    def to_bool(self, obj: Any) -> bool:
        return True


def test_a_tracer_that_decides() -> None:
    traced = symbolic_trace(lambda x: x + 1 if x.sum() > 0 else x - 1, {"x": x34}, tracer=Decided())
    assert torch.equal(traced(-x34.abs()), 1 - x34.abs())


# --- symbolic sizes --------------------------------------------------------------------------------------------------


def test_functions_of_python_on_sizes() -> None:
    def program(x: Tensor) -> Tensor:
        return x * math.sqrt(x.shape[0]) / math.log2(x.shape[1])

    traced = symbolic_trace(program, {"x": x34}, symbolic=True)
    assert traced.shape_env.guards == []
    run_both(program, traced, x=torch.randn(9, 5))


def test_an_attention_that_asks_whether_it_is_causal() -> None:
    def program(x: Tensor) -> Tensor:
        is_causal = x.shape[2] > 1 and x.dim() == 4
        return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=is_causal)

    traced = symbolic_trace(program, {"x": torch.randn(2, 3, 1, 4)}, symbolic={"x": {2: Dim("length")}})
    run_both(program, traced, x=torch.randn(2, 3, 1, 4))
    assert traced.shape_env.check(torch.randn(2, 3, 5, 4)) != []


def test_bytes_of_a_tensor() -> None:
    def program(x: Tensor) -> Tensor:
        return x + x.nbytes

    traced = symbolic_trace(program, {"x": x34}, symbolic=True)
    run_both(program, traced, x=torch.randn(5, 6))


def test_sizes_of_what_is_no_example() -> None:
    with pytest.raises(TypeError, match="symbolic: meta_args has no example of 'y'; it has examples of x"):
        symbolic_trace(lambda x: x, {"x": x34}, symbolic={"y": {0: Dim("batch")}})
    with pytest.raises(
        TypeError, match=r"symbolic: meta_args has no example of 'd'; it has examples of d\['a'\]"
    ):
        symbolic_trace(lambda d: d["a"], {"d": {"a": x34}}, symbolic={"d": {0: Dim("batch")}})
    with pytest.raises(TypeError, match=r"symbolic: expected a bool, or a dict .* got a list"):
        symbolic_trace(lambda x: x, {"x": x34}, symbolic=["x"])  # type: ignore[arg-type]


def test_a_generator_does_not_leave_the_program() -> None:
    with pytest.raises(
        TypeError, match=r"expected a result with known items, got a generator; convert it to a list"
    ):
        symbolic_trace(lambda x: (row for row in x), {"x": x34})


# --- the state of the process -------------------------------------------------------------------------------------


def seeded(x: Tensor) -> Any:
    torch.manual_seed(3)
    return x + torch.rand(3, 4)


def put_back(x: Tensor) -> Any:
    state = torch.get_rng_state()
    first = torch.rand(3, 4)
    torch.set_rng_state(state.clone())
    return x + first, torch.rand(3, 4)


def forked(x: Tensor) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        inside = x.clone().uniform_()
    return inside, torch.rand_like(x)


def with_a_generator(x: Tensor) -> Any:
    generator = torch.Generator()
    state = generator.manual_seed(3).get_state()
    first = x + torch.rand(3, 4, generator=generator)
    generator.set_state(state)
    return first, torch.randperm(3, generator=generator)


def with_a_default_dtype(x: Tensor) -> Any:
    torch.set_default_dtype(torch.float64)
    ones = torch.ones(4)
    torch.set_default_dtype(torch.float32)
    return x + ones


@pytest.mark.parametrize("program", [seeded, put_back, forked, with_a_generator, with_a_default_dtype])
def test_the_state_of_the_process(program: Any) -> None:
    before = torch.get_rng_state()
    traced = symbolic_trace(program, {"x": x34})
    assert torch.equal(torch.get_rng_state(), before)
    again = pickle.loads(pickle.dumps(traced))
    traced.graph.eliminate_dead_code()
    traced.recompile()
    for graph in (traced, traced, again):
        torch.set_rng_state(before)
        expected = program(x34)
        torch.set_rng_state(before)
        assert_same(graph(x34), expected)


def test_a_random_state_that_is_not_put_back_is_not_in_the_graph() -> None:
    traced = symbolic_trace(lambda x: checkpoint(torch.sin, x, use_reentrant=False), {"x": x34})
    assert [node.op for node in traced.graph.nodes] == ["placeholder", "call_function", "output"]


def test_the_gradient_of_a_checkpoint() -> None:
    def program(x: Tensor) -> Any:
        x = x.detach().requires_grad_()
        y = checkpoint(lambda a: (a.sin() * a).exp(), x, use_reentrant=False)
        return torch.autograd.grad(y.sum(), x)

    run_both(program, symbolic_trace(program, {"x": x34}), x=x34)


def save_products(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    is_product = op is torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("how", ["all", "selective", "reentrant"])
def test_a_backward_pass_through_a_checkpoint(how: str) -> None:
    chosen = {"context_fn": functools.partial(create_selective_checkpoint_contexts, save_products)}
    options: Any = chosen if how == "selective" else {}

    def program(x: Tensor) -> Any:
        x = x.detach().requires_grad_()
        y = checkpoint(
            lambda a: torch.dropout(a @ a.T, 0.5, train=True).exp(),
            x,
            use_reentrant=how == "reentrant",
            **options,
        )
        y.sum().backward()
        return y, x.grad

    traced = symbolic_trace(program, {"x": x34})
    torch.manual_seed(0)
    expected = program(x34)
    torch.manual_seed(0)
    assert_same(traced(x34), expected)


def test_graphs_with_regions_are_traced_again_and_pickled() -> None:
    def program(x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            y = x @ x.t()
            with torch.autocast("cpu", enabled=False), torch.no_grad():
                z = x @ x.t()
        return y, z

    traced = symbolic_trace(program, {"x": x34})
    for again in (symbolic_trace(traced, {"x": x34}), pickle.loads(pickle.dumps(traced))):
        run_both(program, again, x=x34)
        products = [node for node in again.graph.nodes if node.name.startswith("matmul")]
        assert [node.meta["val"].dtype for node in products] == [torch.bfloat16, torch.float32]
    assert not torch.is_autocast_enabled("cpu")


def test_a_view_of_a_constant_has_its_value() -> None:
    class Resize(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sizes = {"grid": torch.tensor([[1, 6, 5], [1, 4, 3]])}

        def forward(self, x: Tensor) -> Any:
            return [
                nn.functional.interpolate(x, size=(height, width)) for _, height, width in self.sizes["grid"]
            ]

    model, image = Resize(), torch.randn(1, 2, 8, 8)
    traced = symbolic_trace(model, meta_args={"x": image})
    run_both(model, traced, x=torch.randn(1, 2, 8, 8))


def test_a_constructor_that_no_mode_sees() -> None:
    def program(x: Tensor) -> Any:
        count = torch.IntTensor([3])
        return x * count[0] + count.sum(), x[: int(count)]

    run_both(program, symbolic_trace(program, {"x": x34}), x=x34)


# --- arguments that are fixed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fixed", [None, 3, "sum"])
@pytest.mark.parametrize("is_example", [True, False])
def test_a_fixed_argument_before_others(fixed: Any, is_example: bool) -> None:
    def program(a: Tensor, how: Any, b: Tensor) -> Any:
        return a + b if how is None else a * b if how == 3 else (a, b)

    options: Any = {} if is_example else {"concrete_args": {"how": fixed}}
    traced = symbolic_trace(
        program, {"a": x34, "b": x34, **({"how": fixed} if is_example else {})}, **options
    )
    assert_same(traced(x34, fixed, x34 + 1), program(x34, fixed, x34 + 1))
    with pytest.raises(ValueError, match="how was"):
        traced(x34, "another", x34)


def test_an_argument_by_keyword_behind_a_default() -> None:
    def program(a: Tensor, factor: float = 2.0, *, b: Tensor, add: float = 1.0) -> Tensor:
        return a * factor + b * add

    traced = symbolic_trace(program, {"a": x34, "b": x34})
    assert_same(traced(x34, b=x34 + 1), program(x34, b=x34 + 1))
    with pytest.raises(TypeError, match="traced with b; pass it as a keyword argument"):
        traced(x34)
