"""The five modules that are called as torch's: every public class and function of torch's module is there, takes the same
arguments, and does the same or says what to use instead."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import operator
import subprocess
import sys
import threading
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar

import pytest
import sympy
import torch
import torch._subclasses.fake_tensor as torch_fake_tensor
import torch.fx.experimental.meta_tracer as torch_meta_tracer
import torch.fx.experimental.proxy_tensor as torch_proxy_tensor
import torch.fx.experimental.symbolic_shapes as torch_symbolic_shapes
import torch.fx.passes.fake_tensor_prop as torch_fake_tensor_prop
from torch.fx import Graph, GraphModule, Proxy
from torch.utils._pytree import tree_flatten

import understudy
from understudy import dims, fake_tensor, fake_tensor_prop, meta_tracer, proxy_tensor, symbolic_shapes
from understudy.errors import NotProvided, NotProvidedError, UnderstudyError, UntrackedValueError
from understudy.fake_tensor import FakeTensor, FakeTensorMode
from understudy.meta_tracer import MetaTracer, symbolic_trace
from understudy.proxy_tensor import ProxyTorchDispatchMode, PythonKeyTracer, make_fx
from understudy.symbolic_shapes import ShapeEnv
from understudy.torch_names import ATTRIBUTES, IMPORTED, INSTEAD, SWITCHES, UNCALLED, write_page

aten = torch.ops.aten
PAIRS = {
    fake_tensor: torch_fake_tensor,
    proxy_tensor: torch_proxy_tensor,
    symbolic_shapes: torch_symbolic_shapes,
    fake_tensor_prop: torch_fake_tensor_prop,
    meta_tracer: torch_meta_tracer,
}
each_pair = pytest.mark.parametrize(("ours", "theirs"), PAIRS.items(), ids=lambda module: module.__name__)


def is_public(module: ModuleType, name: str, value: Any) -> bool:
    """A class or a function that the module defines, or exports."""
    is_defined_here = getattr(value, "__module__", None) == module.__name__
    is_offered = is_defined_here or name in getattr(module, "__all__", ())
    return not name.startswith("_") and callable(value) and hasattr(value, "__name__") and is_offered


def public_names(module: ModuleType) -> set[str]:
    type_variables = {"T", "U", "R"}
    return {name for name, value in vars(module).items() if is_public(module, name, value)} - type_variables


# --- the lists ----------------------------------------------------------------------------------------------------------


@each_pair
def test_every_public_name_of_torch_is_there(ours: ModuleType, theirs: ModuleType) -> None:
    assert public_names(theirs) - set(ours.__all__) == set()


@each_pair
def test_every_listed_name_can_be_imported_and_says_what_it_is(ours: ModuleType, theirs: ModuleType) -> None:
    assert len(set(ours.__all__)) == len(ours.__all__)
    for name in ours.__all__:
        value = getattr(ours, name)
        assert not callable(value) or inspect.getdoc(value), name


def test_unknown_names() -> None:
    with pytest.raises(AttributeError, match=r"'understudy.symbolic_shapes' has no attribute 'no_such_name'"):
        symbolic_shapes.no_such_name
    with pytest.raises(ImportError):
        exec("from understudy.symbolic_shapes import no_such_name")


def test_nothing_slow_is_loaded() -> None:
    modules = ", ".join(module.__name__ for module in PAIRS)
    code = (
        f"import sys, torch; before = set(sys.modules); import {modules};"
        "print([m for m in set(sys.modules) - before if m.startswith(('torch._dynamo', 'torch._inductor', 'torch._decomp',"
        " 'torch._refs', 'torch._subclasses', 'torch.fx.experimental', 'sympy', 'numpy'))"
        " and m != 'torch.fx.experimental._constant_symnode'])"  # one small class; torch 2.13 loads it with itself
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]", shown.stdout


@each_pair
def test_names_in_both_doors_are_one_thing(ours: ModuleType, theirs: ModuleType) -> None:
    for name in set(ours.__all__) & set(understudy.__all__):
        assert getattr(ours, name) is getattr(understudy, name)


# --- arguments ----------------------------------------------------------------------------------------------------------

MADE_OTHERWISE = {
    "MetaProxy": "a value has a tracer",
    "MetaAttribute": "made by `x.name`",
    "MetaDeviceAttribute": "made by `x.device`",
    "RuntimeAssert": "made by a ShapeEnv",
    "FakeTensorTLS": "has no constructor of its own",
}
"""Classes whose constructors differ from torch's, and why."""


