"""The public names: exactly these, each documented, and nothing of theirs loaded that is not needed."""

from __future__ import annotations

import inspect
import subprocess
import sys

import understudy

NAMES = """
    DataDependentOutputException Dim DispatchCacheInfo DynamicOutputShapeException FakeCopyMode FakeTensor
    FakeTensorConverter FakeTensorDeviceMismatchError FakeTensorMode FakeTensorProp GuardOnDataDependentSymNode KeyPath
    MetadataMismatchError MixedTensorsError New NoDataError OperatorError PropagationError Same Settings ShapeEnv
    TensorMetadata TensorSpec UnderstudyError UnsupportedFakeTensorException
    UnsupportedMutationAliasingException UnsupportedOperatorException Value View bind_symbols
    compute_unbacked_bindings dims eval_guards extract_tensor_metadata free_symbols free_unbacked_symbols
    get_plain_tensors guard_or_false guard_or_true has_free_symbols has_free_unbacked_symbols is_fake
    mark_pure maybe_get_fake_mode rebind_unbacked resolve_unbacked_bindings rule statically_known_false
    statically_known_true unset_fake_temporarily
""".split()


def test_exactly_these_names() -> None:
    assert sorted(understudy.__all__) == sorted(NAMES)
    assert len(set(understudy.__all__)) == len(understudy.__all__)


def test_nothing_else_is_public() -> None:
    modules = {"errors", "fake", "infer", "lines", "rules", "shapes", "spec", "trace"}
    public = {name for name in vars(understudy) if not name.startswith("_")}
    assert public - modules == set(NAMES)


def test_each_says_what_it_is() -> None:
    for name in NAMES:
        thing = getattr(understudy, name)
        assert inspect.getdoc(thing), f"{name} has no docstring"
        if inspect.isclass(thing):
            assert thing.__module__.startswith("understudy"), name


def test_importing_loads_nothing_slow() -> None:
    """torch's own machinery for compiling and decompositions costs seconds to load."""
    code = (
        "import sys, torch; before = set(sys.modules); import understudy;"
        "print([m for m in set(sys.modules) - before if m.startswith(('torch._dynamo', 'torch._inductor',"
        " 'torch._decomp', 'torch._refs', 'sympy', 'numpy'))])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]", shown.stdout


def test_version() -> None:
    assert understudy.__version__.count(".") == 2
