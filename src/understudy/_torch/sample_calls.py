"""Calls of operators on real tensors, from torch's database of operators with sample inputs. For tools of developers only:
the database is part of torch's tests, and takes seconds to load."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MAIN_DTYPES = (torch.float32, torch.complex64, torch.int64, torch.bool)
OneCall = tuple[Any, tuple[Any, ...], dict[str, Any]]


def sampled_operators() -> list[Any]:
    """The entries of the database: each has a name, and makes sample inputs."""
    from torch.testing._internal import common_methods_invocations as database  # why: takes seconds to load

    foreach = (
        database.foreach_unary_op_db, database.foreach_binary_op_db, database.foreach_pointwise_op_db,
        database.foreach_reduce_op_db, database.foreach_other_op_db,
    )  # fmt: skip
    return [*database.op_db, *itertools.chain(*foreach)]


def sample_calls(entry: Any, count: int) -> list[OneCall]:
    """The calls that arrive below autograd when an entry runs forward and backward on its first samples, and in inference
    mode, where composite operators arrive whole."""
    recorded: list[OneCall] = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            recorded.append((op, _copy(args), _copy(kwargs or {})))
            return op(*args, **(kwargs or {}))

    for dtype in (dtype for dtype in MAIN_DTYPES if dtype in entry.supported_dtypes("cpu")):
        has_backward = entry.supports_autograd and dtype in entry.supported_backward_dtypes("cpu")
        for sample in itertools.islice(_samples(entry, dtype, has_backward), count):
            with suppress(RuntimeError, ValueError, TypeError, IndexError), Recorder():
                result = entry.op(sample.input, *sample.args, **sample.kwargs)
                _run_backward(sample.output_process_fn_grad(result) if has_backward else None)
        for run in (entry.op, entry.inplace_variant):
            for sample in itertools.islice(_samples(entry, dtype, False), count):
                with (
                    suppress(RuntimeError, ValueError, TypeError, IndexError),
                    Recorder(),
                    torch.inference_mode(),
                ):
                    run(sample.input, *sample.args, **sample.kwargs)
    return recorded


def _samples(entry: Any, dtype: torch.dtype, has_backward: bool) -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.default_generator.manual_seed(0)
        yield from entry.sample_inputs_func(entry, "cpu", dtype, has_backward)


def _run_backward(result: Any) -> None:
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if outputs:
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])


def _copy(value: Any) -> Any:
    copy: Callable[[Any], Any] = _copy
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, (tuple, list)):
        return type(value)(map(copy, value))
    return {name: copy(part) for name, part in value.items()} if isinstance(value, dict) else value
