"""Tensors from the closure of a branch.

The functions of a higher-order operator become subgraphs, and autograd and the transforms of torch.func see only their
operands. So a tensor of the surrounding program that a branch uses has to become an operand. To find these tensors,
each branch is run once without recording, and every call of a torch function in it is inspected. When the branch is
recorded, the operand replaces the tensor in the same calls.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CellType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch

from understudy import _torch
from understudy.errors import Context, UnsupportedMutationAliasingException
from understudy.fake.higher_order import describe_value
from understudy.fake.tensor import FakeTensor
from understudy.lines import user_line
from understudy.ops.hops import HigherOrder, higher_order
from understudy.shapes.bindings import values_in
from understudy.shapes.node import SymNode
from understudy.spec.call import flat, map_structure

if TYPE_CHECKING:
    from understudy.capture.make_fx import Capture

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
NUMBERS = frozenset({bool, int, float, complex})
Function = Callable[..., Any]
Table = dict[str, Any]


class BranchMode(_torch.FunctionMode):
    """A function mode for the calls in a branch, and in nested branches."""

    def wrap_inner_function(self, function: object) -> Any:
        """Wrap a function of a nested higher-order operator, so that this mode sees its calls as well."""
        if not callable(function) or isinstance(function, (torch.nn.Module, torch.Tensor)):
            return function

        def inside(*args: object) -> Any:
            with self:
                return function(*args)

        return inside


class ClosureFinder(BranchMode):
    """Collects the tensors and numbers that a branch uses besides its operands."""

    def __init__(self, capture: Capture, operands: Sequence[Any]) -> None:
        super().__init__()
        self._capture = capture
        self._given = {id(inner): inner for inner in map(_torch.innermost, operands)}
        self.tensors: dict[int, torch.Tensor] = {}
        self.numbers: dict[SymNode, None] = {}

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.inspect_values((args, *kwargs.values()))
        form = higher_order(func) if isinstance(func, _torch.HigherOrderOperator) else None
        if form is None or not form.takes_functions:
            return func(*args, **kwargs)
        return run_once(self._capture.stand_ins, form, tuple(map(self.wrap_inner_function, args)))[0]

    def inspect_values(self, values: object) -> None:
        for value in _torch.tree_flatten(values)[0]:
            if isinstance(value, torch.Tensor):
                inner = _torch.innermost(value)
                if id(inner) not in self._given and is_outside(inner, self._capture):
                    self.tensors.setdefault(id(value), value)
            elif isinstance(value, SYMBOLIC) and type(value.node) is SymNode:
                self.numbers.setdefault(value.node)


def run_once(mode: Any, form: HigherOrder, args: tuple[Any, ...]) -> tuple[Any, list[Any]]:
    """Run each function of a higher-order operator once on example operands; returns the operator's result."""
    with mode:
        examples = form.examples(mode, args)
        outputs = [args[position](*examples) for position, _ in form.functions]
        leaves: list[Sequence[Any]] = [_torch.tree_flatten(output)[0] for output in outputs]
        result = form.result(mode, args, leaves)
    return _torch.tree_unflatten(list(result), _torch.tree_flatten(outputs[-1])[1]), outputs


def is_outside(tensor: object, capture: Capture) -> bool:
    """Whether this tensor was made by the surrounding program, not by the run of the branch."""
    if type(tensor) is not FakeTensor or tensor.fake_mode is not capture.stand_ins:
        return True
    around: Capture | None = capture
    while around is not None:
        if around.tracer.find_node(tensor) is not None or around.tracer.constants.contains(tensor):
            return True
        around = around.outer
    return False


