"""Random generators that a program makes itself: `torch.Generator().manual_seed(0)`.

Each run of the graph makes its own, as each run of the program does. Nothing tells of calls of a generator's methods, so
one that is made while a trace runs is of a class that says what was done to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from understudy import _torch
from understudy._torch import while_active
from understudy.trace.node_meta import set_val
from understudy.trace.untold import active_tracer

if TYPE_CHECKING:
    from understudy.trace.tracer import PythonKeyTracer

NATIVE = torch.Generator


class Kind(type(NATIVE)):  # type: ignore[misc]
    """Whatever is a generator is one of these, too: programs ask by the name under which they found the class."""

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, NATIVE)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        tracer = active_tracer()
        if tracer is None:
            return NATIVE(*args, **kwargs)
        generator = super().__call__(*args, **kwargs)
        node = tracer.append_call(NATIVE, (), {"device": generator.device}, "generator")
        node.meta["val"] = None
        tracer.generators[_torch.generator_id(generator)] = generator, node
        return generator


class Recorded(NATIVE, metaclass=Kind):
    """A generator that was made in a trace."""

    def manual_seed(self, seed: int) -> Recorded:
        self._told("manual_seed", seed)
        return self

    def seed(self) -> int:
        number: int = self._told("seed")
        return number

    def set_state(self, new_state: torch.Tensor) -> Recorded:
        self._told("set_state", new_state)
        return self

    def get_state(self) -> torch.Tensor:
        state: torch.Tensor = self._told("get_state")
        return state

    def _told(self, method: str, *args: Any) -> Any:
        tracer = active_tracer()
        source = None if tracer is None else made_by(self, tracer)
        given = () if source is None else tracer.argument(args)
        with _torch.no_modes():
            result = getattr(NATIVE, method)(self, *args)
        if source is not None:
            node = tracer.create_node("call_method", method, (source, *given), {})
            node.meta["val"] = None
            if isinstance(result, torch.Tensor):
                set_val(node, result)
                tracer.remember(result, node)
        return result


def made_by(generator: Any, tracer: PythonKeyTracer) -> Node | None:
    """The node that makes a generator; None if it was there before. C++ hands on others around the same state."""
    return tracer.generators.get(_torch.generator_id(generator), (None, None))[1]


@while_active("torch.Generator")
@while_active("torch._C.Generator")
def recorded_class(original: Any) -> Callable[..., Any]:
    return Recorded