def arguments_refused(theirs: Any, ours: Any) -> list[str]:
    """The parameters of torch's function that ours does not take, by name or in their place."""
    wanted = inspect.signature(theirs).parameters
    taken = inspect.signature(ours).parameters
    kinds = {parameter.kind for parameter in taken.values()}
    in_order = [
        name for name, parameter in taken.items() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    refused = []
    for place, (name, parameter) in enumerate(wanted.items()):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        is_taken = name in taken or parameter.VAR_KEYWORD in kinds
        is_in_place = parameter.kind is parameter.KEYWORD_ONLY or in_order[place : place + 1] == [name]
        is_optional = (
            parameter.default is parameter.empty
            or name not in taken
            or taken[name].default is not parameter.empty
        )
        if not (is_taken and is_optional and (is_in_place or parameter.VAR_POSITIONAL in kinds)):
            refused.append(name)
    return refused


@each_pair
def test_functions_and_classes_take_the_same_arguments(ours: ModuleType, theirs: ModuleType) -> None:
    for name in sorted(public_names(theirs) - set(MADE_OTHERWISE)):
        value, original = getattr(ours, name), getattr(theirs, name)
        if isinstance(value, NotProvided) or (isinstance(value, type) and issubclass(value, Exception)):
            continue
        assert arguments_refused(original, value) == [], name


def test_the_comparison_of_arguments_finds_differences() -> None:
    def f(a: Any, b: Any = 1) -> None: ...

    def swapped(b: Any, a: Any) -> None: ...

    def longer(a: Any, b: Any = 1, c: Any = 2) -> None: ...

    assert arguments_refused(f, swapped) == ["a", "b"]
    assert arguments_refused(f, longer) == []


# --- what to use instead ------------------------------------------------------------------------------------------------

MODULES = {module.__name__.rpartition(".")[2]: module for module in PAIRS}
CASES = [
    (MODULES[module], name, advice) for module, table in INSTEAD.items() for name, advice in table.items()
]


@pytest.mark.parametrize(
    ("module", "name", "advice"),
    CASES,
    ids=lambda part: part if isinstance(part, str) and part.isidentifier() else "",
)
def test_advice(module: ModuleType, name: str, advice: str) -> None:
    value = getattr(module, name)
    with pytest.raises(NotProvidedError) as caught:
        value(3, option=4)
    text = str(caught.value)
    assert text.startswith(f"understudy has no {name}. ") and advice in text and "\n" not in text
    assert isinstance(caught.value, UnderstudyError) and isinstance(caught.value, NotImplementedError)
    with pytest.raises(NotProvidedError, match=f"understudy has no {name}"):
        type("Derived", (value,), {})
    with pytest.raises(NotProvidedError, match=f"understudy has no {name}"):
        value.debug = True
    assert not isinstance(3, value)


def names_of_torch(module: ModuleType) -> Iterator[str]:
    """All names of one of torch's modules, private and imported ones too, that come from torch."""
    for name, value in vars(module).items():
        home = getattr(value, "__module__", module.__name__)
        is_of_torch = isinstance(home, str) and home.split(".")[0] == "torch"
        is_technical = name.startswith("__") or inspect.ismodule(value) or isinstance(value, TECHNICAL)
        if is_of_torch and not is_technical and name not in ("TYPE_CHECKING", "_T", "_SympyT", "_T1", "_Ts"):
            yield name


TECHNICAL = (TypeVar, typing.ParamSpec, logging.Logger, torch._ops._OpNamespace, types.GenericAlias)


@each_pair
def test_every_name_is_there_or_says_what_to_use(ours: ModuleType, theirs: ModuleType) -> None:
    missing = [name for name in names_of_torch(theirs) if not hasattr(ours, name)]
    assert missing == [], "define it, or add it to understudy/torch_names.py"


@each_pair
def test_names_that_torch_imports_are_torchs_own(ours: ModuleType, theirs: ModuleType) -> None:
    for name in set(names_of_torch(theirs)) & set(IMPORTED) - set(vars(ours)):
        assert getattr(ours, name) is getattr(theirs, name), name


def instances(modules: dict[str, ModuleType]) -> Iterator[Any]:
    """One instance of each class whose attributes programs read."""
    stand_ins, recording, shapes = modules["fake_tensor"], modules["proxy_tensor"], modules["symbolic_shapes"]
    env = shapes.ShapeEnv()
    mode = stand_ins.FakeTensorMode(shape_env=env)
    tracer = recording.PythonKeyTracer()
    yield from (env, mode, mode.from_tensor(torch.ones(2)), mode.fake_tensor_converter, tracer)
    yield env.create_unbacked_symint().node
    yield recording.ProxyTorchDispatchMode(tracer, "real")
    gm = torch.fx.symbolic_trace(torch.nn.ReLU())
    yield recording.DecompositionInterpreter(gm, Graph())
    yield modules["fake_tensor_prop"].FakeTensorProp(gm)
    yield modules["meta_tracer"].MetaTracer()


ADVISED = [
    (kind, name) for kind, groups in ATTRIBUTES.items() for names in groups.values() for name in names.split()
]


def has(value: object, name: str) -> bool:
    try:
        return hasattr(value, name)
    except Exception:  # `tensor.H` of a vector
        return True


def test_every_attribute_of_instances_is_there_or_says_what_to_use() -> None:
    theirs = {module.__name__.rpartition(".")[2]: module for module in PAIRS.values()}
    for ours, original in zip(instances(MODULES), instances(theirs), strict=True):
        kind = type(ours).__name__
        advised = {name for each, name in ADVISED if each == kind}
        names = {
            name for name in {*dir(original), *getattr(original, "__dict__", ())} if not name.startswith("__")
        }
        missing = {name for name in names if not has(ours, name)} - advised - {"_is_protocol"}
        assert missing == set(), f"{kind}: define it, or add it to understudy/torch_names.py"
        assert not any(has(ours, name) for name in advised)


def test_the_advice_on_attributes() -> None:
    env, (_, mode, x, *_) = ShapeEnv(), instances(MODULES)
    text = (
        "understudy's ShapeEnv has no axioms. Use torch._check(condition) to state a condition, and "
        "statically_known_true(condition) to ask for one."
    )
    with pytest.raises(AttributeError) as caught:
        env.axioms  # type: ignore[attr-defined]
    assert str(caught.value) == text
    with pytest.raises(AttributeError, match=r"has no counter. Use env.guards"):
        env.counter = 3  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"has no enter_stack. Use `with mode:`"):
        mode.enter_stack
    with pytest.raises(AttributeError, match=r"has no _item_memo_vc. Use x.nonzero_memo"):
        x._item_memo_vc
    assert x.item_memo is None and x._item_memo is None
    info = FakeTensorMode.cache_info()
    assert (mode.cache_hits, FakeTensorMode.cache_misses) == (info.hits, info.misses)
    assert FakeTensorMode.cache_bypasses == info.bypasses


