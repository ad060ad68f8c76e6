"""One case captured by `make_fx`, and the graph held against the program that it was captured from.

eager      the program, on copies of the sample's tensors
graph      what make_fx captured, on other copies: the same results to the bit, the same sharing of memory,
           the same writes to inputs
elsewhere  with symbolic sizes: the same at other sizes that the guards admit
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch.testing._internal import common_methods_invocations as database
from torch.utils._pytree import tree_flatten, tree_unflatten

from tests.oracle import symbolic
from tests.oracle.cases import Case, duplicate
from tests.oracle.compare import tensors_in
from tests.oracle.effects import Effect, effect_of, effects_differ
from tests.oracle.engines import is_data_dependent
from tests.oracle.run import Verdict, _said, _text
from understudy.shapes.sizes import from_torch

MODES = ("real", "fake", "symbolic")

OUTCOMES = {
    "ok": "the graph does what the program does",
    "refused": "the program itself raises",
    "data-dependent": "the program decides by data, and the engine says so",
    "rounded": "the graph does the same but for rounding",
    "wrong": "the graph does something else",
    "unsound": "the graph does something else at other sizes that the guards admit",
    "error": "the program runs, and is not captured, or the graph does not run",
    "crash": "the process died, or did not come back",
}
FAILURES = ("data-dependent", "rounded", "wrong", "unsound", "error", "crash")
OTHER_SIZES = 2

UNFORESEEABLE = frozenset(
    {
        "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided",
        "nn.functional.embedding_bag",  # rows of the gradient without an index
        "linalg.lstsq", "linalg.lstsq.grad_oriented",  # a driver of LAPACK's reads pivots that nobody has set
    }
)  # fmt: skip
"""Operators whose values differ from one run of the program to the next."""


def maker(engine: str) -> Callable[..., Any]:
    """`make_fx` of an engine."""
    if engine == "understudy":
        from understudy import make_fx as ours

        return ours
    from torch.fx.experimental.proxy_tensor import make_fx as theirs

    return theirs


class Program:
    """A case as a function of its tensors; everything else in it is fixed."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._leaves, self._structure = tree_flatten((case.args, case.kwargs))
        self.tensors = tensors_in(self._leaves)

    def __call__(self, tensors: list[torch.Tensor]) -> Any:
        remaining = iter(tensors)
        leaves = [next(remaining) if isinstance(leaf, torch.Tensor) else leaf for leaf in self._leaves]
        args, kwargs = tree_unflatten(leaves, self._structure)
        with without_own_seeds():
            return symbolic.called(self._case, args, kwargs)


@contextmanager
def without_own_seeds() -> Iterator[None]:
    """The database wraps random operators so that they set the seed, which no graph would: here the sweep sets it."""
    before = database.wrapper_set_seed
    database.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    try:
        yield
    finally:
        database.wrapper_set_seed = before


def run_of(run: Callable[[list[torch.Tensor]], Any], tensors: list[torch.Tensor]) -> Effect:
    return effect_of(lambda: run(tensors), tensors)


def examine(case: Case, engine: str, modes: Sequence[str]) -> dict[str, Verdict]:
    """The verdict of each tracing mode."""
    program = Program(case)
    random_state = torch.default_generator.get_state()
    try:
        try:
            eager = run_of(program, duplicate(program.tensors))
        except Exception:
            return {mode: Verdict("refused") for mode in modes}
        return {mode: _judged(case, program, eager, engine, mode) for mode in modes}
    finally:  # the samples to come must not depend on which ones were looked at
        torch.default_generator.set_state(random_state)


def _judged(case: Case, program: Program, eager: Effect, engine: str, mode: str) -> Verdict:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph = maker(engine)(program, tracing_mode=mode)(duplicate(program.tensors))
        traced = run_of(graph, duplicate(program.tensors))
    except Exception as error:
        outcome = "data-dependent" if decides_by_data(error) else "error"
        return Verdict(outcome, _said(error), _text(error))
    compares = case.op not in UNFORESEEABLE
    found = effects_differ(eager, traced, compares)
    if found:
        outcome = "wrong" if effects_differ(eager, traced, rounded=True) else "rounded"
        return Verdict(outcome, _kinds(found), "; ".join(found)[:900])
    if mode == "symbolic" and engine == "understudy" and _can_be_resized(case, program):
        return _elsewhere(case.op, program, graph, compares)
    return Verdict("ok")


