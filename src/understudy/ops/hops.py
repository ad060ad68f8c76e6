"""Higher-order operators: one record for each, with a field for each thing that a package needs.

    functions, operands   how the operator is called: which arguments are functions, which list takes further operands
    run                   the operator as plain code, where nothing records the program            (fake)
    examples, result      example operands for its functions; its results, from what these return         (capture)
    backward              its gradients, as calls of the same operator                             (capture)
    keep_for_backward     the operator, also returning what its backward pass needs                (capture)

A package fills in a field with a decorator: `@run("cond")`. A second function for the same field is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from understudy._torch import HigherOrderOperator
from understudy.ops.registry import Registered

Function = Callable[..., Any]


def _raise_missing(*args: object) -> Any:
    raise NotImplementedError(
        "a higher-order operator that records its functions as graphs needs `examples` and `result`"
    )


@dataclass(slots=True)
class HigherOrder:
    """The record of one higher-order operator."""

    name: str
    functions: tuple[tuple[int, str], ...] = ()
    """For each function: its position among the arguments, and the name of its graph as a submodule. The function that
    returns the results comes last."""
    operands: int = -1
    """Position of the list of operands to which captured tensors are added."""
    may_write: bool = False
    """Whether its functions may write to their operands where no gradients are recorded."""
    returns_single_value: tuple[int, ...] = ()
    """Positions of the functions that return a single value, not a list."""
    run: Function | None = None
    examples: Function = _raise_missing
    result: Function = _raise_missing
    backward: Function | None = None
    keep_for_backward: Function | None = None

    @property
    def takes_functions(self) -> bool:
        """Whether its functions become graphs of their own in a capture."""
        return bool(self.functions)


_records: dict[str, HigherOrder] = {}
_EMPTY_RECORD = HigherOrder("")


def higher_order(op: HigherOrderOperator) -> HigherOrder:
    """The record of an operator; an empty one if it is not known."""
    return _records.get(op.name(), _EMPTY_RECORD)


def _field(name: str) -> Callable[..., Callable[[Registered], Registered]]:
    """A decorator that sets this field in the records of the named operators."""

    def fill(*operators: str) -> Callable[[Registered], Registered]:
        def register(function: Registered) -> Registered:
            for operator in operators:
                record = _records.setdefault(operator, HigherOrder(operator))
                if getattr(record, name) not in (None, _raise_missing):
                    raise ValueError(f"{name} of {operator} is already registered: {getattr(record, name)!r}")
                setattr(record, name, function)
            return function

        return register

    return fill


run = _field("run")
examples = _field("examples")
result = _field("result")
backward = _field("backward")
keep_for_backward = _field("keep_for_backward")

_LOOP = ((0, "while_loop_cond_graph"), (1, "while_loop_body_graph"))
for _record in (
    HigherOrder("cond", ((1, "true_graph"), (2, "false_graph")), 3, may_write=True),
    HigherOrder("while_loop", _LOOP, 3, may_write=True, returns_single_value=(0,)),
    HigherOrder("while_loop_stack_output", _LOOP, 3, returns_single_value=(0,)),
    HigherOrder("scan", ((0, "scan_combine_graph"),), 3),
    HigherOrder("map_impl", ((0, "body_graph"),), 2),
    HigherOrder("associative_scan", ((0, "associative_scan_combine_graph"),), 2),
):
    _records[_record.name] = _record
