"""Torch's own kernels as sources: the meta kernel, and the real kernel on zeros for operators without another
source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from understudy import _torch
from understudy.errors import UnsupportedOperatorException
from understudy.ops.traits.devices import device_of
from understudy.shapes.node import SymNode
from understudy.shapes.sizes import from_torch, to_torch
from understudy.spec import New, Same, TensorSpec, Value, View
from understudy.spec.call import Call, map_structure
from understudy.spec.error_context import MissingKernel
from understudy.spec.sparse import is_sparse, sparse_on, spec_of_sparse

META = torch.device("meta")
CPU = torch.device("cpu")


class MetaTensorOfDevice(torch.Tensor):
    """A meta tensor with a `fake_device`, which some of torch's meta functions read."""

    fake_device: torch.device
    fake_mode = None
    __torch_function__ = _torch.no_torch_function
    __torch_dispatch__ = _torch.no_torch_dispatch

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return _torch.torch_fake_tensor_class()


def strided_on(spec: TensorSpec, device: torch.device, zero: bool = False) -> torch.Tensor:
    """A plain tensor with this spec's metadata, on another device."""
    if spec.sparse is not None:
        return sparse_on(spec, device)
    if spec.is_symbolic:
        return _symbolic_on(spec, device)
    extent = spec.offset + 1
    for size, step in zip(spec.shape, spec.stride, strict=True):
        if size == 0:
            extent = spec.offset + (spec.offset > 0)  # it begins within a storage that holds something
            break
        extent = extent + (size - 1) * step
    if zero:  # kernels that take an overlapping out= for contiguous write one element after the other
        extent = max(extent, spec.offset + spec.numel)
    make = torch.zeros if zero else torch.empty
    return _set_bits(make((extent,), dtype=spec.dtype, device=device).as_strided(*spec.numbers), spec)