def test_an_override_that_is_never_called_is_refused() -> None:
    def override(*args: object) -> None:
        """Any method."""

    for kind, name in (
        (FakeTensorMode, "can_run_unsafe_fallback"),
        (FakeTensorMode, "is_our_fake"),
        (ShapeEnv, "evaluate_expr"),
        (fake_tensor.FakeTensorConverter, "_get_memo"),
    ):
        with pytest.raises(
            NotProvidedError, match=rf"^Mine overrides {name}, which understudy's {kind.__name__} never"
        ):
            type("Mine", (kind,), {name: override})
        type("Mine", (kind,), {name: 3})  # an attribute of the program
    with pytest.raises(
        NotProvidedError, match=r"Mine: FakeTensor can't be subclassed.*Override FakeTensorMode.dispatch"
    ):
        type("Mine", (FakeTensor,), {})(FakeTensorMode(), torch.empty(2, device="meta"), torch.device("cpu"))


def spy_on(kind: Any, original: type) -> tuple[Any, set[str]]:
    """A subclass that overrides each method of torch's class of the same name, and those of them that were called."""
    called: set[str] = set()

    def observed(name: str) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            called.add(name)
            return getattr(super(made, self), name)(*args, **kwargs)

        return functools.wraps(getattr(kind, name))(method)

    names = [
        name
        for name, value in vars(original).items()
        if isinstance(value, types.FunctionType) and not name.startswith("__")
    ]
    uncalled = UNCALLED.get(kind.__name__, {}) if kind is not original else {}
    refused = {name for text in uncalled.values() for name in text.split()}
    made = type(
        "Mine",
        (kind,),
        {name: observed(name) for name in names if hasattr(kind, name) and name not in refused},
    )
    return made, called


NEED_NO_CALL = {
    "_default_unspecified_value_range": "an unspecified range has no bounds here",
    "_update_version_counter": "for torch's tools",
    "_create_fx_call_function": "conditions are not translated for Z3",
    "_constrain_range_for_size": "an operator does it",
    "suppress_guards": "a context for callers",
    "bound_sympy": "a question of callers",
    "is_unbacked_symint": "a question of callers",
    "produce_guards_expression": "a question of callers",
    "produce_guards_verbose": "a question of callers",
    "reset_nt_tensor_id_counter": "numbers of jagged tensors belong to the offsets",
}
"""Methods that torch's own classes call themselves, and that need no call here."""


def test_every_method_that_torch_calls_is_called_when_it_is_overridden() -> None:
    def called_by(modules: Any) -> dict[str, set[str]]:
        kinds = [
            getattr(modules[module], name)
            for module, name in (
                ("fake_tensor", "FakeTensorMode"), ("fake_tensor", "FakeTensorConverter"), ("symbolic_shapes", "ShapeEnv")
            )
        ]  # fmt: skip
        originals = (
            torch_fake_tensor.FakeTensorMode,
            torch_fake_tensor.FakeTensorConverter,
            torch_symbolic_shapes.ShapeEnv,
        )
        (mode_class, of_mode), (converter_class, of_converter), (env_class, of_env) = map(
            spy_on, kinds, originals
        )
        mode = mode_class(shape_env=env_class(), allow_non_fake_inputs=True)
        mode.fake_tensor_converter = converter_class()
        x = mode.from_tensor(torch.ones(4, 6))
        with mode:
            y = x.view(x.shape[0] * 2, -1) + torch.ones(1)
            assert y.shape[0] > 3 and torch.tensor(3).item() == 3
            number = x.sum().long().item()
            torch._check(number >= 2)
            x.nonzero(), x.sum().item(), (x > 0).any().item()
            torch.nn.Linear(6, 2)(x).sum().backward()
        mode.shape_env.produce_guards([x], ["x"])
        return {"FakeTensorMode": of_mode, "FakeTensorConverter": of_converter, "ShapeEnv": of_env}

    theirs = called_by({module.__name__.rpartition(".")[2]: module for module in PAIRS.values()})
    advised = {name for _, name in ADVISED}
    for kind, called in called_by(MODULES).items():
        refused = {name for names in UNCALLED[kind].values() for name in names.split()}
        assert theirs[kind] - called - refused - advised - NEED_NO_CALL.keys() == set(), kind


def test_the_page_of_differences_is_written_from_the_table() -> None:
    page = Path(__file__).parent.parent / "docs" / "differences.md"
    assert page.read_text() == write_page()


def test_every_switch_is_listed() -> None:
    import torch._dynamo.config as dynamo_config
    import torch._functorch.config as functorch_config

    flags = {name for config in (functorch_config, dynamo_config) for name in config.get_config_copy()}
    about_stand_ins = {name for name in flags if name.startswith("fake_tensor_") or "fake_kernels" in name}
    assert about_stand_ins == set(SWITCHES), "what does it do here? Say so in understudy/torch_names.py"


def test_the_advice_works() -> None:
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    x = mode.from_tensor(torch.randn(4, 6), source="x", symbolic_context=dims("batch", "seq"))
    with mode:
        x.view(-1, 3)
    (guard,) = env.guards
    assert guard.line and "batch*seq % 3 == 0" in env.format_guards(verbose=True)
    assert env.specialisations == [] and len(env.var_to_range) == 2
    assert str(x.shape[0]) == "batch" and str(x.shape[0].node.expr) == "batch"
    assert env.check(torch.randn(2, 5)) and callable(env.produce_guards) and env.check_source()


# --- fake_tensor --------------------------------------------------------------------------------------------------------


@pytest.fixture
def mode() -> FakeTensorMode:
    return FakeTensorMode()


