"""The random state of the process, its default dtype, and generators that a program makes, as nodes.

torch.get_rng_state, set_rng_state, manual_seed    become nodes: a checkpointed region that is run again puts the
                                                   generator's state back first, to draw the same numbers twice
torch.set_default_dtype                            becomes a node: factories without dtype depend on it
torch.Generator()                                  is made by each run of the graph, as by each run of the program

No mode sees these calls, so the functions are replaced while a program is traced. Each tracing room registers a function
that finds its tracer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch.fx import Node
from torch.fx.node import has_side_effect

from understudy import _torch
from understudy.patching import RECORDING, TRACING, patch, patch_call

Function = Callable[..., object]


class KeptRandomState:
    """The random state of the process, and its default dtype, before a trace on stand-ins has changed them."""

    def __init__(self) -> None:
        self._kept: tuple[torch.Tensor, torch.dtype] | None = None

    def keep(self) -> None:
        if self._kept is None:
            self._kept = torch_get_rng_state(), torch.get_default_dtype()

    def restore(self) -> None:
        """Called at the end of a trace."""
        if self._kept is not None:
            state, dtype = self._kept
            with _torch.no_modes():
                torch_set_rng_state(state)
                torch_set_default_dtype(dtype)
            self._kept = None


class StateTracer(Protocol):
    """What a tracer of either kind does with these calls."""

    generators: dict[int, tuple[torch.Generator, Node]]
    """The generators that the program has made, with their nodes."""
    random_state: KeptRandomState | None
    """None if the operators really run: the program has then changed the random state."""

    def record_state(
        self, kind: str, target: Any, args: Any, kwargs: Any, result: object
    ) -> tuple[Node, Any]:
        """Add a call; returns its node, and the result as the program gets it."""


Find = TypeVar("Find", bound=Callable[[], StateTracer | None])
_finders: list[Callable[[], StateTracer | None]] = []


def register_tracer_finder(find: Find) -> Find:
    """Decorator of a function that returns the active tracer of this thread."""
    _finders.append(find)
    return find


def active_tracer() -> StateTracer | None:
    return next((tracer for find in _finders if (tracer := find()) is not None), None)


STATES = torch_get_rng_state, torch_set_rng_state, torch_manual_seed = (
    torch.get_rng_state, torch.set_rng_state, torch.manual_seed,
)  # fmt: skip
torch_set_default_dtype = torch.set_default_dtype
CHANGES_OF_GENERATOR = frozenset({torch_set_rng_state, torch_manual_seed})
SIDE_EFFECTS: tuple[Any, ...] = (torch_set_rng_state, torch_manual_seed, torch_set_default_dtype)
for change in SIDE_EFFECTS:
    has_side_effect(change)  # passes of torch.fx would remove these calls, because nothing uses their results
TARGETS: dict[str, Function] = {
    function.__name__: function for function in (*STATES, torch_set_default_dtype)
}
"""The functions that nodes call."""


@patch_call(
    "torch.get_rng_state", "torch.random.get_rng_state", "torch.set_rng_state", "torch.random.set_rng_state",
    "torch.manual_seed", "torch.random.manual_seed", "torch.set_default_dtype", during=(RECORDING, TRACING),
)  # fmt: skip
def record_changes_of_state(original: Callable[..., object], *args: object, **kwargs: Any) -> Any:
    """The call is a node of the graph: operators that are recorded after it depend on it."""
    tracer = active_tracer()
    if tracer is None:  # a checkpoint may put back the state of a program while a call of it is tried out
        return None if _has_values_of_trace(args) else original(*args, **kwargs)
    target = TARGETS[original.__name__]
    result: object = None
    with _torch.no_modes():
        if tracer.random_state is not None and target in SIDE_EFFECTS:
            tracer.random_state.keep()
        if not _has_values_of_trace(args):
            result = original(*args, **kwargs)
    return tracer.record_state("call_function", target, args, kwargs, result)[1]


def _has_values_of_trace(args: tuple[object, ...]) -> bool:
    """Whether a state is one without data: then the call is only recorded."""
    return any(hasattr(value, "node") or _torch.is_stand_in(value) for value in args)


# --- Random generators that a program makes itself: `torch.Generator().manual_seed(0)` ----------------------
# During a trace a generator is of a subclass that records the calls of its methods.

NATIVE = torch.Generator


class GeneratorType(type(NATIVE)):  # type: ignore[misc]
    """Every generator is an instance: programs check `isinstance(x, torch.Generator)`."""

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, NATIVE)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        tracer = active_tracer()
        if tracer is None:
            return NATIVE(*args, **kwargs)
        generator = super().__call__(*args, **kwargs)
        node, _ = tracer.record_state("call_function", NATIVE, (), {"device": generator.device}, None)
        tracer.generators[_torch.generator_id(generator)] = generator, node
        return generator


class RecordedGenerator(NATIVE, metaclass=GeneratorType):
    """A generator that was made in a trace."""

    def manual_seed(self, seed: int) -> RecordedGenerator:
        return self._change("manual_seed", seed)

    def seed(self) -> int:
        number: int = self._call_recorded("seed")[1]
        return number

    def set_state(self, new_state: torch.Tensor) -> RecordedGenerator:
        return self._change("set_state", new_state)

    def get_state(self) -> torch.Tensor:
        state: torch.Tensor = self._call_recorded("get_state")[1]
        return state

    def clone_state(self) -> NATIVE:
        """Another generator, in the same state: it is recorded in these steps."""
        made: NATIVE = RecordedGenerator(self.device)
        return made.set_state(self.get_state())

    def _change(self, method: str, argument: object) -> RecordedGenerator:
        """Call a method that returns the generator: its node is the generator's from now on, so that what draws from
        the generator uses the call, and no pass removes it."""
        node, _ = self._call_recorded(method, argument)
        tracer = active_tracer()
        if node is not None and tracer is not None:
            tracer.generators[_torch.generator_id(self)] = self, node
        return self

    def _call_recorded(self, method: str, *args: Any) -> tuple[Node | None, Any]:
        tracer = active_tracer()
        if tracer is not None and node_of_generator(self, tracer) is None:
            tracer = None
        result: Any = self
        if tracer is None or not _has_values_of_trace(args):
            with _torch.no_modes():
                result = getattr(NATIVE, method)(self, *args)
        if tracer is None:
            return None, result
        return tracer.record_state("call_method", method, (self, *args), {}, result)


def node_of_generator(generator: Any, tracer: StateTracer) -> Node | None:
    """The node of a generator; None if it was made before the trace. C++ may wrap the same state in another object."""
    return tracer.generators.get(_torch.generator_id(generator), (None, None))[1]


@patch("torch.Generator", "torch._C.Generator", during=(RECORDING, TRACING))
def record_generators(original: Any) -> Callable[..., Any]:
    """A generator that the program makes is made by the graph, too."""
    return RecordedGenerator
