"""Higher-order operators under the transforms of torch.func.

grad, vjp   the operator is called again one level further in; its gradients are calls of operators (`backward`),
            also outside of torch.func
others      torch's own rule, if it has one
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch

from understudy import _torch
from understudy.capture.higher_order.derivatives import at, differentiable
from understudy.errors import Context, UnsupportedOperatorException
from understudy.lines import user_line
from understudy.ops import hops
from understudy.spec.call import flat, map_structure

if TYPE_CHECKING:
    from understudy.capture.make_fx import Capture

NAMES = {"Grad": "torch.func.grad and vjp", "Jvp": "torch.func.jvp", "Vmap": "torch.func.vmap"}


def as_operands(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments without wrappers of transforms that have ended: a backward pass may run later. The same objects if
    there are none."""
    if all(_torch.unwrap_if_dead(tensor) is tensor for tensor in flat(torch.Tensor, args, kwargs)):
        return args, kwargs
    args, kwargs = map_structure(_torch.unwrap_if_dead, torch.Tensor, (tuple(args), dict(kwargs)))
    return args, kwargs


def transform_operator(op: Any, args: Any, kwargs: object) -> Any:
    """Apply the innermost transform to the operator; NotImplemented if torch's rule can be used."""
    interpreter, kind, has_rule = _torch.innermost_transform(op)
    if kind == "Grad" and hops.higher_order(op).backward is not None:
        return _differentiate(interpreter, op, *interpreter.lift(args, kwargs))
    if has_rule:
        return NotImplemented
    raise make_unsupported_error(op, NAMES.get(kind, kind))


def make_unsupported_error(op: object, transform: str) -> UnsupportedOperatorException:
    hint = "inside of the transform, write it out in plain operators: torch.where, or a Python loop"
    return UnsupportedOperatorException(
        f"the higher-order operator {op} has no rule for {transform}",
        func=op,
        context=Context(line=user_line(), hint=hint),
    )


# --- gradients --------------------------------------------------------------------------------------------------------


KEEPS: ContextVar[bool] = ContextVar("keeps", default=True)
"""Whether values for a backward pass are saved. Not inside a backward pass, where they would serve second derivatives
only."""


class DifferentiableCall:
    """One call of an operator with gradients."""

    def __init__(self, op: Any, args: Any, kwargs: Any) -> None:
        self.op = op
        self.values, self.spec = _torch.tree_flatten((tuple(args), dict(kwargs)))
        self.places = [place for place, value in enumerate(self.values) if isinstance(value, torch.Tensor)]
        self.out_spec: Any = None
        self._plain: dict[int, Any] = {}

    @property
    def tensors(self) -> list[Any]:
        return at(self.places, self.values)

    def with_tensors(self, tensors: Any) -> Any:
        """The arguments with their tensors replaced by these."""
        values = list(self.values)
        for place, tensor in zip(self.places, tensors, strict=True):
            values[place] = tensor
        return _torch.tree_unflatten(values, self.spec)

    def run(self, tensors: Any) -> list[Any]:
        args, kwargs = self.with_tensors(tensors)
        results, self.out_spec = _torch.tree_flatten(self.op(*args, **kwargs))
        return list(results)

    def save(self, ctx: Any, tensors: Any, results: Any) -> None:
        ctx.call = self
        self._plain = {
            place: value for place, value in enumerate(results) if not isinstance(value, torch.Tensor)
        }
        ctx.save_for_backward(*tensors, *[value for value in results if isinstance(value, torch.Tensor)])

    def gradients(self, saved: Any, grads: tuple[object, ...]) -> list[Any]:
        tensors, remaining = saved[: len(self.places)], iter(saved[len(self.places) :])
        results = [
            self._plain[place] if place in self._plain else next(remaining) for place in range(len(grads))
        ]
        args, _ = self.with_tensors(tensors)
        given = differentiable(grads)
        if not given or not differentiable(tensors):
            return [None for _ in tensors]
        token = KEEPS.set(False)
        try:
            backward = hops.higher_order(self.op).backward
            assert backward is not None
            found = backward(self.op, args, results, given, at(given, grads))
        finally:
            KEEPS.reset(token)
        return at(self.places, _torch.tree_flatten(found)[0])

    def unflatten(self, results: Any) -> Any:
        return _torch.tree_unflatten(list(results), self.out_spec)


def _keep_for_backward(op: Any, args: object, tensors: Any) -> Any:
    """The call that also returns what its backward pass needs; NotImplemented if it needs nothing."""
    keep = hops.higher_order(op).keep_for_backward
    if not KEEPS.get() or keep is None or not any(tensor.requires_grad for tensor in tensors):
        return NotImplemented
    return keep(op, args)