def test_disable_fake_tensor_cache(mode: FakeTensorMode) -> None:
    def bypasses() -> int:
        return FakeTensorMode.cache_info().bypasses.get("cache disabled", 0)

    with mode:
        x = torch.empty(3, 17)
        before = bypasses()
        with fake_tensor.disable_fake_tensor_cache(mode):
            assert not mode.cache_enabled
            assert torch.sin(x).shape == (3, 17)
        assert bypasses() == before + 1 and mode.cache_enabled
        with pytest.raises(ZeroDivisionError), fake_tensor.disable_fake_tensor_cache(mode):
            1 / 0
        assert mode.cache_enabled


def test_dump_cache_stats(mode: FakeTensorMode, caplog: pytest.LogCaptureFixture) -> None:
    with mode, fake_tensor.disable_fake_tensor_cache(mode):
        torch.sin(torch.empty(3))
    info = FakeTensorMode.cache_info()
    with caplog.at_level(logging.INFO):
        fake_tensor.dump_cache_stats()
    assert f"{info.hits} hits, {info.misses} misses, {info.size} plans" in caplog.text
    assert f"cache disabled: {info.bypasses['cache disabled']}" in caplog.text


SOME_OPERATORS = [
    aten.add.Tensor, aten.add_.Tensor, aten.mul.Tensor, aten.view.default, aten.dropout.default, aten.relu.default,
    aten.native_dropout.default, aten.mm.default, aten.sub.Tensor, aten.div.Tensor, aten.addcmul.default, aten.bmm.default,
]  # fmt: skip


def test_get_schema_info() -> None:
    for op in SOME_OPERATORS:
        ours, theirs = fake_tensor.get_schema_info(op), torch_fake_tensor.get_schema_info(op)
        assert type(ours) is type(theirs) and ours.is_mutable() is theirs.is_mutable()
        assert fake_tensor.get_schema_info(op) is ours
    assert fake_tensor.get_schema_info(func=aten.add_.Tensor).is_mutable()


def test_should_allow_numbers_as_tensors() -> None:
    answers = [fake_tensor.should_allow_numbers_as_tensors(op) for op in SOME_OPERATORS]
    assert answers == [torch_fake_tensor.should_allow_numbers_as_tensors(op) for op in SOME_OPERATORS]
    assert {True, False} == set(answers)


def test_torch_decomp_decompositions() -> None:
    from torch._decomp import decomposition_table

    operators = [op for op in decomposition_table if isinstance(op, torch._ops.OpOverload)]
    answers = [fake_tensor.torch_decomp_decompositions(op) for op in operators]
    assert answers == [torch_fake_tensor.torch_decomp_decompositions(op) for op in operators]
    assert {True, False} == set(answers)
    with pytest.raises(KeyError):
        fake_tensor.torch_decomp_decompositions(aten.mm.out)


class NotKnown(RuntimeError):
    pass


def run_fallback(mode: FakeTensorMode, op: Any, *args: Any, **kwargs: Any) -> Any:
    flat, spec = tree_flatten((args, kwargs))
    return fake_tensor.run_fallback_kernel(mode, op, flat, spec, NotKnown("not known"))


def test_run_fallback_kernel(mode: FakeTensorMode) -> None:
    x = mode.from_tensor(torch.randn(3, 4))
    found = run_fallback(mode, aten.sort.default, x.t(), dim=0, descending=True)
    real = torch.randn(3, 4).t().sort(dim=0, descending=True)
    assert isinstance(found, tuple) and len(found) == 2
    for fake, tensor in zip(found, real, strict=True):
        assert type(fake) is FakeTensor and fake.fake_mode is mode
        assert (fake.shape, fake.stride(), fake.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    assert run_fallback(mode, aten.add_.Tensor, x, 1) is x
    view = run_fallback(mode, aten.t.default, x)
    assert view.shape == (4, 3) and view.untyped_storage()._cdata == x.untyped_storage()._cdata
    assert run_fallback(mode, aten.equal.default, x, x) is True


def test_run_fallback_kernel_refuses_as_torch_does(mode: FakeTensorMode) -> None:
    x = mode.from_tensor(torch.randn(3, 4))
    with pytest.raises(NotKnown):
        run_fallback(mode, aten.t_.default, x)
    with pytest.raises(NotKnown) as caught:
        run_fallback(
            mode, aten.cudnn_batch_norm.default, x[None], x[0, :3], None, None, None, True, 0.1, 1e-5
        )
    assert isinstance(caught.value.__cause__, understudy.UnsupportedOperatorException)
    assert x.shape == (3, 4)


def test_fake_tensor_tls(mode: FakeTensorMode) -> None:
    tls = fake_tensor.fake_tensor_tls
    assert isinstance(tls, fake_tensor.FakeTensorTLS) and tls.allow_non_fake_inputs_override is None
    assert torch_fake_tensor.fake_tensor_tls.allow_non_fake_inputs_override is None
    x, real = mode.from_tensor(torch.ones(2)), torch.ones(2)
    seen: list[Any] = []
    tls.allow_non_fake_inputs_override = True
    try:
        assert (x + real).shape == (2,)
        thread = threading.Thread(target=lambda: seen.append(tls.allow_non_fake_inputs_override))
        thread.start()
        thread.join()
        tls.allow_non_fake_inputs_override = False
        with pytest.raises(understudy.MixedTensorsError):
            FakeTensorMode(allow_non_fake_inputs=True).from_tensor(torch.ones(2)) + real
    finally:
        tls.allow_non_fake_inputs_override = None
    assert seen == [None]
    with pytest.raises(understudy.MixedTensorsError):
        x + real


def memo_owner(descriptor: Any, **options: Any) -> Any:
    class Owner:
        memo = descriptor(**options)
        _memo = None
        _version = 0
        fake_mode = SimpleNamespace(epoch=0)

        def is_inference(self) -> bool:
            return False

    return Owner()


@pytest.mark.parametrize("module", [fake_tensor, torch_fake_tensor], ids=["ours", "torch's"])
def test_sym_number_memo_descriptor(module: Any) -> None:
    owner = memo_owner(module.SymNumberMemoDescriptor)
    assert owner.memo is None
    owner.memo = 7
    assert owner.memo == 7
    owner._version += 1
    assert owner.memo is None
    owner.memo = 8
    owner.fake_mode.epoch += 1
    assert owner.memo is None
    owner.memo = 9
    owner.memo = None
    assert owner.memo is None
    nested = memo_owner(module.SymNumberMemoDescriptor, is_nested_int=True)
    nested.memo = 7
    nested._version += 1
    nested.fake_mode.epoch += 1
    assert nested.memo == 7


def test_memos_of_stand_ins() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.ones(3, dtype=torch.int64)).sum()
    with mode:
        first = x.item()
        assert str(x.item_memo) == str(x.item()) == str(first)
        x.add_(1)
        assert x.item_memo is None and str(x.item()) != str(first)
    assert isinstance(FakeTensor.item_memo, fake_tensor.SymNumberMemoDescriptor)


