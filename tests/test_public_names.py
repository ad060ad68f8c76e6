"""The public names: exactly these, each documented, and nothing of theirs loaded that is not needed."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import understudy

NAMES = """
    Constraint PropagateUnbackedSymInts SymIntEqByExpr canonicalize_bool_expr create_contiguous is_accessor_node
    ConstraintViolationError PendingUnbackedSymbolNotFound SymIntSymbolicContext
    cast_symbool_to_symint_guardless check_consistent constrain_unify find_symbol_binding_fx_nodes
    has_symbolic_sizes_strides is_nested_int is_symbol_binding_fx_node
    DataDependentOutputException DecompositionInterpreter Dim DimDynamic DispatchCacheInfo
    DynamicOutputShapeException FakeCopyMode FakeTensor FakeTensorConverter FakeTensorDeviceMismatchError
    FakeTensorMode FakeTensorProp GuardOnDataDependentSymNode KeyPath MetaTraceError MetaTracer
    MetadataMismatchError MixedTensorsError New NoDataError OperatorError PropagationError
    ProxySymDispatchMode ProxyTorchDispatchMode PythonKeyTracer RelaxedUnspecConstraint Same Settings ShapeEnv
    ShapeEnvSettings StatefulSymbolicContext StatelessSymbolicContext StrictMinMaxConstraint
    SubclassSymbolicContext SymbolicContext TensorMetadata TensorSpec UnderstudyError
    UnsupportedFakeTensorException UnsupportedMutationAliasingException UnsupportedOperatorException Value
    View bind_symbols capture_step compute_unbacked_bindings constrain_range decompose dims
    disable_autocast_cache disable_proxy_modes_tracing dispatch_trace eval_guards expect_true
    extract_tensor_metadata extract_val fake_signature free_symbols free_unbacked_symbols
    fx_placeholder_targets fx_placeholder_vals get_innermost_proxy_mode get_isolated_graphmodule
    get_plain_tensors get_proxy_mode get_proxy_slot get_torch_dispatch_modes guard_bool guard_float guard_int
    guard_or_false guard_or_true guard_scalar guard_size_oblivious guarding_hint_or_throw has_free_symbols
    has_free_unbacked_symbols has_guarding_hint has_proxy_slot has_static_value
    insert_deferred_runtime_asserts is_concrete_bool
    is_concrete_float is_concrete_int is_fake is_sym_node is_symbolic make_fx manual_meta_overrides mark_pure
    maybe_disable_fake_tensor_mode maybe_get_fake_mode maybe_handle_decomp optimization_hint py_sym_types
    rebind_unbacked resolve_unbacked_bindings rule run_every_layer set_meta set_original_aten_op set_proxy_slot show
    simulate
    RehearsalOptions rehearse Rehearsal ClusterOptions rehearse_cluster ClusterRehearsal
    export check_inputs guards_of AccelerationWarning accelerate_export
    snapshot_fake statically_known_false statically_known_true sym_and sym_eq sym_or symbolic_trace thunkify
    to_torch track_tensor track_tensor_tree unset_fake_temporarily wrap_key wrapper_and_args_for_make_fx
""".split()


def test_exactly_these_names() -> None:
    assert sorted(understudy.__all__) == sorted(NAMES)
    assert len(set(understudy.__all__)) == len(understudy.__all__)


def test_nothing_else_is_public() -> None:
    root = Path(understudy.__file__).parent
    modules = {path.stem for path in root.iterdir()}
    public = {name for name in vars(understudy) if not name.startswith(("_", "@"))}  # "@": pytest's
    assert public - modules - {"annotations", "importlib", "Any"} <= set(NAMES)
    assert {"FakeTensorMode", "make_fx"} <= set(dir(understudy))


def test_the_stub_has_the_same_names_from_the_same_places() -> None:
    """What editors and type checkers see is what is loaded."""
    stub = ast.parse(Path(understudy.__file__).with_suffix(".pyi").read_text())
    seen = {
        alias.name: node.module
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == understudy._HOME_OF
    assert all(
        alias.name == alias.asname
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    )
    (listed,) = (
        node.value for node in stub.body if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"
    )
    assert ast.literal_eval(listed) == understudy.__all__


def test_an_unknown_name() -> None:
    with pytest.raises(AttributeError, match="module 'understudy' has no attribute 'no_such_name'"):
        understudy.no_such_name


@pytest.mark.parametrize("module", ["understudy", "understudy.errors"])
def test_importing_does_not_import_torch(module: str) -> None:
    code = f"import sys, {module}; print('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"


def test_each_says_what_it_is() -> None:
    for name in NAMES:
        thing = getattr(understudy, name)
        assert inspect.getdoc(thing), f"{name} has no docstring"
        if inspect.isclass(thing):
            assert thing.__module__.startswith("understudy"), name


def test_importing_loads_nothing_slow() -> None:
    """torch's own machinery for compiling and decompositions costs seconds to load; only what hands over to torch's
    own tools needs it: the names of `exporting/`."""
    code = (
        "import sys, torch; before = set(sys.modules); import understudy; [getattr(understudy, n) for n in understudy.__all__"
        " if 'exporting' not in understudy._HOME_OF.get(n, '')];"
        "print([m for m in set(sys.modules) - before if m.startswith(('torch._dynamo', 'torch._inductor',"
        " 'torch._decomp', 'torch._refs', 'sympy', 'numpy'))])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]", shown.stdout


def test_version() -> None:
    assert understudy.__version__.count(".") == 2