# --- ordinary gradients -------------------------------------------------------------------------------------------------


def with_gradients(op: Any, args: object, kwargs: object) -> Any:
    """The operator with our gradients; NotImplemented if no gradient is required."""
    if hops.higher_order(op).backward is None or not torch.is_grad_enabled():
        return NotImplemented
    call = DifferentiableCall(op, args, kwargs)
    if not any(tensor.requires_grad for tensor in call.tensors):
        return NotImplemented
    kept = _keep_for_backward(op, args, call.tensors)
    if kept is not NotImplemented:
        return kept
    return call.unflatten(_torch.apply_function(AutogradCall, call, *call.tensors))


class AutogradCall(torch.autograd.Function):
    """The operator as an autograd function."""

    @staticmethod
    def forward(ctx: object, call: DifferentiableCall, *tensors: torch.Tensor) -> tuple[Any, ...]:
        with _torch.below_autograd():
            results = tuple(call.run(tensors))
        call.save(ctx, tensors, results)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: object) -> Any:
        return None, *ctx.call.gradients(ctx.saved_tensors, grads)


# --- torch.func.grad ------------------------------------------------------------------------------------------------------


def _differentiate(interpreter: object, op: Any, args: object, kwargs: object) -> Any:
    call = DifferentiableCall(op, args, kwargs)
    kept = _keep_for_backward(op, args, call.tensors)
    if kept is not NotImplemented:
        return kept
    with _torch.single_level_functions():
        return call.unflatten(FuncGradCall.apply(interpreter, call, *call.tensors))


class FuncGradCall(_torch.SingleLevelFunction):  # type: ignore[misc]
    """The operator at one level of torch.func.grad: calls the operator again one level further in."""

    @staticmethod
    def forward(interpreter: Any, call: DifferentiableCall, *tensors: torch.Tensor) -> tuple[Any, ...]:
        level = interpreter.level()
        inner = [_torch.unwrap_for_grad(tensor, level) for tensor in tensors]
        with _torch.grad_mode(True), interpreter.lower():
            results = call.run(inner)
        return tuple([
            _torch.wrap_for_grad(value, level) if isinstance(value, torch.Tensor) else value for value in results
        ])  # fmt: skip

    @staticmethod
    def setup_context(ctx: object, inputs: Any, output: object) -> None:
        inputs[1].save(ctx, inputs[2:], output)

    @staticmethod
    def backward(ctx: Any, *grads: object) -> Any:
        return None, None, *ctx.call.gradients(ctx.saved_tensors, grads)


# --- `invoke_subgraph` with gradients: the backward graph is a subgraph too ---------------------------------
# torch's own rule shares backward graphs through its compiler's cache, which is not active here.


def invoke_with_gradients(capture: Capture, op: object, args: Any, kwargs: object) -> Any:
    subgraph, identifier, *operands = args
    is_wanted = torch.is_grad_enabled() and any(
        isinstance(value, torch.Tensor) and value.requires_grad for value in operands
    )
    if not is_wanted or capture.options.pre_dispatch:
        return NotImplemented
    return tuple(_torch.apply_function(InvokedSubgraph, op, subgraph, identifier, *operands))


class InvokedSubgraph(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: Any, subgraph: object, identifier: object, *operands: object) -> Any:
        ctx.call = op, subgraph, identifier
        ctx.keys = _torch.dispatch_keys_of_thread()
        ctx.others = {
            place: value for place, value in enumerate(operands) if not isinstance(value, torch.Tensor)
        }
        ctx.save_for_backward(*[value for value in operands if isinstance(value, torch.Tensor)])
        with _torch.below_autograd():
            return op(subgraph, identifier, *operands)

    @staticmethod
    def backward(ctx: Any, *grads: object) -> Any:
        op, subgraph, identifier = ctx.call
        tensors = iter(ctx.saved_tensors)
        count = len(ctx.saved_tensors) + len(ctx.others)
        operands = tuple(
            [ctx.others[place] if place in ctx.others else next(tensors) for place in range(count)]
        )
        backward = _torch.backward_of(subgraph, operands)

        def of_tensors(*values: object) -> tuple[Any, ...]:
            return tuple([grad for grad in backward(*values) if isinstance(grad, torch.Tensor)])

        graph = _torch.as_graph(of_tensors, (*operands, *grads), ctx.keys)
        found = iter(op(graph, f"{identifier}_backward", *operands, *grads))
        return None, None, None, *[None if place in ctx.others else next(found) for place in range(count)]