def test_init_gpu_context(mode: FakeTensorMode) -> None:
    """What it is for: gradients of stand-ins on a device that is not here."""
    fake_tensor.init_gpu_context(torch.device("cuda"))
    with mode:
        x = torch.ones(3, device="cuda", requires_grad=True)
        (x * 2).sum().backward()
    assert x.grad is not None and x.grad.device == torch.device("cuda", 0)


def test_small_structures() -> None:
    tree = {"a": [torch.ones(2), 3], "b": (4.0, {"c": torch.zeros(1)}), "d": True}
    for kind in (torch.Tensor, int, float, str):
        ours, theirs = (
            fake_tensor.tree_flatten_only(kind, tree),
            torch_fake_tensor.tree_flatten_only(kind, tree),
        )
        assert len(ours) == len(theirs) and all(map(operator.is_, ours, theirs))
    assert fake_tensor.ordered_set("b", "a", "b") == torch_fake_tensor.ordered_set("b", "a", "b")
    assert list(fake_tensor.ordered_set("b", "a", "b")) == ["b", "a"]


# --- proxy_tensor -------------------------------------------------------------------------------------------------------


def traced_by_hand(x: torch.Tensor, **options: Any) -> tuple[PythonKeyTracer, ProxyTorchDispatchMode]:
    """A tracer that knows one input, and its recorder."""
    tracer = PythonKeyTracer()
    proxy = tracer.create_proxy("placeholder", "x", (), {})
    proxy_tensor.track_tensor_tree(x, proxy, constant=None, tracer=tracer)
    return tracer, ProxyTorchDispatchMode(tracer, "fake", **options)


def targets(graph: Graph) -> list[Any]:
    return [node.target for node in graph.nodes if node.op == "call_function"]


def test_proxy_call() -> None:
    x = torch.randn(3)
    tracer, recorder = traced_by_hand(x)
    result = proxy_tensor.proxy_call(recorder, aten.mul.Tensor, False, (x, 2), {})
    assert torch.equal(result, x * 2) and targets(tracer.graph) == [aten.mul.Tensor]
    with recorder:  # the call is recorded once
        again = proxy_tensor.proxy_call(recorder, aten.add.Tensor, False, (result, x), {"alpha": 3})
        assert proxy_tensor.get_proxy_mode() is recorder
    tracer.graph.output(proxy_tensor.fetch_object_proxy(tracer, again).proxy.node)
    module = GraphModule(tracer.root, tracer.graph)
    assert targets(tracer.graph) == [aten.mul.Tensor, aten.add.Tensor]
    y = torch.randn(3)
    assert torch.allclose(module(y), y * 5)


def test_proxy_call_above_autograd() -> None:
    x = torch.randn(3)
    _, recorder = traced_by_hand(x)
    with pytest.raises(
        UnderstudyError, match="pre_dispatch=True, and a recorder that was made with pre_dispatch=False"
    ):
        proxy_tensor.proxy_call(recorder, aten.relu.default, True, (x,), {})


def test_fetch_object_proxy() -> None:
    x, stranger = torch.randn(3), torch.randn(3)
    tracer, _ = traced_by_hand(x)
    assert proxy_tensor.fetch_object_proxy(tracer, x).proxy.node.name == "x"
    assert proxy_tensor.fetch_object_proxy(tracer, stranger) is stranger


def test_fetch_sym_proxy() -> None:
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    x = mode.from_tensor(torch.randn(4, 6), source="x")
    tracer, _ = traced_by_hand(x)
    fetch = proxy_tensor.fetch_sym_proxy(tracer)
    rows = x.shape[0]
    assert isinstance(fetch(rows), Proxy) and fetch(rows).node.target is aten.sym_size.int
    assert isinstance(fetch(rows * 2), Proxy)
    assert fetch(rows - rows) == 0 and type(fetch(rows - rows)) is int
    stranger = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.randn(5, 7), source="y")
    with pytest.raises(UntrackedValueError):
        fetch(stranger.shape[1])


@pytest.mark.parametrize("module", [proxy_tensor, torch_proxy_tensor], ids=["ours", "torch's"])
def test_handle_sym_dispatch(module: Any) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.new_ones(module.handle_sym_dispatch(operator.mul, (x.shape[0], x.shape[1]), {}))

    traced = module.make_fx(f, tracing_mode="symbolic")(torch.randn(4, 6))
    assert traced(torch.randn(2, 5)).shape == (10,)
    with pytest.raises((UnderstudyError, AssertionError)):
        module.handle_sym_dispatch(operator.mul, (2, 3), {})


