"""Conversion of real tensors to stand-ins: metadata, aliasing and autograd structure are kept, data is not. Dynamic
sizes become symbols."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from understudy import _torch
from understudy.errors import (
    ArgumentError,
    MixedTensorsError,
    NotProvidedError,
    UnsupportedFakeTensorException,
)
from understudy.fake.hooks import look_at
from understudy.fake.inputs import handler, real_handler
from understudy.fake.native import canonical
from understudy.fake.realise import convert_sparse, make_new, make_view
from understudy.fake.tensor import FakeTensor
from understudy.fake.values.determined import MOST_COMPUTED, copy_storage
from understudy.fake.values.input_numbers import make_symbol_of_number
from understudy.shapes.input_dims import name_of, symbolic_sizes
from understudy.shapes.sizes import from_torch
from understudy.spec import TensorSpec
from understudy.spec.error_context import with_line
from understudy.spec.sparse import is_sparse

if TYPE_CHECKING:
    from understudy.fake.mode import FakeTensorMode


@dataclass(frozen=True, slots=True)
class _ConversionRequest:
    """The options of a conversion."""

    static_shapes: bool | None
    source: Any
    symbolic_context: Any

    def spec(self, mode: FakeTensorMode, t: torch.Tensor) -> TensorSpec:
        if type(t) is FakeTensor and t._spec.is_symbolic:
            return t._spec
        if _is_static(mode, t, self.static_shapes, self.symbolic_context):
            return spec_of_real(t)
        return symbolic_spec(mode.shape_env, t, self.source, self.symbolic_context)

    def for_inner_tensor(self, wrapper: torch.Tensor, name: str, part: torch.Tensor) -> dict[str, Any]:
        """The options for a tensor inside a wrapper."""
        contexts = getattr(self.symbolic_context, "inner_contexts", {})
        outer = self.symbolic_context if part.shape == wrapper.shape else None
        return {
            # The size of a ragged dimension is a nested int, which can't be multiplied with symbols.
            "static_shapes": True if wrapper.layout is torch.jagged else self.static_shapes,
            "source": None if self.source is None else f"{name_of(self.source)}.{name}",
            "symbolic_context": contexts.get(name, outer),
        }


def _is_static(mode: FakeTensorMode, t: torch.Tensor, wanted: bool | None, context: object) -> bool:
    """Whether its sizes stay numbers; those of a parameter do, unless a context makes them symbols."""
    static = mode.static_shapes if wanted is None else wanted
    return static or mode.shape_env is None or (isinstance(t, torch.nn.Parameter) and not context)


SWEEP_FIRST_AT = 1024
"""Storages have no weak-reference callbacks: expired ones are swept once this many are remembered."""


class FakeTensorConverter:
    """Remembers, weakly, which stand-in each real tensor has, and which storage each real storage has.

    `copy_data`: each stand-in also gets a copy of the real tensor, as `real_tensor`. `export`: numbers are not read from
    tensors that are inputs.

    A subclass may override `from_real_tensor`, and `set_tensor_memo`, which is called for each new pair.
    """

    def __init__(self, *, copy_data: bool = False, export: bool = False) -> None:
        self.copy_data, self.export = copy_data, export
        self._copies: dict[int, tuple[Any, Any]] = {}
        self._fakes: dict[Any, tuple[weakref.ref[torch.Tensor], weakref.ref[FakeTensor]]] = {}
        self._kept: dict[int, FakeTensor] = {}
        self._storages: dict[int, tuple[Any, Any]] = {}
        self._sweep_at = SWEEP_FIRST_AT

    @property
    def tensor_memo(self) -> dict[Any, FakeTensor]:
        """The pairs in which both are alive, by the identity of the real tensor (with the device if one was given)."""
        alive = ((key, real(), fake()) for key, (real, fake) in list(self._fakes.items()))
        return {key: fake for key, real, fake in alive if real is not None and fake is not None}

    @property
    def storage_memo(self) -> dict[int, Any]:
        """The storages of stand-ins, where both are alive, by the address of the real storage."""
        found = {address: self._find_fake_storage(address) for address in list(self._storages)}
        return {address: storage for address, storage in found.items() if storage is not None}

    @property
    def meta_converter(self) -> FakeTensorConverter:
        """Where torch's tools look for the memos: in torch, it is a part of the converter."""
        return self

    @property
    def describer(self) -> FakeTensorConverter:
        """Where torch's tools look for the identities of tensors: in torch, it is a part of the converter."""
        return self

    def describe_tensor(self, t: torch.Tensor, *, recurse: bool = True, trace: bool = False) -> NoReturn:
        """As in torch; raises, with what to use instead."""
        raise NotProvidedError(
            "understudy has no separate descriptions of tensors. Use mode.from_tensor(t), or "
            "understudy.extract_tensor_metadata(t)"
        )

    def get_tensor_id(self, t: torch.Tensor) -> int:
        """The key of a tensor in `tensor_memo`."""
        return id(t)

    def _get_memo(self, t: torch.Tensor) -> FakeTensor | None:
        return self.recall(t)

    def set_tensor_memo(self, t: torch.Tensor, v: FakeTensor, key: Any = None) -> None:
        """Make `v` the stand-in of a real tensor; `key` is for one on another device."""
        memo, key = weakref.ref(self), id(t) if key is None else key

        def drop(_: Any) -> None:
            converter = memo()
            if converter is not None:
                converter._fakes.pop(key, None)
                converter._kept.pop(key, None)

        self._fakes[key] = (weakref.ref(t, drop), weakref.ref(v, drop))

    @property
    def constant_storage_mapping(self) -> NoReturn:
        raise NotProvidedError(
            "understudy has no FakeTensorConverter.constant_storage_mapping: a stand-in whose value is determined refers to "
            "the record of its storage, which all its aliases share. Read tensor.constant; a write to any alias ends it"
        )

    def add_constant_storage_mapping(self, fake_tensor: FakeTensor) -> None:
        """As in torch; raises, with what to use instead."""
        _ = self.constant_storage_mapping

    def invalidate_constant_aliases(self, tensor: torch.Tensor) -> None:
        """As in torch; raises, with what to use instead."""
        _ = self.constant_storage_mapping

    def clear_non_cpu_constants(self) -> None:
        """Does nothing: values of stand-ins on other devices are on the CPU, and take no memory there until they are
        read."""

    @property
    def remembered_storages(self) -> int:
        return len(self._storages)

    def from_real_tensor(
        self, fake_mode: FakeTensorMode, t: torch.Tensor, make_constant: bool = False, shape_env: object = None, *,
        static_shapes: bool | None = None, source: object = None, symbolic_context: object = None, trace: bool = True,
    ) -> FakeTensor:  # fmt: skip
        """The stand-in for a real tensor. Its sizes are symbols if `shape_env` is given, the one of the mode;
        `static_shapes`, if given, decides instead."""
        pair = self._fakes.get(id(t))
        if pair is not None and pair[0]() is t and (found := pair[1]()) is not None:
            return found
        if shape_env is not None and shape_env is not fake_mode.shape_env:
            raise ArgumentError(
                "from_real_tensor: expected the ShapeEnv of the mode, got another one; give it to the mode, as "
                "FakeTensorMode(shape_env=...)"
            )
        if static_shapes is None:
            static_shapes = shape_env is None
        if static_shapes and not make_constant and type(t) in PLAIN_TYPES and not _torch.has_transforms():
            storage = _find_whole_storage(t)
            if storage is not None:
                return self._convert_whole(fake_mode, t, storage)
        if not isinstance(t, torch.Tensor):
            raise TypeError(
                f"from_tensor: expected a tensor, got {t!r:.80} of type {type(t).__name__}. "
                "Use from_module for a module; numbers and strings need no stand-in"
            )
        options: Any = {
            "static_shapes": static_shapes,
            "source": source,
            "symbolic_context": symbolic_context,
        }
        if _torch.is_functorch_wrapped(t):
            inner, wrap = _torch.split_wrapper(t)
            wrapped: FakeTensor = wrap(self.from_real_tensor(fake_mode, inner, make_constant, **options))
            return wrapped
        if _torch.has_transforms():
            with (
                _torch.no_transforms()
            ):  # operations on the stand-in are not part of the transformed function
                return self.from_real_tensor(fake_mode, t, make_constant, **options)
        is_static = _is_static(fake_mode, t, static_shapes, symbolic_context)
        if is_static and not make_constant and type(t) in PLAIN_TYPES:
            storage = _find_whole_storage(t)
            if storage is not None:
                return self._convert_whole(fake_mode, t, storage)
        wanted = _ConversionRequest(static_shapes, source, symbolic_context)
        if t.is_inference() or torch.is_inference_mode_enabled() or _torch.has_modes():
            with _torch.no_modes(), _torch.inference_mode(t.is_inference()):
                fake = self._convert(fake_mode, t, wanted)
        else:  # entering these costs as much as the conversion
            fake = self._convert(fake_mode, t, wanted)
        self.set_tensor_memo(t, fake)
        if make_constant:
            self.read_values(fake_mode, t, fake)
        if source is None and not fake_mode.is_hooked and not self.copy_data:
            return fake
        return self._finish(fake_mode, t, fake, source, static_shapes)

    def _finish(
        self, mode: FakeTensorMode, t: torch.Tensor, fake: FakeTensor, source: object = None,
        static_shapes: bool | None = None,
    ) -> FakeTensor:  # fmt: skip
        """Do what options and switches ask for with a new stand-in."""
        if mode.is_hooked and type(fake) is FakeTensor:
            look_at(mode, fake, "FakeTensorMode.from_tensor")
        if self.copy_data and type(fake) is FakeTensor and type(t) is not FakeTensor:
            fake.real_tensor = self._copy(t)
        if source is not None and not self.export and not _is_static(mode, t, static_shapes, None):
            make_symbol_of_number(mode, t, fake, source)
        return fake

    def _copy(self, t: torch.Tensor) -> torch.Tensor:
        """A copy of a real tensor; views of one storage have one copy of it."""
        with _torch.no_modes(), _torch.inference_mode(False), _torch.grad_mode(False):
            if t.layout is not torch.strided or t.device.type == "meta" or t.is_conj() or t.is_neg():
                return t.detach().clone()
            storage = t.untyped_storage()
            pair = self._copies.get(storage._cdata)
            if pair is None or any(map(_torch.is_expired, pair)):
                copied = storage.clone()
                self._copies[storage._cdata] = (_torch.weak_storage(storage), _torch.weak_storage(copied))
            else:
                copied = _torch.strong_storage(pair[1])
            empty = torch.empty(0, dtype=t.dtype, device=t.device)
            return empty.set_(copied, t.storage_offset(), t.shape, t.stride())

    @staticmethod
    def read_values(fake_mode: FakeTensorMode, t: torch.Tensor, fake: FakeTensor) -> None:
        """The values of a real tensor are those of its stand-in. Of a view, the storage is copied: it has a place there."""
        if type(t) is FakeTensor or t.layout is not torch.strided or t.device.type != "cpu":
            return
        is_whole = t.is_contiguous() and not t.storage_offset()
        if is_whole or t.untyped_storage().nbytes() <= MOST_COMPUTED:
            with _torch.no_modes():
                values = t.detach().clone() if is_whole else copy_storage(t.detach())
            if fake_mode.constant_listeners:
                fake_mode.constant_listeners[-1].register_converted(fake, t, values)
            else:
                fake_mode.remember_literal(fake, values)

    def from_meta_and_device(
        self, fake_mode: FakeTensorMode, t: torch.Tensor, device: torch.device | str, **ignored: object
    ) -> FakeTensor:
        """A stand-in on `device` with the metadata of `t`: the same one for as long as both live."""
        key = id(t), canonical(torch.device(device))
        found = self._recall(t, key)
        if found is None:
            found = self.make_on_device(fake_mode, t, key[1])
            FakeTensorConverter.set_tensor_memo(self, t, found, key)
        return found

    @staticmethod
    def make_on_device(mode: FakeTensorMode, t: torch.Tensor, device: torch.device | str) -> FakeTensor:
        """A new stand-in on `device` with the metadata of `t`."""
        fake = make_new(mode, spec_of_real(t).on(canonical(torch.device(device))))
        fake.requires_grad_(t.requires_grad)
        return fake

    # --- the memo ------------------------------------------------------------------------------------------

    def recall(self, t: torch.Tensor) -> FakeTensor | None:
        """The stand-in of a tensor that was converted before."""
        return self._recall(t, id(t))

    def _recall(self, t: torch.Tensor, key: object) -> FakeTensor | None:
        pair = self._fakes.get(key)
        return pair[1]() if pair is not None and pair[0]() is t else None

    def keep_alive(self, real: torch.Tensor, fake: FakeTensor) -> None:
        """Keep a stand-in that was written to for as long as the real tensor lives: it has the current metadata."""
        self._kept[id(real)] = fake

    def forget(self, real: torch.Tensor) -> None:
        """The next conversion makes another stand-in, on the same memory."""
        self._fakes.pop(id(real), None)
        self._kept.pop(id(real), None)

    # --- conversion --------------------------------------------------------------------------------------

    def _convert_whole(
        self, mode: FakeTensorMode, t: torch.Tensor, storage: torch.UntypedStorage
    ) -> FakeTensor:
        """The fast path for parameters and buffers: leaves that cover their storage."""
        if storage._cdata in self._storages and self._find_fake_storage(storage._cdata) is not None:
            fake = self._convert_with_storage(mode, t, _ConversionRequest(True, None, None))
        else:
            fake = make_new(mode, _whole_spec(t))
            self._remember_storage(storage, _torch.native_storage(fake))
        if t.requires_grad:
            fake.requires_grad_()
            _share_hooks(t, fake)
            if t.grad_dtype != t.dtype:
                fake.grad_dtype = t.grad_dtype
        if type(t) is torch.nn.Parameter:
            fake._is_param = True
        if t.__dict__:
            fake.copy_attributes(t)
        self.set_tensor_memo(t, fake)
        return self._finish(mode, t, fake) if mode.is_hooked or self.copy_data else fake

    def _convert(self, mode: FakeTensorMode, t: torch.Tensor, wanted: _ConversionRequest) -> FakeTensor:
        refuse_unsupported(t, mode)
        if type(t) is FakeTensor and t.fake_mode is mode:
            return t
        if _torch.is_traceable_wrapper_subclass(t):
            return self._convert_wrapper(mode, t, wanted)
        if is_sparse(t):
            fake = convert_sparse(mode, t)
        else:
            fake = self._convert_with_storage(mode, t, wanted)
        return self._copy_autograd_state(mode, t, fake)

    def _convert_with_storage(
        self, mode: FakeTensorMode, t: torch.Tensor, wanted: _ConversionRequest
    ) -> FakeTensor:
        """A stand-in on the fake storage that stands for the real one: views of one storage stay views of one storage."""
        spec = wanted.spec(mode, t)
        real_storage = t.untyped_storage()
        storage = self._find_fake_storage(real_storage._cdata)
        if storage is None:
            everything = TensorSpec((real_storage.nbytes(),), dtype=torch.uint8, device=spec.device)
            base = make_new(mode, everything)
            self._remember_storage(real_storage, _torch.native_storage(base))
        else:
            base = make_new(mode, TensorSpec((0,), dtype=torch.uint8, device=spec.device))
            _torch.share_storage(base, storage)
        return make_view(mode, base, spec)

    def _remember_storage(self, real: Any, storage: object) -> None:
        if len(self._storages) >= self._sweep_at:
            for key, pair in list(self._storages.items()):
                if any(map(_torch.is_expired, pair)):
                    del self._storages[key]
            self._sweep_at = max(SWEEP_FIRST_AT, 2 * len(self._storages))
        self._storages[real._cdata] = (_torch.weak_storage(real), _torch.weak_storage(storage))

    def _find_fake_storage(self, address: int) -> Any:
        pair = self._storages.get(address)
        if pair is None:
            return None
        if _torch.is_expired(pair[0]) or _torch.is_expired(pair[1]):
            del self._storages[address]
            return None
        return _torch.strong_storage(pair[1])

    def _copy_autograd_state(self, mode: FakeTensorMode, t: torch.Tensor, fake: FakeTensor) -> FakeTensor:
        """Give a stand-in the autograd state of the real tensor: view and base, requires_grad, leaf or not, gradient."""
        if not t.is_inference() and t._is_view() and not fake._spec.is_symbolic:
            fake = self._make_autograd_view(mode, t, fake)
        if t.requires_grad and not fake.requires_grad:
            fake.requires_grad_()
            if not t.is_leaf:  # gets a `grad_fn`
                with _torch.grad_mode(True):
                    fake = _torch.as_result(fake)
        if isinstance(t, torch.nn.Parameter):
            fake._is_param = True
        if type(fake) is FakeTensor:
            fake.copy_attributes(t)
        if t.is_leaf and t.requires_grad:
            _share_hooks(t, fake)
            if fake.is_leaf and t.grad_dtype != t.dtype:
                fake.grad_dtype = t.grad_dtype
        if t.is_leaf and t.grad is not None:
            fake.grad = self.from_real_tensor(mode, t.grad, static_shapes=mode.static_shapes)
        return fake

    def _make_autograd_view(self, mode: FakeTensorMode, t: torch.Tensor, fake: FakeTensor) -> FakeTensor:
        """Make it a view of the stand-in for its base: they share a version counter, and gradients flow to the base.

        Where no operator makes such a view, it stays a tensor on the same storage.
        """
        real_base: Any = t._base
        is_same_storage = _torch.storage_id(real_base) == _torch.storage_id(t)
        is_same_kind = t.dtype == real_base.dtype or t.is_leaf or t.is_complex() < real_base.is_complex()
        if not is_same_storage or not is_same_kind:
            return fake
        base: Any = self.from_real_tensor(mode, real_base, static_shapes=True)
        if base._spec.is_symbolic:
            return fake
        with _torch.grad_mode(False), mode:
            if not t.is_leaf and not base.requires_grad:
                base = base.view_as(base).requires_grad_()  # the view at which gradients start is gone
            with _torch.grad_mode(not t.is_leaf):
                return _view_like(base, t)

    def _convert_wrapper(self, mode: FakeTensorMode, t: torch.Tensor, wanted: _ConversionRequest) -> Any:
        """Convert a wrapper subclass: the same wrapper around stand-ins for its inner tensors."""
        names, context = _torch.flatten_wrapper(t)
        parts = {name: getattr(t, name) for name in names}
        tensors = {name: part for name, part in parts.items() if isinstance(part, torch.Tensor)}
        inner = {
            name: self.from_real_tensor(mode, part, **wanted.for_inner_tensor(t, name, part))
            for name, part in tensors.items()
        }
        # If an inner tensor has the same sizes, the wrapper takes over its symbols.
        geometry = (t.shape, t.stride())
        alike = next(
            (inner[name] for name, part in tensors.items() if (part.shape, part.stride()) == geometry), t
        )
        wrapper = _torch.unflatten_wrapper(type(t), {**parts, **inner}, context, alike.shape, alike.stride())
        if t.is_leaf and wrapper.requires_grad != t.requires_grad:
            wrapper.requires_grad_(t.requires_grad)
        if isinstance(t, torch.nn.Parameter):
            wrapper._is_param = True
        return wrapper


PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
MOST_SPECS = 10_000
_whole_specs: dict[Any, TensorSpec] = {}


def _find_whole_storage(t: torch.Tensor) -> Any:
    """The storage of a contiguous leaf that covers it: fully described by its spec and `requires_grad`. None for others."""
    storage = t.untyped_storage() if _torch.is_ordinary(t) else None
    is_whole = (
        storage is not None
        and t.is_contiguous()
        and t.storage_offset() == 0  # matters only without elements
        and t.nbytes == storage.nbytes()
        and t.is_leaf
        and not t._is_view()
        and t.grad is None
        and "_is_buffer" not in t.__dict__
        and not torch.is_inference_mode_enabled()
        and not _torch.has_modes()
    )
    return storage if is_whole else None


def _share_hooks(t: Any, fake: Any) -> None:
    """Give a stand-in the hooks of a leaf (`register_hook`): gradients are what they make of them."""
    if t._backward_hooks is not None:
        fake._backward_hooks = t._backward_hooks
    if t._post_accumulate_grad_hooks is not None:
        fake._post_accumulate_grad_hooks = t._post_accumulate_grad_hooks


def _whole_spec(t: torch.Tensor) -> TensorSpec:
    """The spec of such a tensor, memoised by shape, dtype and device."""
    key = t.shape, t.stride(), t.dtype, t.device
    spec = _whole_specs.get(key)
    if spec is None:
        if len(_whole_specs) >= MOST_SPECS:
            _whole_specs.clear()
        spec = _whole_specs[key] = spec_of_real(t)
    return spec


