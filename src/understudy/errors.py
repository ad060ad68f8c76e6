"""The exceptions of understudy.

    UnderstudyError
    ├── OperatorError (RuntimeError)              an operator call that also fails in eager
    │   ├── ShapeMismatch                         incompatible sizes
    │   ├── DimensionError (IndexError)           a dimension or index out of range
    │   ├── DtypeError (NotImplementedError)      a dtype that the operator does not support
    │   ├── ArgumentError (ValueError)            any other invalid argument
    │   └── FakeTensorDeviceMismatchError         tensors on different devices
    ├── DataDependentOutputException (RuntimeError)   a value of a tensor without data was read
    ├── DynamicOutputShapeException (RuntimeError)    a size depends on data
    ├── GuardOnDataDependentSymNode (RuntimeError)    a branch depends on a data-dependent size
    ├── UnsupportedOperatorException (RuntimeError)   an operator without a rule or fake implementation
    ├── UnsupportedFakeTensorException (RuntimeError) a tensor that can't be converted to a stand-in
    ├── UnsupportedMutationAliasingException (RuntimeError)  a write or alias that is not supported
    ├── MixedTensorsError (RuntimeError, AssertionError)  a real tensor, or a fake of another mode, among fakes
    │   └── UnknownSubclassError (TypeError)      a real tensor of an unknown subclass
    ├── MetaDeviceError (RuntimeError, AssertionError)  a meta tensor in a mode that refuses them
    ├── ContradictoryOptions (ValueError, AssertionError)  options that exclude each other
    ├── UntrackedValueError (RuntimeError)        a value without a node in the graph
    ├── SymbolMismatch (ValueError, AssertionError)   inputs that give a symbol two values
    ├── ConstraintViolationError (RuntimeError, ValueError)  a run that violates a constraint on a dimension
    ├── PendingUnbackedSymbolNotFound (RuntimeError, ValueError)  a new symbol that is missing from the result
    ├── GuardsFrozen (RuntimeError)               a new guard while guards are frozen
    ├── MetadataMismatchError (RuntimeError)      a cross-check found two different answers
    ├── ModeOrderError (RuntimeError)             modes are left in the wrong order
    ├── NotProvidedError (NotImplementedError)    a name of a torch mechanism that understudy does not have
    └── NoDataError (RuntimeError)                a data pointer, a numpy array, … of a tensor without data

Inner code raises these with one short sentence. The boundary (`FakeTensorMode`) adds the operator, the specs, the
line of the user's code, and a hint, once.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Context:
    """The context of an error, added at the boundary. `evaluating` is a condition or size, if no operator was
    called."""

    op: str = ""
    inputs: str = ""
    line: str = ""
    hint: str = ""
    evaluating: str = ""

    def lines(self) -> list[str]:
        shown = []
        if self.evaluating:
            shown.append(f"  while evaluating: {self.evaluating}")
        if self.op:
            shown.append(f"  called:  {self.op}({self.inputs})")
        if self.line:
            shown.append(f"  at:      {self.line}")
        if self.hint:
            shown.append(f"  to do:   {self.hint}")
        return shown


@dataclass
class _Facts:
    reason: str
    func: Any = None
    context: Context = field(default_factory=Context)


class UnderstudyError(Exception):
    """Base of all errors: `reason` is the sentence, `context` the place, `func` the operator."""

    def __init__(self, reason: object = "", *, func: object = None, context: Context | None = None) -> None:
        if func is None and not isinstance(reason, str):
            # torch's exceptions of these names take the operator as their only argument.
            func, reason = reason, str(reason)
        if WITHOUT_TORCH_BASE:
            adopt_torch_bases()
        Exception.__init__(self, reason)  # torch's classes of these names have constructors of their own
        self._facts = _Facts(str(reason), func, context or Context())

    # Some of torch's classes of these names are dataclasses, which can't be hashed.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @property
    def reason(self) -> str:
        return self._facts.reason

    @property
    def func(self) -> Any:
        return self._facts.func

    @property
    def context(self) -> Context:
        return self._facts.context

    def with_context(self, context: Context, func: object = None) -> UnderstudyError:
        """Add the context, unless an inner boundary has added it already."""
        if not (self._facts.context.op or self._facts.context.evaluating):
            self._facts.context = context
        if self._facts.func is None:
            self._facts.func = func
        return self

    def __str__(self) -> str:
        return "\n".join([self.reason, *self.context.lines()])


class OperatorError(UnderstudyError, RuntimeError):
    """An operator call that also fails in eager."""


class ShapeMismatch(OperatorError):
    """Incompatible sizes."""


class DimensionError(OperatorError, IndexError):
    """A dimension or an index out of range."""


class DtypeError(OperatorError, NotImplementedError):
    """A dtype that the operator does not support; in eager, often a missing kernel."""


class ArgumentError(OperatorError, ValueError):
    """An argument that the operator does not accept."""


class FakeTensorDeviceMismatchError(OperatorError):
    """Tensors on devices that do not match; `devices` are these, if known."""

    devices: tuple[object, ...] = ()


class DataDependentOutputException(UnderstudyError, RuntimeError):
    """A value of a tensor without data was read."""


class DynamicOutputShapeException(UnderstudyError, RuntimeError):
    """The size of a result depends on data."""


class GuardOnDataDependentSymNode(UnderstudyError, RuntimeError):
    """A branch depends on an unbacked symbol. `cond` is the condition."""

    cond: Any = None


class UnsupportedOperatorException(UnderstudyError, RuntimeError):
    """The operator has neither a rule nor a fake implementation."""


class UnsupportedFakeTensorException(UnderstudyError, RuntimeError):
    """A tensor that can't be converted to a stand-in."""