def _set_bits(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The tensor with the spec's bits for conjugation and negation."""
    if spec.conj:
        _torch.set_conj(tensor, True)
    if spec.neg:
        _torch.set_neg(tensor, True)
    return tensor


def _symbolic_on(spec: TensorSpec, device: torch.device) -> torch.Tensor:
    if device.type != "meta":
        raise UnsupportedOperatorException("the real kernel can't run on symbolic sizes")
    shape, stride = [to_torch(size) for size in spec.shape], [to_torch(size) for size in spec.stride]
    return torch.empty_strided(shape, stride, dtype=spec.dtype, device=device)


def spec_of_result(tensor: torch.Tensor, device: torch.device) -> TensorSpec:
    if is_sparse(tensor):
        return spec_of_sparse(tensor, device)
    if tensor.layout is not torch.strided:
        raise UnsupportedOperatorException(f"a result of layout {tensor.layout} can't be described")
    shape, stride = map(from_torch, tensor.shape), map(from_torch, tensor.stride())
    return TensorSpec(
        tuple(shape), tuple(stride), from_torch(tensor.storage_offset()), dtype=tensor.dtype, device=device,
        conj=tensor.is_conj(), neg=tensor.is_neg(),
    )  # fmt: skip


def run_meta_kernel(call: Call) -> Any:
    def stand_in(spec: TensorSpec) -> torch.Tensor:
        tensor = _torch.make_subclass(MetaTensorOfDevice, strided_on(spec, META))
        tensor.fake_device = spec.device
        return tensor

    try:
        return _from_offsets(call, _run(call, stand_in, META))
    except NotImplementedError:
        return NotImplemented
    except RuntimeError as error:
        if any(spec.is_symbolic for spec in call.inputs) and any(
            words in str(error) for words in NEEDS_INTEGERS
        ):
            return NotImplemented
        raise


def _from_offsets(call: Call, outcomes: Any) -> Any:
    """Outcomes of stand-ins that begin where their storages do, as those for tensors with symbolic sizes."""

    def move(outcome: Any) -> Same | View:
        given, spec = call.inputs[outcome.of], outcome.spec
        if spec is not None and given.is_symbolic:
            spec = spec.as_view(spec.shape, spec.stride, given.offset + spec.offset)
        return (
            Same(outcome.of) if spec is given and isinstance(outcome, Same) else replace(outcome, spec=spec)
        )

    return map_structure(move, (Same, View), outcomes)


NEEDS_INTEGERS = ("with symbolic sizes/strides", "only concrete integers", "called with NO overloaded args")
"""Parts of the messages with which C++ rejects symbolic sizes."""


def with_fixed_sizes(call: Call) -> Call:
    """The call with symbols specialised to their hints, with guards."""
    return _replace_symbols(call, int)


def with_hinted_sizes(call: Call) -> Call:
    """The call with symbols replaced by hints, without guards: the result must not be cached."""
    return _replace_symbols(call, hint_of_size)


def _replace_symbols(call: Call, number: Callable[[Any], int]) -> Call:
    """The call with symbols replaced by numbers."""
    args, kwargs = map_structure(
        lambda spec: _spec_in_numbers(spec, number), TensorSpec, (call.args, call.kwargs)
    )
    args, kwargs = map_structure(number, SymNode, (args, kwargs))
    return Call.of(call.op, args, kwargs)


def _spec_in_numbers(spec: TensorSpec, number: Callable[[Any], int]) -> TensorSpec:
    if not spec.is_symbolic:
        return spec
    return spec.as_view(
        [number(n) for n in spec.shape], [number(n) for n in spec.stride], number(spec.offset)
    )


def hint_of_size(size: Any) -> int:
    return int(size.hint) if type(size) is SymNode else int(size)


def run_real_kernel(call: Call) -> Any:
    try:
        return run_on_zeros(call)
    except NotImplementedError as error:
        if _torch.is_builtin_namespace(call.op) and all(spec.device.type == "cpu" for spec in call.inputs):
            raise MissingKernel(f"{call.op}: {str(error).splitlines()[0]}", func=call.op) from error
        raise UnsupportedOperatorException(
            f"{call.op} has neither a rule nor a CPU kernel: {str(error).splitlines()[0]}",
            func=call.op,
        ) from error


def run_on_zeros(call: Call, make: Callable[[TensorSpec], torch.Tensor] | None = None) -> Any:
    """The outcomes of the real operator on zeros, or on the tensors that `make` returns for the specs in order; its
    errors are raised.

    The state of the random number generator is preserved.
    """
    state = torch.random.get_rng_state()
    # Without an explicit choice torch warns, once in a process, that it does not check indices of sparse tensors.
    is_sparse_call = any(spec.sparse is not None for spec in call.inputs)
    try:
        with torch.sparse.check_sparse_tensor_invariants(enable=False) if is_sparse_call else nullcontext():
            return _run(call, make or (lambda spec: strided_on(spec, CPU, zero=True)), CPU)
    finally:
        torch.random.set_rng_state(state)


def _run(call: Call, stand_in: Any, native: torch.device) -> Any:
    """Call the operator below all modes on tensors that `stand_in` makes for the specs, and return its outcomes."""
    device = result_device(call)
    stand_ins: list[torch.Tensor] = []

    def convert(value: Any) -> Any:
        if type(value) is TensorSpec:
            stand_ins.append(stand_in(value))
            return stand_ins[-1]
        return to_torch(value) if type(value) is SymNode else native

    guard = _torch.NoDispatch()
    try:
        args, kwargs = map_structure(convert, (TensorSpec, SymNode, _torch.Device), (call.args, call.kwargs))
        result = call.op(*args, **kwargs)
        return outcomes_of(result, stand_ins, call, lambda tensor: spec_of_result(tensor, device))
    finally:
        del guard


def result_device(call: Call) -> torch.device:
    asked = call.kwargs.get("device")
    return asked or device_of(call) or CPU


def outcomes_of(result: object, inputs: Sequence[torch.Tensor], call: Call, spec_of: Any) -> Any:
    """The outcomes of a call whose results are tensors: identity means `Same`, a shared storage means `View`."""
    if isinstance(result, tuple):
        return tuple(outcomes_of(part, inputs, call, spec_of) for part in result)
    if isinstance(result, list):
        return [outcomes_of(part, inputs, call, spec_of) for part in result]
    if not isinstance(result, torch.Tensor):
        return Value(result)
    spec = spec_of(result)
    for position, tensor in enumerate(inputs):
        if tensor is result:
            return Same(position) if spec is call.inputs[position] else Same(position, spec)
    if spec.layout is not torch.strided:
        return New(spec)
    storage = _torch.storage_id(result)
    for position, tensor in enumerate(inputs):
        if tensor.layout is torch.strided and _torch.storage_id(tensor) == storage:
            return View(position, spec)
    return New(spec)
