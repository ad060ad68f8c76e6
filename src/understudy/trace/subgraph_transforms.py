"""Higher-order operators under torch.func: transforms for which torch has no rule of its own.

`torch.func.grad`: one level further in, the operator is called on leaves, and its rule for ordinary autograd gives the
gradients. `torch.func.vmap`: the same operator over batches, or, where each entry of a batch chooses for itself, both
branches and `torch.where`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from understudy import _torch
from understudy.errors import Context, UnsupportedOperatorException
from understudy.lines import user_line

NAMES = {"Grad": "torch.func.grad and vjp", "Jvp": "torch.func.jvp", "Vmap": "torch.func.vmap"}


def transformed(op: Any, args: Any, kwargs: Any) -> Any:
    """The operator under the innermost transform; NotImplemented if there is none, or torch has a rule for it."""
    interpreter, kind = _torch.transform_without_rule(op)
    if interpreter is None:
        return NotImplemented
    if kind == "Grad":
        return _differentiated(interpreter, op, args, kwargs)
    rule = BATCHED.get(op.name()) if kind == "Vmap" else None
    if rule is not None:
        return rule(interpreter, op, *args)
    raise unsupported(op, NAMES.get(kind, kind))


def unsupported(op: Any, transform: str) -> UnsupportedOperatorException:
    hint = "inside of the transform, write it out in plain operators: torch.where, or a Python loop"
    return UnsupportedOperatorException(
        f"the higher-order operator {op} has no rule for {transform}",
        func=op,
        context=Context(line=user_line(), hint=hint),
    )


# --- gradients --------------------------------------------------------------------------------------------------------


class Call:
    """One call at one level of torch.func.grad: its leaves and results one level further in."""

    def __init__(self, interpreter: Any, op: Any, args: Any, kwargs: Any) -> None:
        self.interpreter = interpreter
        self.op = op
        self.values, self.spec = _torch.tree_flatten((tuple(args), dict(kwargs)))
        self.places = [place for place, value in enumerate(self.values) if isinstance(value, torch.Tensor)]
        self.leaves: list[Any] = []
        self.results: list[Any] = []
        self.out_spec: Any = None

    def run(self, tensors: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
        level = self.interpreter.level()
        inner = [_torch.unwrap_for_grad(tensor, level) for tensor in tensors]
        with torch.enable_grad(), self.interpreter.lower():
            if _torch.has_transforms():
                raise unsupported(self.op, "torch.func.grad inside of another transform of torch.func")
            self.leaves = [_leaf(tensor) for tensor in inner]
            values = list(self.values)
            for place, leaf in zip(self.places, self.leaves, strict=True):
                values[place] = leaf
            args, kwargs = _torch.tree_unflatten(values, self.spec)
            self.results, self.out_spec = _torch.tree_flatten(self.op(*args, **kwargs))
            detached = [
                value.detach() if isinstance(value, torch.Tensor) else value for value in self.results
            ]
        return tuple([
            _torch.wrap_for_grad(value, level) if isinstance(value, torch.Tensor) else value for value in detached
        ])  # fmt: skip

    def gradients(self, grads: tuple[Any, ...]) -> list[Any]:
        level = self.interpreter.level()
        wanted = [
            (result, _torch.unwrap_for_grad(grad, level))
            for result, grad in zip(self.results, grads, strict=True)
            if isinstance(result, torch.Tensor) and result.requires_grad and grad is not None
        ]
        leaves = [leaf for leaf in self.leaves if leaf.requires_grad]
        with self.interpreter.lower():
            found = torch.autograd.grad(
                [result for result, _ in wanted],
                leaves,
                [grad for _, grad in wanted],
                allow_unused=True,
                retain_graph=True,
            )
        remaining = iter(found)
        parts = [next(remaining) if leaf.requires_grad else None for leaf in self.leaves]
        return [None if grad is None else _torch.wrap_for_grad(grad, level) for grad in parts]


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    can_have_gradients = tensor.is_floating_point() or tensor.is_complex()
    return tensor.detach().requires_grad_() if can_have_gradients else tensor


def _differentiated(interpreter: Any, op: Any, args: Any, kwargs: Any) -> Any:
    call = Call(interpreter, op, args, kwargs)
    tensors = [call.values[place] for place in call.places]
    with _torch.single_level_functions():
        results = OneLevel.apply(call, *tensors)
    return _torch.tree_unflatten(list(results), call.out_spec)


class OneLevel(_torch.SingleLevelFunction):  # type: ignore[misc]
    """What torch.func.grad sees of the operator at one level."""

    @staticmethod
    def forward(call: Call, *tensors: torch.Tensor) -> tuple[Any, ...]:
        return call.run(tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.call = inputs[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, *ctx.call.gradients(grads)


# --- batches ----------------------------------------------------------------------------------------------------------


def _batched_cond(
    interpreter: Any, op: Any, pred: Any, yes: Callable[..., Any], no: Callable[..., Any], operands: Any
) -> Any:
    pred, is_batch_of_choices = _torch.batched_at(pred, 0)
    values = [_torch.batched_at(value, 0) for value in operands]
    in_dims = tuple([0 if is_batched else None for _, is_batched in values])
    inner = tuple([value for value, _ in values])

    def chosen(pred: torch.Tensor, *values: Any) -> tuple[Any, ...]:
        return tuple([torch.where(pred, a, b) for a, b in zip(yes(*values), no(*values), strict=True)])

    with interpreter.lower():
        if is_batch_of_choices:
            results = torch.vmap(chosen, (0, *in_dims), randomness=interpreter.randomness())(pred, *inner)
        else:
            branches = [torch.vmap(f, in_dims, randomness=interpreter.randomness()) for f in (yes, no)]
            results = op(pred, *branches, inner)
    return tuple([_torch.with_batch_dimension(result, 0, interpreter.level()) for result in results])


def _batched_map(interpreter: Any, op: Any, function: Callable[..., Any], xs: Any, others: Any) -> Any:
    rows = [_torch.batched_at(value, 1) for value in xs]
    rest = [_torch.batched_at(value, 0) for value in others]
    in_dims = tuple([0 if is_batched else None for _, is_batched in (*rows, *rest)])
    with interpreter.lower():
        body = torch.vmap(function, in_dims=in_dims, randomness=interpreter.randomness())
        results = op(body, [row for row, _ in rows], [value for value, _ in rest])
    return tuple([_torch.with_batch_dimension(result, 1, interpreter.level()) for result in results])


def _batched_scan(
    interpreter: Any, op: Any, function: Callable[..., Any], init: Any, xs: Any, others: Any
) -> Any:
    size, level = interpreter.batch_size(), interpreter.level()
    carry = [_as_batch(value, size) for value in init]
    rows = [_torch.batched_at(value, 1) for value in xs]
    rest = [_torch.batched_at(value, 0) for value in others]
    in_dims = tuple([0] * len(carry) + [0 if is_batched else None for _, is_batched in (*rows, *rest)])
    with interpreter.lower():
        step = torch.vmap(function, in_dims=in_dims, randomness=interpreter.randomness())
        results = op(step, carry, [row for row, _ in rows], tuple([value for value, _ in rest]))
    places = [0] * len(carry) + [1] * (len(results) - len(carry))
    return tuple([
        _torch.with_batch_dimension(result, place, level) for result, place in zip(results, places, strict=True)
    ])  # fmt: skip


def _as_batch(value: Any, size: int) -> Any:
    inner, is_batched = _torch.batched_at(value, 0)
    return inner if is_batched else inner.expand(size, *inner.shape).clone()


BATCHED: dict[str, Callable[..., Any]] = {
    "cond": _batched_cond,
    "map_impl": _batched_map,
    "scan": _batched_scan,
}