@pytest.mark.parametrize("module", [proxy_tensor, torch_proxy_tensor], ids=["ours", "torch's"])
def test_thunkify_contexts(module: Any) -> None:
    seen: list[bool] = []

    def is_lazy() -> bool:
        return module.get_proxy_mode().tracer.enable_thunkify

    def f(x: torch.Tensor) -> torch.Tensor:
        seen.append(is_lazy())
        with module.maybe_enable_thunkify():
            seen.append(is_lazy())
            with module.maybe_disable_thunkify():
                seen.append(is_lazy())
            seen.append(is_lazy())
        seen.append(is_lazy())
        return x + 1

    module.make_fx(f)(torch.ones(2))
    assert seen == [False, True, False, True, False]
    with module.maybe_enable_thunkify(), module.maybe_disable_thunkify():
        pass  # without a trace they do nothing


DECOMPOSITIONS = {
    aten.silu.default: lambda x: x * torch.sigmoid(x),
    aten.relu.default: lambda x: torch.where(x > 0, x, 0.0),
}


@pytest.mark.parametrize("module", [proxy_tensor, torch_proxy_tensor], ids=["ours", "torch's"])
def test_selective_decompose(module: Any) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.nn.functional.silu(x)).neg()

    x = torch.randn(5)
    traced = module.make_fx(f)(x)
    assert targets(traced.graph) == [aten.silu.default, aten.relu.default, aten.neg.default]
    options = {"decomposition": DECOMPOSITIONS, "trace_joint_graph": False}
    chosen = module.selective_decompose(
        traced, x, should_decompose=lambda n: n.target is aten.silu.default, **options
    )
    assert targets(chosen.graph) == [
        aten.sigmoid.default,
        aten.mul.Tensor,
        aten.relu.default,
        aten.neg.default,
    ]
    y = torch.randn(5)
    assert torch.allclose(chosen(y), f(y))
    untouched = module.selective_decompose(traced, x, should_decompose=lambda n: False, **options)
    assert targets(untouched.graph) == targets(traced.graph)


