"""Small functions around fakes, under the names that torch's users know."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from understudy import _torch
from understudy.errors import MixedTensorsError, UnsupportedOperatorException
from understudy.fake.misses import make_call
from understudy.fake.mode import FakeTensorMode
from understudy.fake.realise import realise
from understudy.fake.tensor import FakeTensor
from understudy.infer.kernels import run_real_kernel
from understudy.spec.call import flat

T = TypeVar("T")
log = logging.getLogger(__name__)


def is_fake(x: object) -> bool:
    """Whether this is a stand-in, or wraps nothing but stand-ins (subclass, functional and functorch wrappers)."""
    if type(x) is FakeTensor:
        return True
    if not isinstance(x, torch.Tensor):
        return False
    if _torch.is_traceable_wrapper_subclass(x):
        inner = [is_fake(part) for part in _inner(x)]
        if any(inner) and not all(inner):
            raise MixedTensorsError(
                f"{type(x).__name__}: expected stand-ins or real tensors inside, got both"
            )
        return any(inner)
    unwrapped = _torch.unwrap(x)
    return unwrapped is not None and is_fake(unwrapped)


def maybe_get_fake_mode(t: object) -> FakeTensorMode | None:
    """The mode of a stand-in, or of the stand-ins inside a wrapper; None for everything else."""
    if type(t) is FakeTensor:
        return t.fake_mode
    if not isinstance(t, torch.Tensor):
        return None
    if _torch.is_traceable_wrapper_subclass(t):
        modes = [maybe_get_fake_mode(part) for part in _inner(t)]
        found = next((mode for mode in modes if mode is not None), None)
        if found is not None and any(mode is not found for mode in modes):
            raise MixedTensorsError(
                f"{type(t).__name__}: expected parts of one FakeTensorMode, got parts of several"
            )
        return found
    unwrapped = _torch.unwrap(t)
    return None if unwrapped is None else maybe_get_fake_mode(unwrapped)


def is_fake_tensor(x: object) -> bool:
    """Whether this is itself a stand-in, not a wrapper around stand-ins."""
    return isinstance(x, FakeTensor)


def maybe_get_fake_device(x: object) -> torch.device | None:
    """The device that a stand-in is on; None for everything else, wrappers too."""
    return x.fake_device if isinstance(x, FakeTensor) else None


def maybe_get_fake_constant(x: object) -> torch.Tensor | None:
    """The value of a stand-in whose contents are determined; None for everything else."""
    return x.constant if isinstance(x, FakeTensor) else None


def maybe_get_real_tensor(x: object) -> torch.Tensor | None:
    """The real tensor that `FakeTensor(..., real_tensor=)` was given; None for everything else."""
    return x.real_tensor if isinstance(x, FakeTensor) else None


def _inner(wrapper: torch.Tensor) -> list[Any]:
    """The tensors inside a wrapper. It may name other things as well, as a `DTensor` does its mesh."""
    names, _ = _torch.flatten_wrapper(wrapper)
    return [part for name in names if isinstance(part := getattr(wrapper, name), torch.Tensor)]


def get_plain_tensors(subclass: Any, *, out: list[object]) -> list[Any]:
    """All plain tensors inside a wrapper subclass; a plain tensor is its own result."""
    is_wrapper = _torch.is_traceable_wrapper_subclass(subclass)
    for part in _inner(subclass) if is_wrapper else (subclass,):
        if is_wrapper:
            get_plain_tensors(part, out=out)
        else:
            out.append(part)
    return out


@contextmanager
def unset_fake_temporarily() -> Iterator[FakeTensorMode | None]:
    """Deactivate the active mode for the time of the block; yields that mode."""
    with _torch.without_fake_mode() as previous:
        yield previous


@dataclass(frozen=True)
class TensorMetadata:
    """What two tensors must share to be interchangeable without data."""

    dtype: torch.dtype
    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    device: torch.device
    layout: torch.layout
    memory_format: torch.memory_format | None
    storage_offset: Any
    storage_bytes: int | None
    requires_grad: bool
    is_quantized: bool
    is_conj: bool
    is_neg: bool
    is_inference: bool
    is_sparse: bool
    is_coalesced: bool | None
    dense_dim: int | None
    sparse_dim: int | None


FORMATS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)


def extract_tensor_metadata(t: torch.Tensor) -> TensorMetadata:
    """All that is known of a tensor without its data, real or not, as one value that can be compared and hashed."""
    strided = t.layout is torch.strided
    return TensorMetadata(
        dtype=t.dtype,
        shape=tuple(t.shape),
        stride=tuple(t.stride()) if strided else (),
        device=t.device,
        layout=t.layout,
        memory_format=_memory_format(t) if strided else None,
        storage_offset=t.storage_offset() if strided else 0,
        storage_bytes=_torch.native_storage(t).nbytes() if strided else None,
        requires_grad=t.requires_grad,
        is_quantized=t.is_quantized,
        is_conj=t.is_conj(),
        is_neg=t.is_neg(),
        is_inference=t.is_inference(),
        is_sparse=t.is_sparse,
        is_coalesced=t.is_coalesced() if t.is_sparse else None,
        dense_dim=t.dense_dim() if t.is_sparse else None,
        sparse_dim=t.sparse_dim() if t.is_sparse else None,
    )


def _memory_format(t: torch.Tensor) -> torch.memory_format | None:
    for memory_format, dims in zip(FORMATS, (None, 4, 5), strict=True):
        if (dims is None or t.ndim == dims) and t.is_contiguous(memory_format=memory_format):
            return memory_format
    return None


# --- the cache ----------------------------------------------------------------------------------------------------------


@contextmanager
def disable_fake_tensor_cache(fake_mode: FakeTensorMode) -> Iterator[None]:
    """Inside, this mode infers every call, and caches nothing."""
    before = fake_mode.cache_enabled
    fake_mode.cache_enabled = False
    try:
        yield
    finally:
        fake_mode.cache_enabled = before


def dump_cache_stats() -> None:
    """Log `FakeTensorMode.cache_info()`, at level INFO."""
    info = FakeTensorMode.cache_info()
    log.info("cache of stand-in calls: %d hits, %d misses, %d plans", info.hits, info.misses, info.size)
    for reason, count in sorted(info.bypasses.items(), key=lambda item: -item[1]):
        log.info("  not kept, because %s: %d", reason, count)


# --- operators ----------------------------------------------------------------------------------------------------------


def get_schema_info(func: Any) -> Any:
    """Schema queries as in torch: `is_mutable()`, `has_argument(name)`, `may_alias(a, b)`, …"""
    return _torch.schema_info(func)


def should_allow_numbers_as_tensors(func: Any) -> bool:
    """Whether an operator accepts Python numbers for tensor arguments of its schema."""
    return _torch.allows_numbers_as_tensors(func)


def torch_decomp_decompositions(func: Any) -> bool:
    """Whether torch's decomposition of an operator is in `torch._decomp`, not a reference implementation. Raises
    `KeyError` if it has none."""
    return _torch.is_decomposed_in_aten(func)


def run_fallback_kernel(
    fake_mode: FakeTensorMode, func: Any, flat_args: Sequence[object], args_spec: Any,
    orig_not_implemented_exception: RuntimeError,
) -> Any:  # fmt: skip
    """The results of an operator, found by running it for real on zeros of the same sizes.

    Raises the given exception if that is impossible: the operator changes metadata in place, or has no kernel.
    """
    args, kwargs = _torch.tree_unflatten(list(flat_args), args_spec)
    if torch.Tag.inplace_view in func.tags:
        raise orig_not_implemented_exception
    try:
        outcomes = run_real_kernel(make_call(fake_mode, func, args, kwargs))
    except UnsupportedOperatorException as error:
        raise orig_not_implemented_exception from error
    return realise(fake_mode, outcomes, flat(FakeTensor, args, kwargs))


@contextmanager
def in_kernel_invocation_manager(fake_mode: FakeTensorMode) -> Iterator[None]:
    """Inside, stand-ins of the mode are what they are to C++: tensors on the meta device, which torch's meta kernels take
    and return."""
    before, fake_mode.in_kernel_invocation = fake_mode.in_kernel_invocation, True
    try:
        with _torch.with_meta_kernels():
            yield
    finally:
        fake_mode.in_kernel_invocation = before


def init_gpu_context(device: torch.device) -> None:
    """Does nothing: a backward pass on stand-ins needs no context of the device."""


# --- structures -----------------------------------------------------------------------------------------------------------


def tree_flatten_only(ty: type[T], tree: object) -> list[T]:
    """The leaves of a structure that are of this class."""
    return [leaf for leaf in _torch.tree_flatten(tree)[0] if isinstance(leaf, ty)]


def ordered_set(*items: T) -> dict[T, bool]:
    """A set that keeps its order: the keys of a dict."""
    return dict.fromkeys(items, True)


def is_sparse_compressed(t: object) -> bool:
    """Whether the layout is one of CSR, CSC, BSR and BSC."""
    return isinstance(t, torch.Tensor) and t.layout in COMPRESSED


def is_sparse_any(t: object) -> bool:
    """Whether the layout is COO or one of the compressed ones."""
    return isinstance(t, torch.Tensor) and (t.layout is torch.sparse_coo or t.layout in COMPRESSED)


COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def has_meta(func: _torch.OpOverload) -> bool:
    """Whether the operator has a meta kernel of torch."""
    return _torch.has_meta_kernel(func)


def contains_tensor_types(type_: Any) -> bool:
    """Whether the type of a schema is a tensor, or a container of tensors."""
    return _torch.contains_tensors(type_)


def _is_tensor_constructor(func: _torch.OpOverload) -> bool:
    """Whether the operator takes no tensor and returns one."""
    schema = func._schema
    takes_tensors = any(_torch.contains_tensors(argument.type) for argument in schema.arguments)
    return not takes_tensors and len(schema.returns) == 1 and _torch.is_tensor_type(schema.returns[0].type)


def _check_for_subclass_arg(x: object) -> bool:
    """Whether a value is a tensor of a class with a `__torch_dispatch__` of its own."""
    return isinstance(x, torch.Tensor) and type(x) is not FakeTensor and _torch.uses_python_dispatch(type(x))


def _check_for_subclass(flat_args: Sequence[object]) -> bool:
    """Whether one of several values is such a tensor."""
    return any(map(_check_for_subclass_arg, flat_args))


@functools.cache
def _find_like_constructors() -> dict[_torch.OpOverload, bool]:
    """The operators that make a tensor like another one."""
    return ordered_set(*(op for op in _torch.aten_operators() if _is_like_constructor(op)))


def _is_like_constructor(op: _torch.OpOverload) -> bool:
    name = op.overloadpacket.__name__
    return name.endswith("_like") or name.startswith("new_")


@functools.cache
def _find_operators_with_positional_device() -> dict[_torch.OpOverload, bool]:
    """The operators on tensors that take a device in a place, not only by name."""
    return ordered_set(*(op for op in _torch.aten_operators() if _torch.takes_positional_device(op)))


def stride_incorrect_op(op: _torch.OpOverload) -> bool:
    """Whether the strides of torch's meta kernel are known to be wrong; rules are compared with real operators here."""
    return False


def _is_plain_tensor(t: object) -> bool:
    """Whether it is a dense `torch.Tensor` itself, no subclass and no wrapper of `torch.func`."""
    return (
        type(t) is torch.Tensor
        and t.layout is torch.strided
        and not t.is_nested
        and not _torch.is_functorch_wrapped(t)
    )


def _is_indexed_device_type(device_type: str) -> bool:
    """Whether devices of this type have an index, as `cuda:0` has."""
    return torch.device(device_type).type not in ("cpu", "meta")