def copy_operand(value: object) -> Any:
    """Another tensor object for an operand: the branch may also refer to the operand through its closure."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return value
    # Functionalisation propagates writes through a view to its base.
    is_wrapper = _torch.is_functional_wrapper(type(value)) or _torch.unwrap(value) is not None
    return value.clone() if is_wrapper else value.view_as(value)


def interpret_graph(function: object) -> Any:
    """Run a graph module node by node, if the metadata of its nodes has to be preserved."""
    if isinstance(function, torch.fx.GraphModule) and torch.fx.traceback.has_preserved_node_meta():
        return torch.fx.Interpreter(function).run
    return function


class ClosureReplacer(BranchMode):
    """Replaces tensors from the closure of a branch by operands."""

    def __init__(self, tensors: Sequence[torch.Tensor], operands: Sequence[Any]) -> None:
        super().__init__()
        self._operands = {id(tensor): operand for tensor, operand in zip(tensors, operands, strict=True)}
        self._numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
        self.calls: list[tuple[Any, list[object]]] = []
        """Each function that was called, with the numbers and the tensors of the closure that it was given."""

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, list(map(self._describe, _torch.tree_flatten((args, kwargs))[0]))))
        args, kwargs = self.replace_in((args, kwargs or {}))
        if isinstance(func, _torch.HigherOrderOperator):
            args = tuple(map(self.wrap_inner_function, args))
        return func(*args, **kwargs)

    def _describe(self, value: object) -> object:
        if isinstance(value, torch.Tensor):
            return f"tensor {self._numbers[id(value)]} from outside" if id(value) in self._numbers else None
        return value if type(value) in NUMBERS else None

    def replace_in(self, values: object) -> Any:
        if not any(id(tensor) in self._operands for tensor in flat(torch.Tensor, (values,), {})):
            return values
        return map_structure(lambda tensor: self._operands.get(id(tensor), tensor), torch.Tensor, values)


class FrozenFunction:
    """A function as it is when the operator is called.

    A backward pass calls it again, later: when a loop has gone on, a variable has another value, or `functional_call` has
    given a module its own parameters back. So the copy that is called keeps the variables of its closure, and the tensors
    of the modules among them. What else it reads (attributes, contents of lists) is not kept: `Branch` compares the calls.
    """

    def __init__(self, function: Function) -> None:
        self._modules: dict[int, torch.nn.Module] = {}
        self._copies: dict[int, Any] = {}
        self.function = self._freeze(function)
        self._tables: list[tuple[Table, Table]] = [
            (table, table.copy())
            for module in self._modules.values() for table in (module._parameters, module._buffers)
        ]  # fmt: skip

    def __call__(self, *args: object) -> Any:
        with self._with_tensors():
            return self.function(*args)

    def _freeze(self, value: Any) -> Any:
        """A copy of a function with its own variables; other values are not copied."""
        if id(value) in self._copies:
            return self._copies[id(value)]
        kind = type(value)
        if isinstance(value, torch.nn.Module):
            self._modules.update((id(module), module) for module in value.modules())
        elif kind is MethodType:
            self._freeze(value.__self__)
        elif kind is functools.partial:
            keywords = {name: self._freeze(given) for name, given in value.keywords.items()}
            return functools.partial(self._freeze(value.func), *map(self._freeze, value.args), **keywords)
        elif kind is FunctionType and value.__closure__:
            return self._freeze_closure(value)
        return value

    def _freeze_closure(self, function: Any) -> Any:
        cells = tuple([CellType() for _ in function.__closure__])
        code, names = function.__code__, (function.__globals__, function.__name__, function.__defaults__)
        copied: Any = FunctionType(code, *names, cells)
        self._copies[id(function)] = copied  # a function may call itself
        copied.__kwdefaults__ = function.__kwdefaults__
        copied.__dict__.update(function.__dict__)
        copied.__qualname__, copied.__module__ = function.__qualname__, function.__module__
        for cell, original in zip(cells, function.__closure__, strict=True):
            try:
                value = original.cell_contents
            except ValueError:  # a variable that is assigned later, or never
                continue
            cell.cell_contents = self._freeze(value)
        return copied

    @contextmanager
    def _with_tensors(self) -> Iterator[None]:
        """Inside, the modules have the tensors that they had before."""
        changed = [
            (table, before, table.copy()) for table, before in self._tables if not _are_same(table, before)
        ]
        try:
            for table, before, _ in changed:
                _fill(table, before)
            yield
        finally:
            for table, _, now in changed:
                _fill(table, now)


def _are_same(table: Table, other: Table) -> bool:
    return len(table) == len(other) and all(value is other.get(name) for name, value in table.items())


def _fill(table: Table, values: Table) -> None:
    table.clear()
    table.update(values)


class Branch:
    """A function of a higher-order operator, with flat operands (including its closure) and a flat tuple of results."""

    def __init__(
        self, function: Callable[..., object], given: int, in_spec: Any, tensors: Sequence[torch.Tensor],
        may_write: bool = False, is_bare: bool = False,
    ) -> None:  # fmt: skip
        self._function = FrozenFunction(interpret_graph(function))
        self._first_run: tuple[list[Any], list[tuple[Any, list[object]]]] | None = None
        self._given = given
        self._in_spec = in_spec
        self._tensors = tuple(tensors)
        self.may_write = may_write
        self._is_bare = is_bare
        self.__name__ = getattr(function, "__name__", type(function).__name__)

    def __call__(self, *operands: Any) -> Any:
        count = self._given + self._in_spec.num_leaves
        args = unflatten_operands(operands[:count], self._given, self._in_spec)
        lifted = operands[count : count + len(self._tensors)]
        mode = ClosureReplacer(self._tensors, lifted)
        with mode:
            result = self._function(*args)
        self._check_calls(
            [tuple(x.shape) if isinstance(x, torch.Tensor) else None for x in operands], mode.calls
        )
        leaves = mode.replace_in(_torch.tree_flatten(result)[0])
        self._check_gradients(leaves, operands)
        return leaves[0] if self._is_bare else tuple(leaves)

    def _check_calls(self, shapes: list[Any], calls: list[tuple[Any, list[object]]]) -> None:
        """Raise if the same functions were given other numbers, or other tensors from outside, than in the first run: a
        gradient would be that of another function."""
        if self._first_run is None:
            self._first_run = shapes, calls
            return
        first_shapes, first_calls = self._first_run
        if first_shapes != shapes or [func for func, _ in first_calls] != [func for func, _ in calls]:
            return  # other sizes, or other paths where gradients are recorded
        for (func, before), (_, now) in zip(first_calls, calls, strict=True):
            if before != now:
                name = getattr(func, "__name__", str(func))
                raise UnsupportedMutationAliasingException(
                    f"{self.__name__} is called again for its gradient, but passes {name} different numbers or tensors from "
                    f"outside: {_first_difference(before, now)}",
                    context=Context(
                        line=user_line(),
                        hint="it reads a value that has changed, such as an attribute or the items of a list: pass it "
                        "to the higher-order operator as an operand, or assign it to a variable first",
                    ),
                )

    def _check_gradients(self, results: Sequence[object], operands: Sequence[object]) -> None:
        """Raise if a closure tensor is passed to an `autograd.Function`: function modes do not see that call, so it is
        not replaced."""
        given = {id(_source_of(value)) for value in operands if isinstance(value, torch.Tensor)}
        outside = {
            id(_source_of(tensor)): tensor
            for tensor in self._tensors
            if tensor.requires_grad and id(_source_of(tensor)) not in given
        }
        if not outside or not torch.is_grad_enabled():
            return
        for source in _sources_of(results, operands):
            if id(source) in outside:
                shown = describe_value(outside[id(source)])
                raise UnsupportedMutationAliasingException(
                    f"{self.__name__} passes {shown}, a tensor from outside, to an autograd.Function: its gradient "
                    "would be lost",
                    context=Context(
                        line=user_line(), hint="pass it to the higher-order operator as an operand"
                    ),
                )


def _first_difference(before: list[object], now: list[object]) -> str:
    if len(before) != len(now):
        return f"{len(now)} arguments, not {len(before)}"
    found = next(pair for pair in zip(before, now, strict=True) if pair[0] != pair[1])
    return " became ".join("another tensor" if value is None else str(value) for value in found)


def _source_of(tensor: torch.Tensor) -> Any:
    """The autograd node that made a tensor, or the tensor itself if it is a leaf."""
    return tensor if tensor.grad_fn is None else tensor.grad_fn


def _sources_of(results: Sequence[object], operands: Sequence[object]) -> Iterator[Any]:
    """The autograd sources of these results, up to the operands."""
    tensors = [value for value in results if isinstance(value, torch.Tensor)]
    seen = {id(value.grad_fn) for value in operands if isinstance(value, torch.Tensor)}
    todo: list[Any] = [value.grad_fn for value in tensors]
    while todo:
        node = todo.pop()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        yield getattr(node, "variable", None)
        todo.extend(following for following, _ in node.next_functions)


def unflatten_operands(operands: Sequence[object], given: int, in_spec: Any) -> tuple[Any, ...]:
    """The first `given` operands flat, and the rest in their original structure."""
    return (*operands[:given], *_torch.tree_unflatten(list(operands[given:]), in_spec))


class DerivedFunction:
    """A function that a transform derived from the functions of a higher-order operator: it has no closure tensors."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.__name__ = name
        self._function = function

    def __call__(self, *operands: object) -> Any:
        return self._function(*operands)


