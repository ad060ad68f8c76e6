"""TensorSpec: all that is known of a tensor without its data.

Specs are interned: equal specs are the same object, so that comparing is `is`, hashing is free, and a
cache key is a tuple of identities.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast
from weakref import WeakValueDictionary

import torch

from understudy.shapes.input_dims import packed_strides
from understudy.shapes.node import Shape, Sizes
from understudy.shapes.sizes import are_packed, is_provably_different, is_provably_equal, is_symbolic


class PlainLayout(NamedTuple):
    """Plain shape, strides and offset, for torch's own functions."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


SHORT_DTYPE = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.uint16: "u16",
    torch.uint32: "u32",
    torch.uint64: "u64",
    torch.bool: "b8",
    torch.complex32: "c32",
    torch.complex64: "c64",
    torch.complex128: "c128",
}
SHORT_DTYPE.setdefault(
    torch.bfloat16.to_complex(), "bc32"
)  # in releases without such a dtype, this is complex64


contiguous_strides = packed_strides
ONLY_INTEGERS = frozenset({int})
product: Callable[[Iterable[Any]], Any] = math.prod


def same_shape(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two shapes (or strides) are equal.

    Provable differences (ranks, sizes) are checked first, so that no unnecessary guard is added.
    """
    if len(a) != len(b):
        return False
    if not (is_symbolic(a) or is_symbolic(b)):
        return tuple(a) == tuple(b)
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if x is not y]
    return not any(is_provably_different(x, y) for x, y in pairs) and all(x == y for x, y in pairs)


class TensorSpec:
    """Shape, stride, offset, dtype, device, layout and the conj and neg bits of a tensor.

    `sparse` holds what a sparse layout adds (see `SparseParts`), None for strided tensors.
    `prepared` and `prepared_no_grad` are memos of the layer that makes tensors from specs, and not part of the identity.
    """

    __slots__ = (
        "__weakref__",
        "_contiguous",
        "_numel",
        "conj",
        "device",
        "dtype",
        "is_symbolic",
        "layout",
        "neg",
        "offset",
        "prepared",
        "prepared_no_grad",
        "shape",
        "sparse",
        "stride",
    )

    shape: Shape
    stride: Shape
    offset: Any
    dtype: torch.dtype
    device: torch.device
    layout: torch.layout
    conj: bool
    neg: bool
    sparse: Any
    prepared: Any
    prepared_no_grad: Any
    is_symbolic: bool
    _numel: Any
    _contiguous: bool | None

    def __new__(
        cls,
        shape: Sequence[Any],
        stride: Sequence[Any] | None = None,
        offset: object = 0,
        *,
        dtype: torch.dtype,
        device: torch.device,
        layout: torch.layout = torch.strided,
        conj: bool = False,
        neg: bool = False,
        sparse: object = None,
    ) -> TensorSpec:
        shape = tuple(shape)
        stride = contiguous_strides(shape) if stride is None else tuple(stride)
        key = (shape, stride, offset, dtype, device, layout, conj, neg, sparse)
        reference = _references.get(key)
        found = None if reference is None else reference()
        if found is not None:
            return found
        self = super().__new__(cls)
        self.shape, self.stride, self.offset = shape, stride, offset
        self.dtype, self.device, self.layout = dtype, device, layout
        self.conj, self.neg, self.sparse = conj, neg, sparse
        self.prepared = self.prepared_no_grad = None
        self.is_symbolic = not ONLY_INTEGERS.issuperset(map(type, (*shape, *stride, offset)))
        self._numel = None
        self._contiguous = None
        with _lock:
            return _interned.setdefault(key, self)

    @property
    def numbers(self) -> PlainLayout:
        """The shape, strides and offset of a tensor that has no symbols."""
        return PlainLayout(*cast("tuple[Any, ...]", (self.shape, self.stride, self.offset)))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> Any:
        if self._numel is None:
            self._numel = product(self.shape)
        return self._numel

    @property
    def is_empty(self) -> bool:
        """Whether there is a size of 0. Each size is checked: a product of symbols can't be decided."""
        return 0 in self.shape

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    @property
    def is_complex(self) -> bool:
        return self.dtype.is_complex

    @property
    def is_contiguous(self) -> bool:
        """Whether it is dense and row-major; strides of dimensions of size 1 do not matter."""
        if self._contiguous is None:
            self._contiguous = is_contiguous(self.shape, self.stride)
        return self._contiguous

    @property
    def _is_plainly_contiguous(self) -> bool:
        """The same without guards, for printing."""
        if not self.is_symbolic:
            return self.is_contiguous
        return all(map(is_provably_equal, self.stride, contiguous_strides(self.shape)))

    def like(
        self,
        shape: Sequence[object] | None = None,
        *,
        stride: Sequence[object] | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> TensorSpec:
        """A new tensor: by default contiguous, with the dtype and device of this one."""
        return TensorSpec(
            self.shape if shape is None else shape,
            stride,
            dtype=dtype or self.dtype,
            device=device or self.device,
        )

    def as_view(
        self,
        shape: Sequence[object],
        stride: Sequence[object],
        offset: object = None,
        *,
        dtype: torch.dtype | None = None,
        conj: bool | None = None,
        neg: bool | None = None,
    ) -> TensorSpec:
        """A view of this tensor's storage: by default with the same offset and bits."""
        return TensorSpec(
            shape,
            stride,
            self.offset if offset is None else offset,
            dtype=dtype or self.dtype,
            device=self.device,
            layout=self.layout,
            conj=self.conj if conj is None else conj,
            neg=self.neg if neg is None else neg,
        )

    def on(self, device: torch.device) -> TensorSpec:
        """This spec on another device."""
        if device == self.device:
            return self
        return TensorSpec(
            self.shape, self.stride, self.offset, dtype=self.dtype, device=device,
            layout=self.layout, conj=self.conj, neg=self.neg, sparse=self.sparse,
        )  # fmt: skip

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (
            self.shape, self.stride, self.offset, self.dtype, self.device,
            self.layout, self.conj, self.neg, self.sparse,
        )  # fmt: skip

    def __copy__(self) -> TensorSpec:
        return self

    def __deepcopy__(self, memo: object) -> TensorSpec:
        return self

    def __str__(self) -> str:
        dtype = SHORT_DTYPE.get(self.dtype) or str(self.dtype).removeprefix("torch.")
        text = f"{dtype}[{', '.join(map(str, self.shape))}]"
        if self.layout is not torch.strided:
            return f"{text}:{str(self.layout).removeprefix('torch.')}@{self.device}"
        if not self._is_plainly_contiguous:
            text += f"~({', '.join(map(str, self.stride))})"
        if not is_provably_equal(self.offset, 0):
            text += f"+{self.offset}"
        if self.conj:
            text += ".conj"
        if self.neg:
            text += ".neg"
        return f"{text}@{self.device}"

    def __repr__(self) -> str:
        return f"<{self}>"


def is_contiguous(shape: Sizes, stride: Sizes) -> bool:
    if is_symbolic((*shape, *stride)):
        return are_packed(shape, stride, range(len(shape) - 1, -1, -1), empty_is_packed=True)
    if 0 in shape:
        return True
    expected: Any = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size == 1:
            continue
        if step != expected:
            return False
        expected = expected * size
    return True


def _rebuild(shape: Any, stride: Any, offset: object, dtype: Any, device: Any, layout: Any,
             conj: bool, neg: bool, sparse: Any) -> TensorSpec:  # fmt: skip
    return TensorSpec(shape, stride, offset, dtype=dtype, device=device, layout=layout,
                      conj=conj, neg=neg, sparse=sparse)  # fmt: skip


_interned: WeakValueDictionary[Any, TensorSpec] = WeakValueDictionary()
_references: Any = _interned.data  # type: ignore[attr-defined]
"""For reading: most specs are new, and `WeakValueDictionary.get` raises and catches an exception for them."""
_lock = threading.Lock()


def spec_of(tensor: object) -> TensorSpec | None:
    """The spec of a stand-in, None for any other tensor. (A DTensor has a `_spec` of another kind.)"""
    spec = getattr(tensor, "_spec", None)
    return spec if type(spec) is TensorSpec else None
