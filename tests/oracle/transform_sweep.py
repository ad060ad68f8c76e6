"""Operators below transforms of torch.func, captured: does the graph compute what the transformed function computes?

    python -m tests.oracle.transform_sweep --modes symbolic fake
    python -m tests.oracle.transform_sweep --ops layer_norm --samples 5

Of each operator of torch's database, a few small samples; the transforms are with respect to the first tensor, the others
are inputs of the graph as well.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch.func import functionalize, grad, jacfwd, jacrev, jvp
from torch.utils._pytree import tree_flatten, tree_unflatten

from tests.oracle.cases import OPS, seed
from tests.oracle.compare import tensors_in
from tests.oracle.random_calls import VALUES_FROM_NOWHERE
from understudy import make_fx

MOST_ELEMENTS = 60
TOLERANCE = {"rtol": 1e-3, "atol": 1e-4, "equal_nan": True}
Function = Callable[..., Any]


def _vmap(f: Function, dim: int = 0) -> Function:
    return torch.vmap(f, in_dims=dim, randomness="same")


def _total(f: Function) -> Function:
    return lambda x: (f(x).abs() ** 2).sum()


def _along_ones(f: Function) -> Function:
    return lambda x: jvp(f, (x,), (torch.ones_like(x),))


TRANSFORMS: dict[str, Callable[[Function], Function]] = {
    "vmap": _vmap,
    "vmap of the last dimension": lambda f: _vmap(f, -1),
    "vmap of grad": lambda f: _vmap(grad(_total(f))),
    "vmap of jvp": lambda f: _vmap(_along_ones(f)),
    "jacrev": jacrev,
    "jacfwd": lambda f: jacfwd(f, randomness="same"),
    "grad of grad": lambda f: grad(lambda x: grad(_total(f))(x).abs().sum()),
    "jvp of grad": lambda f: _along_ones(grad(_total(f))),
    "functionalize": functionalize,
}


def samples_of(op: str, count: int) -> list[Any]:
    info = OPS[op]
    if op in VALUES_FROM_NOWHERE or not info.supports_autograd:
        return []
    seed()
    try:
        samples = list(islice(info.sample_inputs_func(info, "cpu", torch.float32, False), 30))
    except Exception:  # the database has no samples of this dtype
        return []
    small = [
        each
        for each in samples
        if isinstance(each.input, torch.Tensor) and 0 < each.input.numel() <= MOST_ELEMENTS
    ]
    usable = [each for each in small if each.input.is_floating_point() and each.input.layout is torch.strided]
    return usable if len(usable) <= count else [*usable[: count - 1], usable[-1]]


def program_of(op: str, sample: Any, transform: str) -> tuple[Function, list[torch.Tensor]]:
    """The transformed operator as a function of all tensors of the sample, and these tensors."""
    leaves, structure = tree_flatten((sample.args, sample.kwargs))
    places = [number for number, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def call(x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        given = list(leaves)
        for place, tensor in zip(places, others, strict=True):
            given[place] = tensor
        args, kwargs = tree_unflatten(given, structure)
        result = sample.output_process_fn_grad(OPS[op].op(x, *args, **kwargs))
        return next(t for t in tensors_in(result) if t.is_floating_point() or t.is_complex())

    def program(x: torch.Tensor, *others: torch.Tensor) -> Any:
        return TRANSFORMS[transform](lambda x: call(x, *others))(x)

    x = sample.input.detach()
    if transform.startswith("vmap"):
        x = torch.stack([x, x * 0.5, x + 1], -1 if transform.endswith("dimension") else 0)
    return program, [x, *(leaves[place].detach() for place in places)]


def examine(op: str, sample: Any, transform: str, mode: str) -> tuple[str, str]:
    """What came of one capture, and the difference or the error."""
    program, tensors = program_of(op, sample, transform)

    def run(function: Function) -> Any:
        seed()
        try:
            return function(*(tensor.clone() for tensor in tensors))
        except Exception as error:
            return error

    wanted = run(program)
    graph = run(make_fx(program, tracing_mode=mode))
    found = graph if isinstance(graph, Exception) else run(graph)
    if isinstance(wanted, Exception):
        return ("refused", "") if isinstance(found, Exception) else ("refusal missed", str(wanted))
    if isinstance(found, Exception):
        return "error", f"{type(found).__name__}: {found}"
    difference = compare(wanted, found)
    if difference and compare(wanted, run(program)):
        return "random", ""
    return ("wrong", difference) if difference else ("ok", "")


def compare(wanted: Any, found: Any) -> str:
    try:
        torch.testing.assert_close(tensors_in(found), tensors_in(wanted), **TOLERANCE)
    except AssertionError as error:
        return str(error)
    return ""


def sweep(ops: Sequence[str], count: int, modes: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """(what was captured, outcome, detail)"""
    for op in ops:
        for number, sample in enumerate(samples_of(op, count)):
            for transform in TRANSFORMS:
                for mode in modes:
                    yield f"{op} {number} {transform} {mode}", *examine(op, sample, transform, mode)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.oracle.transform_sweep")
    parser.add_argument("--modes", nargs="+", default=["symbolic"], choices=("real", "fake", "symbolic"))
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--ops", default="", help="a part of the operators' names")
    parser.add_argument("--every", type=int, default=1, help="every n-th operator only")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    logging.disable()
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    ops = [op for op in sorted(OPS) if options.ops in op][:: options.every]
    for what, outcome, detail in sweep(ops, options.samples, options.modes):
        counts[outcome] += 1
        if detail:
            print(f"{outcome}: {what}: {' '.join(detail.split())[:300]}", flush=True)
    print(dict(counts))
    return int(counts["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