def decides_by_data(error: BaseException) -> bool:
    return (
        is_data_dependent(error)
        or type(error).__name__ in ("GuardOnDataDependentSymNode",)
        or (
            "data-dependent" in str(error)
            or "It appears that you're trying to get value out of a tracing tensor" in str(error)
        )
    )


def _kinds(found: list[str]) -> str:
    return ", ".join(
        sorted(
            {
                line.partition(":")[0].partition("[")[0] + "." + line.partition(":")[0].rpartition(".")[2]
                for line in found
            }
        )
    )


# --- at other sizes ------------------------------------------------------------------------------------------


class SymbolicGraph:
    """A captured graph with symbolic sizes, as `symbolic.other_sizes` wants it."""

    def __init__(self, graph: Any, arguments: Sequence[Any]) -> None:
        self.env = graph.shape_env
        placeholders = graph.graph.find_nodes(op="placeholder")
        self._arguments = [
            (real, node.meta["val"]) for real, node in zip(arguments, placeholders, strict=True)
        ]

    @property
    def symbols(self) -> list[Any]:
        return [symbol for symbol in self.env.hints if symbol not in self.env.definitions]

    def broken(self, sizes: Mapping[Any, int]) -> list[Any]:
        return [guard for guard in self.env.guards if not guard.holds(sizes)]

    def arguments_at(self, sizes: Mapping[Any, int]) -> list[Any]:
        """Arguments of other sizes, with the values of the ones that the graph was made from."""
        return [
            symbolic.resized(real, symbolic.evaluated(value._spec, sizes))
            if isinstance(real, torch.Tensor)
            else symbolic.number_at(from_torch(value), sizes)
            for real, value in self._arguments
        ]

    def admitted(self) -> Iterator[dict[Any, int]]:
        """Other sizes at which all guards hold."""
        seen = {tuple(self.env.hints[symbol] for symbol in self.symbols)}
        for sizes in islice(symbolic.other_sizes(self), 32):  # type: ignore[arg-type]
            key = tuple(sizes[symbol] for symbol in self.symbols)
            if key not in seen and all(map(_is_within, key, self.symbols)) and not self.broken(sizes):
                seen.add(key)
                yield sizes


def _is_within(size: int, symbol: Any) -> bool:
    return (symbol.low is None or size >= symbol.low) and (symbol.high is None or size <= symbol.high)


def _can_be_resized(case: Case, program: Program) -> bool:
    """Whether all inputs can be made in other sizes: each has memory of its own."""
    if case.op in symbolic.TRUSTING:
        return False
    tensors = program.tensors
    if not all(tensor.layout == torch.strided and not tensor.is_quantized for tensor in tensors):
        return False
    return len({tensor.untyped_storage()._cdata for tensor in tensors}) == len(tensors)


def _elsewhere(op: str, program: Program, graph: Any, compares: bool) -> Verdict:
    symbolic_graph = SymbolicGraph(graph, program.tensors)
    for sizes in islice(symbolic_graph.admitted(), OTHER_SIZES):
        inputs = symbolic_graph.arguments_at(sizes)
        if op in symbolic.NEVER_EMPTY and not all(tensor.numel() for tensor in inputs):
            continue
        if op in symbolic.WITH_PIVOTS:
            for pivots in (tensor for tensor in inputs if tensor.dtype is torch.int32):
                pivots.fill_(1)
        shown = ", ".join(str(list(tensor.shape)) for tensor in inputs)
        try:
            eager = run_of(program, duplicate(inputs))
        except Exception:  # values of the sample may not be legal here: an index, a probability
            continue
        try:
            traced = run_of(graph, duplicate(inputs))
        except Exception as error:
            return Verdict(
                "unsound",
                _said(error),
                f"at {shown}: {_text(error)}; guards {symbolic_graph.env.guards}"[:900],
            )
        found = effects_differ(eager, traced, compares)
        if found:
            return Verdict(
                "unsound" if effects_differ(eager, traced, rounded=True) else "rounded",
                _kinds(found),
                f"at {shown}: {'; '.join(found)}; guards {symbolic_graph.env.guards}"[:900],
            )
    return Verdict("ok")