@pytest.mark.parametrize("module", [proxy_tensor, torch_proxy_tensor], ids=["ours", "torch's"])
def test_selective_decompose_of_a_joint_graph(module: Any) -> None:
    def joint(primals: list[torch.Tensor], tangents: list[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.relu(primals[0]) * tangents[0]]

    inputs = ([torch.randn(3)], [torch.randn(3)])
    traced = module.make_fx(joint)(*inputs)
    found = module.selective_decompose(
        traced, *inputs, decomposition=DECOMPOSITIONS, should_decompose=lambda n: True, trace_joint_graph=True
    )
    assert [node.name for node in found.graph.find_nodes(op="placeholder")] == ["primals_1", "tangents_1"]
    assert aten.relu.default not in targets(found.graph) and aten.where.self in targets(found.graph)
    assert torch.allclose(found(*inputs)[0], joint(*inputs)[0])


def test_torch_function_metadata_mode() -> None:
    x = torch.randn(3)
    tracer, recorder = traced_by_hand(x)
    with recorder, proxy_tensor.TorchFunctionMetadataMode(tracer):
        torch.relu(torch.relu(x))
    assert tracer.torch_fn_metadata is torch.relu and tracer.torch_fn_counts == {torch.relu: 2}
    names = [node.meta["torch_fn"][0] for node in tracer.graph.nodes if node.op == "call_function"]
    assert names == ["relu_1", "relu_2"]


@pytest.mark.parametrize("module", [proxy_tensor, torch_proxy_tensor], ids=["ours", "torch's"])
def test_pre_dispatch_torch_function_mode(module: Any) -> None:
    tracer = module.PythonKeyTracer()
    tracer.graph, tracer.root = Graph(tracer_cls=type(tracer)), torch.nn.Module()
    states = module.PreDispatchTorchFunctionMode(tracer)
    with module.ProxyTorchDispatchMode(tracer, "real", pre_dispatch=True), states, torch.no_grad():
        pass
    assert targets(tracer.graph) == [torch._C._set_grad_enabled] * 2
    assert [node.args for node in tracer.graph.nodes] == [(False,), (True,)]
    assert states.enter_autocast_nodes == []


# --- symbolic_shapes ----------------------------------------------------------------------------------------------------


def test_keys_of_a_path() -> None:
    """They are torch's, as the steps of our paths are: code that asks for them finds them."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    x = mode.from_tensor(torch.ones(7))
    with mode:
        found = x.nonzero()
    (path,) = symbolic_shapes.compute_unbacked_bindings(env, found).values()
    assert isinstance(path[0], symbolic_shapes.CallMethodKey) and str(path[0]) == ".size()"
    for name in ("CallMethodKey", "ConvertIntKey", "DivideByKey", "InnerTensorKey"):
        assert getattr(symbolic_shapes, name) is getattr(torch_symbolic_shapes, name)


def test_runtime_assert() -> None:
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    x = mode.from_tensor(torch.ones(7))
    with mode:
        number = x.nonzero().shape[0]
        torch._check(number >= 5)
    ((promise,),) = env.deferred_runtime_asserts.values()
    assert isinstance(promise, symbolic_shapes.RuntimeAssert)
    assert (
        str(promise.expr) == "u0 >= 5"
        and promise.msg.startswith("u0 >= 5    because")
        and "does not hold" in promise.msg
    )


@pytest.mark.parametrize("module", [symbolic_shapes, torch_symbolic_shapes], ids=["ours", "torch's"])
def test_tracked_fake(module: Any) -> None:
    x, y = FakeTensorMode().from_tensor(torch.ones(2)), FakeTensorMode().from_tensor(torch.ones(2))
    source, other = SimpleNamespace(name="L['x']"), SimpleNamespace(name="L['y']")
    tracked = module.TrackedFake(x, source, None)
    assert (tracked.fake, tracked.source, tracked.symbolic_context) == (x, source, None)
    assert tracked == module.TrackedFake(x, source, "another") and hash(tracked) == hash(
        module.TrackedFake(x, source, 1)
    )
    assert tracked != module.TrackedFake(y, source, None) and tracked != module.TrackedFake(x, other, None)
    assert tracked != "x"


LAYOUTS = [
    ((), ()), ((3,), (1,)), ((3,), (2,)), ((1,), (9,)), ((0,), (5,)), ((2, 3), (3, 1)), ((2, 3), (1, 2)), ((2, 3), (4, 1)),
    ((2, 1, 3), (3, 77, 1)), ((2, 3, 4), (12, 1, 3)), ((2, 2), (1, 1)), ((0, 3), (3, 1)), ((4, 1), (1, 1)),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "strides"), LAYOUTS)
def test_eval_is_non_overlapping_and_dense(sizes: Any, strides: Any) -> None:
    ours = symbolic_shapes.eval_is_non_overlapping_and_dense(sizes, strides)
    assert (
        ours == torch_symbolic_shapes.eval_is_non_overlapping_and_dense(sizes, strides) and type(ours) is int
    )
    name = "IsNonOverlappingAndDenseIndicator"
    assert symbolic_shapes.SYMPY_INTERP[name](*sizes, *strides) == torch_symbolic_shapes.SYMPY_INTERP[name](
        *sizes, *strides
    )


def test_eval_is_non_overlapping_and_dense_of_symbols() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.randn(4, 6), source="x")
    assert symbolic_shapes.eval_is_non_overlapping_and_dense(x.shape, x.stride()) == 1
    assert symbolic_shapes.eval_is_non_overlapping_and_dense(x.shape, (x.shape[1] * 2, 1)) == 0


def test_sympy_interp_runs_guards() -> None:
    assert symbolic_shapes.SYMPY_INTERP.keys() == torch_symbolic_shapes.SYMPY_INTERP.keys()
    code = "math.floor(n / 2) == 3 and cast_symbool_to_symint_guardless(n > 5) == 1"
    assert eval(code, dict(symbolic_shapes.SYMPY_INTERP), {"n": 6})


def test_safe_expand() -> None:
    a, b, c = sympy.symbols("a b c", integer=True, positive=True)
    for expression in (
        (a + b) * (a - c),
        (a + b) ** 3,
        a * (b + c * (a + 1)),
        a + 1,
        sympy.Max(a * (b + 1), c),
        sympy.Integer(3),
    ):
        assert symbolic_shapes.safe_expand(expression) == torch_symbolic_shapes.safe_expand(expression)
    assert symbolic_shapes.safe_expand(7) == torch_symbolic_shapes.safe_expand(7) == 7


def test_uninteresting_files() -> None:
    files = symbolic_shapes.uninteresting_files()
    assert {
        torch.__file__,
        torch.fx.interpreter.__file__,
        understudy.__file__,
        symbolic_shapes.__file__,
        "<string>",
    } <= files
    assert __file__ not in files and pytest.__file__ not in files


def test_error() -> None:
    for module in (symbolic_shapes, torch_symbolic_shapes):
        with pytest.raises(AssertionError):
            module.error()


def test_sym_types() -> None:
    assert symbolic_shapes.SymTypes == torch_symbolic_shapes.SymTypes
    assert proxy_tensor.py_sym_types == torch_proxy_tensor.py_sym_types
    assert proxy_tensor.PySymType == torch_proxy_tensor.PySymType


# --- meta_tracer --------------------------------------------------------------------------------------------------------


def test_values_of_a_trace() -> None:
    seen: dict[str, Any] = {}

    def f(x: torch.Tensor) -> torch.Tensor:
        seen.update(x=x, device=x.device, transposed=x.T)
        seen["metas"] = [meta_tracer.proxys_to_metas(v) for v in (x, x.device, x.T, 3, "text")]
        return x.T + torch.zeros(1, device=x.device)

    traced = symbolic_trace(f, meta_args={"x": torch.randn(2, 3)})
    assert [node.op for node in traced.graph.nodes if node.target is getattr] == ["call_function"] * 2
    assert type(seen["x"]) is type(seen["transposed"]) is FakeTensor
    assert isinstance(seen["device"], torch.device) and seen["device"].type == "cpu"
    tensor, device, transposed, *others = seen["metas"]
    assert type(tensor) is FakeTensor and tensor.shape == (2, 3) and transposed.shape == (3, 2)
    assert device == torch.device("cpu") and others == [3, "text"]


@torch.fx.wrap
def opaque(x: Any) -> Any:
    """A function whose result is not known."""
    raise NotImplementedError("only for real tensors")


OPAQUE_RESULT = torch.empty(5, 2, device="meta")


class Informed(MetaTracer):
    """Says itself what a function gives, as tracers derived from torch's do."""

    def create_proxy(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> Any:
        proxy = super().create_proxy(kind, target, *args, **kwargs)
        if getattr(target, "__name__", "") == "opaque":
            proxy.install_tensor_meta(OPAQUE_RESULT)
        return proxy


@pytest.mark.filterwarnings("ignore:Could not compute metadata")
def test_install_tensor_meta() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = opaque(x)
        return y.reshape(y.shape[0] * y.shape[1])

    traced = symbolic_trace(f, meta_args={"x": torch.randn(3)}, tracer=Informed())
    shapes = {node.name: tuple(node.meta["val"].shape) for node in traced.graph.nodes if "val" in node.meta}
    assert shapes["opaque"] == (5, 2) and shapes["reshape"] == (10,)
    assert "reshape(10)" in traced.code


@pytest.mark.filterwarnings("ignore:Could not compute metadata")
def test_proxys_to_metas_refuses() -> None:
    def f(x: Any) -> Any:
        return meta_tracer.proxys_to_metas(opaque(x))

    with pytest.raises(understudy.MetaTraceError, match="set it with install_tensor_meta"):
        symbolic_trace(f, meta_args={"x": torch.randn(3)})
    with pytest.raises(understudy.MetaTraceError, match=r"expected a MetaProxy, got .*, a Proxy"):
        torch.fx.symbolic_trace(lambda x: meta_tracer.proxys_to_metas(x))
    with pytest.raises(AssertionError):
        torch.fx.symbolic_trace(lambda x: torch_meta_tracer.proxys_to_metas(x))


@pytest.mark.parametrize("module", [meta_tracer, torch_meta_tracer], ids=["ours", "torch's"])
def test_gen_constructor_wrapper(module: Any) -> None:
    wrapper, target = module.gen_constructor_wrapper(torch.zeros)
    assert target is torch.zeros and wrapper.__name__ == "zeros"
    assert torch.equal(wrapper(2, 3, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int64))
    traced = torch.fx.symbolic_trace(lambda n: wrapper([n, 2]))
    assert targets(traced.graph) == [torch.zeros] and traced(5).shape == (5, 2)


def test_gen_constructor_wrapper_by_a_device() -> None:
    wrapper, _ = meta_tracer.gen_constructor_wrapper(torch.ones)
    traced = symbolic_trace(lambda x: x + wrapper(3, device=x.device), meta_args={"x": torch.randn(3)})
    assert torch.ones in targets(traced.graph)
    assert torch.equal(traced(torch.zeros(3)), torch.ones(3))


OVERRIDES: dict[str, tuple[Any, ...]] = {
    "embedding_override": (torch.nn.Embedding(7, 5), torch.zeros(2, 3, dtype=torch.int64)),
    "nn_layernorm_override": (torch.nn.LayerNorm(4), torch.zeros(3, 4)),
    "torch_relu_override": (torch.zeros(3, 4),),
    "torch_nn_relu_override": (torch.nn.ReLU(), torch.zeros(3, 4)),
    "functional_relu_override": (torch.zeros(3, 4),),
    "torch_where_override": (torch.ones(3, 1, dtype=torch.bool), torch.zeros(4), torch.zeros(3, 4)),
    "torch_abs_override": (torch.zeros(3, 4),),
}


@pytest.mark.parametrize("name", OVERRIDES)
def test_overrides(name: str, mode: FakeTensorMode) -> None:
    """On tensors of the meta device they give what torch's give, and on stand-ins the same."""
    given = OVERRIDES[name]
    metas = [value.to("meta") if isinstance(value, torch.Tensor) else value for value in given]
    fakes = [mode.from_tensor(value) if isinstance(value, torch.Tensor) else value for value in given]
    theirs = getattr(torch_meta_tracer, name)(*metas)
    override = getattr(meta_tracer, name)
    ours, fake = override(*metas), override(*fakes)
    assert (ours.shape, ours.stride(), ours.dtype, ours.device) == (
        theirs.shape,
        theirs.stride(),
        theirs.dtype,
        theirs.device,
    )
    assert type(fake) is FakeTensor and (fake.shape, fake.stride(), fake.dtype) == (
        ours.shape,
        ours.stride(),
        ours.dtype,
    )


def test_an_override_for_a_module_of_ones_own() -> None:
    class Norm(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise NotImplementedError("a kernel that only real tensors have")

    class Leaves(MetaTracer):
        def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
            return isinstance(m, Norm) or super().is_leaf_module(m, module_qualified_name)

    overrides = meta_tracer.manual_meta_overrides
    overrides[Norm] = meta_tracer.nn_layernorm_override
    try:
        traced = symbolic_trace(
            torch.nn.Sequential(Norm()), meta_args={"input": torch.randn(2, 3)}, tracer=Leaves()
        )
    finally:
        del overrides[Norm]
    (node,) = traced.graph.find_nodes(op="call_module", target="0")
    assert node.meta["val"].shape == (2, 3)


# --- one line changed ---------------------------------------------------------------------------------------------------

PROGRAM = """
from {fake} import FakeTensorMode
from {proxy} import make_fx
from {shapes} import ShapeEnv, guard_int
from {prop} import FakeTensorProp
from {meta} import symbolic_trace
import torch

mode = FakeTensorMode(shape_env=ShapeEnv())
x = mode.from_tensor(torch.randn(4, 6))
traced = make_fx(lambda x: x.sum(0) * x.shape[0], tracing_mode="fake")(torch.randn(4, 6))
FakeTensorProp(traced).propagate(torch.randn(4, 6))
answers = [tuple(node.meta["val"].shape) for node in traced.graph.nodes if node.op == "call_function"]
answers.append(guard_int(x.shape[1]))
layers = symbolic_trace(torch.nn.Sequential(torch.nn.Linear(6, 2)), meta_args={{"input": torch.empty(4, 6, device="meta")}})
answers.append([node.target for node in layers.graph.nodes])
"""


def test_a_program_whose_import_lines_are_changed() -> None:
    kinds = ("fake", "proxy", "shapes", "prop", "meta")
    order = (fake_tensor, proxy_tensor, symbolic_shapes, fake_tensor_prop, meta_tracer)
    answers = []
    for modules in (order, [PAIRS[module] for module in order]):
        space: dict[str, Any] = {}
        exec(
            PROGRAM.format(**{kind: module.__name__ for kind, module in zip(kinds, modules, strict=True)}),
            space,
        )
        answers.append(space["answers"])
    assert answers[0] == answers[1] == [(6,), (6,), 6, ["input", "0", "output"]]


def test_make_fx_is_ours() -> None:
    assert (
        make_fx is understudy.make_fx and importlib.import_module("understudy.proxy_tensor") is proxy_tensor
    )