class UnsupportedMutationAliasingException(UnderstudyError, RuntimeError):
    """An operator that writes or aliases in an unsupported way."""


class MixedTensorsError(UnderstudyError, RuntimeError, AssertionError):
    """A real tensor, or a fake of another mode, where fakes of this mode were expected.

    An `AssertionError` too, because that is what torch's mode raises.
    """


class UnknownSubclassError(MixedTensorsError, TypeError):
    """As above, for an unknown subclass: a `TypeError` too, because that is how dispatch fails in torch."""


class MetaDeviceError(UnderstudyError, RuntimeError, AssertionError):
    """A tensor on the meta device, in a mode that refuses them. An `AssertionError` too, because that is what torch's mode
    raises."""


class ContradictoryOptions(UnderstudyError, ValueError, AssertionError):
    """Two options that exclude each other. Also an `AssertionError`, because torch's mode raises one."""


class UntrackedValueError(UnderstudyError, RuntimeError):
    """A value without a node in the graph that is being recorded."""


class SymbolMismatch(UnderstudyError, RuntimeError, ValueError, AssertionError):
    """Inputs that give a symbol two values. An `AssertionError` too, because that is what torch's environment raises."""


class ConstraintViolationError(UnderstudyError, RuntimeError, ValueError):
    """A constraint on a dimension of an input (to stay dynamic, to lie in a range) is violated."""


class PendingUnbackedSymbolNotFound(UnderstudyError, RuntimeError, ValueError):
    """A new unbacked symbol is not in the result: nothing would define it when the program runs."""


class GuardsFrozen(UnderstudyError, RuntimeError):
    """A new guard was needed where none is allowed."""


class MetadataMismatchError(UnderstudyError, RuntimeError):
    """A cross-check found two different answers."""


class NoDataError(UnderstudyError, RuntimeError):
    """An operation that needs data was called on a tensor without data."""


class ModeOrderError(UnderstudyError, RuntimeError):
    """A mode other than the innermost one of its thread is left."""


class NotProvidedError(UnderstudyError, NotImplementedError):
    """A name of a torch mechanism that understudy does not have was used."""


# --- torch's classes of the same names ----------------------------------------------------------------------------------

FAKE_TENSOR, SYMBOLIC_SHAPES = "torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes"
WITHOUT_TORCH_BASE: dict[type[UnderstudyError], tuple[str, str]] = {
    DataDependentOutputException: (FAKE_TENSOR, "DataDependentOutputException"),
    DynamicOutputShapeException: (FAKE_TENSOR, "DynamicOutputShapeException"),
    FakeTensorDeviceMismatchError: (FAKE_TENSOR, "FakeTensorDeviceMismatchError"),
    MetadataMismatchError: (FAKE_TENSOR, "MetadataMismatchError"),
    UnsupportedFakeTensorException: (FAKE_TENSOR, "UnsupportedFakeTensorException"),
    UnsupportedMutationAliasingException: (FAKE_TENSOR, "UnsupportedMutationAliasingException"),
    UnsupportedOperatorException: (FAKE_TENSOR, "UnsupportedOperatorException"),
    ConstraintViolationError: (SYMBOLIC_SHAPES, "ConstraintViolationError"),
    GuardOnDataDependentSymNode: (SYMBOLIC_SHAPES, "GuardOnDataDependentSymNode"),
    GuardsFrozen: (SYMBOLIC_SHAPES, "_ShapeEnvGuardError"),
    PendingUnbackedSymbolNotFound: (SYMBOLIC_SHAPES, "PendingUnbackedSymbolNotFound"),
}
"""Exceptions that code around torch catches under the names of torch's own classes, and where these are; without those
whose module was found loaded."""


def adopt_torch_bases() -> None:
    """Make torch's classes of the same names bases of ours, as far as they are loaded: `except` checks real bases. Code
    that names one of them has loaded its module; other code does not need it."""
    for ours, (module, name) in list(WITHOUT_TORCH_BASE.items()):
        theirs = getattr(sys.modules.get(module), name, None)
        if theirs is not None:
            del WITHOUT_TORCH_BASE[ours]
            others = (base for base in ours.__bases__ if not issubclass(theirs, base))
            ours.__bases__ = (*others, theirs)


class NotProvided(type):
    """The metaclass of such names. Their docstring names the alternative.

    They can be imported, and used in `isinstance` and in annotations; calling, subclassing or assigning to one raises
    an error with its docstring.
    """

    def __init__(cls, name: str, bases: tuple[Any, ...], namespace: dict[str, object]) -> None:
        if bases:
            raise bases[0].use()
        super().__init__(name, bases, namespace)

    def __call__(cls, *args: object, **kwargs: object) -> Any:
        raise cls.use()

    def __setattr__(cls, name: str, value: object) -> None:
        raise cls.use()

    def use(cls) -> NotProvidedError:
        """The error that any use of the name raises."""
        return NotProvidedError(f"understudy has no {cls.__name__}. {' '.join((cls.__doc__ or '').split())}")