def is_closed(function: object) -> bool:
    """Whether a function is known to have no closure tensors."""
    return isinstance(function, (Branch, DerivedFunction, torch.fx.GraphModule))


def unbound_numbers(numbers: Sequence[SymNode], tensors: Sequence[object]) -> list[torch.SymInt]:
    """The symbols in these numbers, and in the metadata of these operands, that can't be read from an operand."""
    readable: set[Any] = set()
    wanted: dict[Any, SymNode] = {}
    nodes = [node for value in tensors for node, _ in values_in(_torch.innermost(value))]
    for node in nodes:
        if getattr(node.value, "is_symbol", False):
            readable.add(node.value)
    for node in (*numbers, *nodes):
        for symbol in sorted(getattr(node.value, "symbols", ()), key=str):
            wanted.setdefault(symbol, node)
    return [
        node.shape_env.node(symbol, int).symbolic for symbol, node in wanted.items() if symbol not in readable
    ]


# --- flex attention: closure tensors of `score_mod` and `mask_mod` become its buffers ------------------------

SCORE, BLOCK_MASK, SCORE_BUFFERS = 3, 4, 7
INDICES = 4
"""Batch, head, query and key: the arguments of both functions."""


def prepare_flex(capture: Capture, op: Any, args: Any, kwargs: Any) -> Any:
    score, mask = args[SCORE], args[BLOCK_MASK][-1]
    if is_closed(score) and is_closed(mask):
        return NotImplemented
    args = list(args)
    buffers = [*args[SCORE_BUFFERS:], (), ()][:2]
    query = args[0]
    with _torch.without_recorder(), capture.stand_ins:
        indices = [torch.zeros((), dtype=torch.int, device=query.device) for _ in range(INDICES)]
        first = torch.zeros((), dtype=query.dtype, device=query.device)
    args[SCORE], score_buffers = _lift_buffers(capture, score, [first, *indices], buffers[0])
    mask, mask_buffers = _lift_buffers(capture, mask, indices, buffers[1])
    args[BLOCK_MASK] = (*args[BLOCK_MASK][:-1], mask)
    return op(*args[:SCORE_BUFFERS], score_buffers, mask_buffers, **kwargs)


def _lift_buffers(
    capture: Capture, function: Callable[..., object], examples: list[Any], buffers: Any
) -> tuple[Any, tuple[Any, ...]]:
    if is_closed(function):
        return function, tuple(buffers)
    call = [*examples, *buffers]
    rehearsal = ClosureFinder(capture, call)
    with _torch.without_recorder(), capture.stand_ins, _torch.indexing_by_tensors(), rehearsal:
        rehearsal.inspect_values(function(*call))
    tensors = list(rehearsal.tensors.values())
    numbers = unbound_numbers(list(rehearsal.numbers), [*call, *tensors])
    in_spec = _torch.tree_flatten(tuple(buffers))[1]
    branch = Branch(function, len(examples), in_spec, tensors, is_bare=True)
    return branch, (*buffers, *tensors, *numbers)