def _view_like(base: Any, t: torch.Tensor) -> Any:
    """The view of the stand-in `base` that corresponds to the real view `t`."""
    if base.dtype != t.dtype:
        largest = max(base.itemsize, t.itemsize)
        count = base.untyped_storage().nbytes() // largest * largest // base.itemsize
        if t.dtype.is_floating_point and base.dtype == t.dtype.to_complex():
            base = torch.view_as_real(base)
        elif base.is_floating_point() and t.dtype == base.dtype.to_complex():
            base = torch.view_as_complex(base.as_strided((count // 2, 2), (2, 1), 0))
        else:
            base = base.as_strided((count,), (1,), 0).view(t.dtype)
    view = base.as_strided(t.shape, t.stride(), t.storage_offset())
    if t.is_conj():
        view = view.conj()
    return _torch.negative_view(view) if t.is_neg() else view


def spec_of_real(t: torch.Tensor) -> TensorSpec:
    shape, stride, offset = tuple(t.shape), t.stride(), t.storage_offset()
    if any(
        isinstance(number, torch.SymInt) for number in (*shape, *stride, offset)
    ):  # a meta tensor may have symbols
        shape, stride, offset = (
            tuple(map(from_torch, shape)),
            tuple(map(from_torch, stride)),
            from_torch(offset),
        )
    return TensorSpec(
        shape, stride, offset, dtype=t.dtype, device=canonical(t.device),
        conj=t.is_conj(), neg=t.is_neg(),
    )  # fmt: skip


def refuse_unsupported(t: torch.Tensor, mode: FakeTensorMode) -> None:
    if type(t) is FakeTensor and t._spec.is_symbolic and t.fake_mode.shape_env is not mode.shape_env:
        raise with_line(
            MixedTensorsError("expected a tensor of this ShapeEnv, got a stand-in of another FakeTensorMode and ShapeEnv"),
            "FakeTensorMode.from_tensor", t._spec, "give both modes the same ShapeEnv",
        )  # fmt: skip
    reason = _why_unsupported(t)
    if reason:
        raise with_line(
            UnsupportedFakeTensorException(f"this tensor can't be converted to a stand-in: {reason}"),
            "FakeTensorMode.from_tensor", f"a tensor of {t.dim()} dimensions, {t.dtype}",
            "convert it to a plain tensor first, or keep it out of the program that runs on stand-ins",
        )  # fmt: skip


def _why_unsupported(t: torch.Tensor) -> str:
    if t.is_quantized:
        return "quantised tensors are not supported"
    if t.is_nested and not _torch.is_traceable_wrapper_subclass(t):
        return "nested tensors of strided layout are not supported: use layout=torch.jagged"
    if t.is_mkldnn:
        return "tensors in MKL-DNN layout are not supported: call .to_dense() first"
    if any(name is not None for name in getattr(t, "names", ())):
        return "named tensors are not supported: drop the names with .rename(None)"
    return ""


# --- Specs with symbolic sizes for real tensors -------------------------------------------------------------


def symbolic_spec(env: Any, t: torch.Tensor, source: object, context: object) -> TensorSpec:
    """The spec of a real tensor with symbols of this environment for dynamic sizes."""
    name, shape, stride = symbolic_sizes(env, t, source, context)
    env.add_input(name, shape, stride, t.storage_offset())
    return TensorSpec(
        shape,
        stride,
        t.storage_offset(),
        dtype=t.dtype,
        device=canonical(t.device),
        conj=t.is_conj(),
        neg=t.is_neg(),
    )


def _register_number_handler(
    name: str, of_spec: Callable[[TensorSpec], object], of_tensor: Callable[[torch.Tensor], object]
) -> None:
    """Register the handlers of an operator with which C++ reads a size as a plain integer: it is specialised, with a
    guard."""

    @handler(name)
    def read(mode: object, func: object, args: Any, kwargs: object) -> Any:
        return of_spec(args[0]._spec)

    @real_handler(name)
    def read_wrapper(mode: object, func: object, args: Any, kwargs: object) -> Any:
        """The same for functorch wrappers around a stand-in."""
        (tensor,) = args
        return of_tensor(tensor) if _torch.is_functorch_wrapped(tensor) else NotImplemented


_register_number_handler(
    "size", lambda spec: list(map(int, spec.shape)), lambda tensor: list(map(int, tensor.shape))
)
_register_number_handler(
    "stride", lambda spec: list(map(int, spec.stride)), lambda tensor: list(map(int, tensor.stride()))
)
_register_number_handler("numel", lambda spec: int(spec.numel), lambda tensor: int(tensor.numel()))
_register_number_handler(
    "storage_offset", lambda spec: int(spec.offset), lambda tensor: int(tensor.storage_offset())
)
