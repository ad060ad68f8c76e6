"""FakeTensor: a tensor with everything but its data."""

from __future__ import annotations

import sys
import weakref
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.overrides import handle_torch_function, has_torch_function_unary

from understudy import _torch
from understudy._torch.tensors import RaggedNode
from understudy.errors import NoDataError, NotProvidedError
from understudy.fake import initial_values
from understudy.fake.native import canonical, native
from understudy.fake.values.determined import is_counted_apart, record_for_alias, storage_of
from understudy.patching import ENGINE, STORAGES
from understudy.spec import TensorSpec
from understudy.spec.error_context import with_line

if TYPE_CHECKING:
    from understudy.fake.mode import FakeTensorMode
    from understudy.fake.values.determined import DeterminedContents
    from understudy.ops.traits.ranges import ValueRange


def count_writes(fake: FakeTensor) -> tuple[int, int]:
    """Two numbers of which one changes with each write to the tensor: its version counter, and the writes that no version
    counter counts (`x.data.add_(1)`)."""
    # The descriptor for memos, a name of torch's, may be used by other classes.
    hidden = getattr(fake.fake_mode, "uncounted_writes", 0)
    if hidden and (storage := storage_of(fake)) is not None:
        hidden = getattr(storage, "last_hidden_write", 0)
    return fake._version, hidden


def make_memo(fake: FakeTensor, value: object) -> Any:
    """A number that was read from a tensor's data, with its writes so far. None where these are not counted: in inference
    mode, and for `x.data`."""
    if value is None or torch.is_inference_mode_enabled() or fake.is_inference() or is_counted_apart(fake):
        return None
    return value, count_writes(fake), fake.fake_mode.epoch


def recall(fake: FakeTensor, memo: tuple[object, ...] | None) -> Any:
    """The number of a memo; None once the tensor was written to, or the mode's epoch has changed."""
    if memo is None or fake.is_inference():
        return None
    value, writes, epoch = memo
    return value if (writes, epoch) == (count_writes(fake), fake.fake_mode.epoch) else None


class SymNumberMemoDescriptor:
    """An attribute of stand-ins that memoises a number read from their data; None once the memo is out of date.

    `is_nested_int`: the size of a jagged tensor's rows, which never goes out of date.
    """

    def __init__(self, *, is_nested_int: bool = False) -> None:
        self._is_nested_int = is_nested_int

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"
        setattr(owner, self._name, None)

    def __get__(self, fake: Any, owner: type | None = None) -> Any:
        if fake is None:
            return self
        memo = getattr(fake, self._name)
        return memo if self._is_nested_int else recall(fake, memo)

    def __set__(self, fake: Any, value: Any) -> None:
        setattr(fake, self._name, value if self._is_nested_int else make_memo(fake, value))


MOST_CHECKED_INDICES = 1 << 14
"""Determined indices are checked for being in bounds up to this many elements."""
INDEX_DTYPES = frozenset({torch.int64, torch.int32, torch.int16, torch.int8})


def _is_on(device_type: str) -> Any:
    """A property: whether a fake is on a device of this type."""

    def is_on(self: FakeTensor) -> bool:
        return self._spec.device.type == device_type

    return property(is_on)


class FakeTensor(torch.Tensor):
    """A `torch.Tensor` with shape, strides, offset, dtype, device and aliasing, but no data.

    Made by `FakeTensorMode.from_tensor`, by factories inside the mode, and by operators on other fakes.
    `FakeTensor(mode, elem, device)` takes the metadata of `elem`.
    """

    # Read and set at every operator. Without them in its dict, most stand-ins never need one.
    __slots__ = ("_spec", "fake_mode")

    _spec: TensorSpec
    _determined: DeterminedContents | None = None
    _range: tuple[ValueRange, Any] | None = None
    """The range of its values where they are not determined, and the writes so far, for which it holds."""
    fake_mode: FakeTensorMode
    real_tensor: torch.Tensor | None = None
    _is_pinned = False
    _has_symbolic_indexing = False
    """Whether `enable_symbolic_indexing` was called."""
    _kind: Any = None
    """The class of the tensor that it stands for, if that is a subclass defined by the program."""
    _node: Any = None
    """The graph node that produced it, while a graph is recorded."""
    pytype: Any = None
    dispatch_keys: Any = None
    """Attributes of torch's own fakes, which torch's compiler reads."""
    nonzero_memo = SymNumberMemoDescriptor()
    item_memo = SymNumberMemoDescriptor()
    unique_memo = SymNumberMemoDescriptor()
    unique_consecutive_memo = SymNumberMemoDescriptor()
    _size_memos: dict[Any, Any] | None = None
    nested_int_memo = SymNumberMemoDescriptor(is_nested_int=True)
    """The symbolic size of the ragged dimension of a jagged tensor with these offsets."""

    __torch_function__ = _torch.no_torch_function

    @staticmethod
    def __new__(
        cls: type[FakeTensor], fake_mode_or_elem: Any = None, elem: torch.Tensor | None = None, device: Any = None,
        constant: torch.Tensor | None = None, real_tensor: torch.Tensor | None = None, pytype: Any = None,
        dispatch_keys: Any = None, *, fake_mode: FakeTensorMode | None = None, fake_device: Any = None,
        _fake_device: Any = None, requires_grad: bool | None = None, _is_param: bool = False, **state: object,
    ) -> FakeTensor:  # fmt: skip
        """`FakeTensor(mode, elem, device)`, or from the attributes of another: `FakeTensor(elem, **vars(fake))`. A stand-in
        as `elem` has a mode and a device already, and other keywords are attributes that the program has given to its
        parameter: `type(parameter)(stand_in, **vars(parameter))`."""
        if cls is not FakeTensor:
            raise NotProvidedError(
                f"{cls.__name__}: FakeTensor can't be subclassed, because results of operators are plain FakeTensors. "
                "Override FakeTensorMode.dispatch, or set attributes of stand-ins"
            )
        mode, elem = mode_and_tensor(fake_mode_or_elem, fake_mode, elem)
        unknown = sorted(
            name for name in state if name not in STATE and name not in FakeTensor.__annotations__
        )
        if unknown and type(fake_mode_or_elem) is not FakeTensor:
            raise TypeError(
                f"FakeTensor: expected the keywords of torch's class, got an unexpected keyword argument {unknown[0]!r}"
            )
        if device is None and fake_device is None and _fake_device is None and type(elem) is FakeTensor:
            device = elem.device
        fake: FakeTensor = mode.fake_tensor_converter.make_on_device(
            mode, elem, only_device(device=device, fake_device=fake_device, _fake_device=_fake_device)
        )
        if requires_grad is not None:
            fake.requires_grad_(requires_grad)
        if constant is not None:
            mode.remember_literal(fake, constant)
        given = {"real_tensor": real_tensor, "pytype": pytype, "dispatch_keys": dispatch_keys}
        vars(fake).update({name: value for name, value in given.items() if value is not None})
        vars(fake).update({name: state[name] for name in unknown})
        if _is_param:
            fake._is_param = True
        return fake

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: object, types: object, args: object = (), kwargs: object = None
    ) -> Any:
        """Outside of any mode, operators are dispatched to the mode of the first fake."""
        mode = find_mode(args, kwargs)
        if mode is None:
            return NotImplemented
        return mode.__torch_dispatch__(func, types, args, kwargs or {})

    @staticmethod
    def from_tensor(t: torch.Tensor, fake_mode: FakeTensorMode) -> FakeTensor:
        return fake_mode.from_tensor(t)

    # --- class and spec ---------------------------------------------------------------------------------------

    def _claimed_class(self) -> Any:
        """torch, transformers and others choose their tracing-safe paths by asking `isinstance` of torch's class.

        `nn.Module` asks too, when it converts parameters, and would then exchange tensors instead of setting their
        data, which fails for a tensor that anything else refers to. Setting the data always works here.
        """
        frame = sys._getframe(1)
        if frame.f_code.co_name in _torch.ASKERS_FOR_CLASS and _torch.asks_for_own_class(frame):
            return FakeTensor
        return self._kind or _torch.torch_fake_tensor_class()

    def _claim_class(self, kind: object) -> None:
        if kind is not _torch.torch_fake_tensor_class():
            object.__dict__["__class__"].__set__(self, kind)

    __class__ = property(_claimed_class, _claim_class)

    def copy_attributes(self, real: torch.Tensor) -> None:
        """Copy the attributes that a program has set on a tensor, and claim its class if it is a subclass of the program."""
        marks = vars(real).items()
        if type(real) is FakeTensor:
            vars(self).update({name: value for name, value in marks if name in COPIED_ATTRIBUTES})
        else:
            vars(self).update({name: value for name, value in marks if not name.startswith("_dynamo")})
            self.claim_class(type(real))

    def claim_class(self, kind: Any) -> bool:
        """Claim to be an instance of this class, and take over its methods. False if the class has its own
        `__torch_function__`."""
        function = kind.__torch_function__
        if kind in TORCH_CLASSES or getattr(function, "__func__", function) not in DEFAULT_TORCH_FUNCTIONS:
            return False
        self._kind = kind
        own = kind.__mro__[: kind.__mro__.index(torch.Tensor)]
        members = {name: value for owner in reversed(own) for name, value in vars(owner).items()}
        for name, member in members.items():
            if isinstance(member, FunctionType) and not name.startswith("__"):
                vars(self)[name] = MethodType(member, self)
        return True

    def as_subclass(self, kind: Any) -> Any:
        """A fake can't be an object of another class; it can claim to be one. torch also calls this on results of
        operators on tensors of a class without a dispatch of its own."""
        if not issubclass(FakeTensor, kind):
            claimed: Any = torch.ops.aten.alias.default(self)
            if claimed.claim_class(kind):
                return claimed
            from understudy.fake.subclasses import wrap_stand_in  # why: it imports this module

            if (wrapped := wrap_stand_in(claimed, kind)) is not None:
                return wrapped
        return super().as_subclass(kind)

    @property
    def spec(self) -> TensorSpec:
        return self._spec

    # --- device -------------------------------------------------------------------------------------

    # Function modes see `x.device`, `x.to` and `copy.deepcopy(x)` as they do for torch.Tensor: these check for a mode first.

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        if has_torch_function_unary(self):
            return _torch.read_in_function_mode(FakeTensor.device.__get__, self)
        return META if self.fake_mode.in_kernel_invocation else self._spec.device

    @property
    def fake_device(self) -> torch.device:
        return self._spec.device

    @fake_device.setter
    def fake_device(self, device: torch.device | str) -> None:
        """Moves the tensor, as `x.data = x.data.to(device)` does."""
        self.data = self.fake_mode.fake_tensor_converter.make_on_device(self.fake_mode, self.detach(), device)

    @property
    def _fake_device(self) -> torch.device:
        return self._spec.device

    def get_device(self) -> int:
        index = self._spec.device.index
        return -1 if index is None else index

    is_cpu = _is_on("cpu")
    is_cuda = _is_on("cuda")
    is_meta = _is_on("meta")
    is_xpu = _is_on("xpu")
    is_mps = _is_on("mps")

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if has_torch_function_unary(self):
            return handle_torch_function(FakeTensor.to, (self,), self, *args, **kwargs)
        args = tuple([native_argument(a) for a in args])
        if "device" in kwargs:
            kwargs["device"] = native_argument(kwargs["device"])
        return torch.Tensor.to(self, *args, **kwargs)

    def type(self, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if dtype is not None:
            parts = getattr(dtype, "__module__", ""), getattr(dtype, "__name__", "")
            name = dtype if isinstance(dtype, str) else ".".join(parts)
            if name.startswith("torch.cuda."):  # the oldest way to name a dtype on a CUDA device
                wanted = getattr(torch, name.rpartition(".")[2]).dtype
                return self.to(torch.device("cuda"), wanted, non_blocking=non_blocking)
            return torch.Tensor.type(self, dtype, non_blocking, **kwargs)
        return torch.Tensor.type(self).replace("torch.meta.", f"torch.{self._spec.device.type}.")

    def new(self, *args: Any, **kwargs: Any) -> Any:
        """The oldest constructor: of sizes, of data, or, for sparse tensors, of indices and values."""
        if self._spec.layout is torch.sparse_coo:
            return torch.sparse_coo_tensor(*args, dtype=self.dtype, check_invariants=False, **kwargs)
        if len(args) == 1 and isinstance(args[0], (list, tuple)) and not isinstance(args[0], torch.Size):
            return self.new_tensor(args[0])
        if len(args) == 1 and isinstance(args[0], torch.Tensor):
            return args[0].detach()
        if len(args) == 1 and isinstance(args[0], (torch.TypedStorage, torch.UntypedStorage)):
            return self.new_empty((args[0].nbytes() // self.element_size(),))
        return self.new_empty(
            args[0] if len(args) == 1 and isinstance(args[0], torch.Size) else (args or (0,))
        )

    def cuda(
        self, device: Any = None, non_blocking: bool = False, memory_format: Any = torch.preserve_format
    ) -> Any:
        where = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
        return self.to(where, non_blocking=non_blocking, memory_format=memory_format)

    def xpu(
        self, device: Any = None, non_blocking: bool = False, memory_format: object = torch.preserve_format
    ) -> Any:
        where = torch.device("xpu", device) if isinstance(device, int) else torch.device(device or "xpu")
        return self.to(where, non_blocking=non_blocking, memory_format=memory_format)

    def cpu(self, memory_format: object = torch.preserve_format) -> Any:
        return self.to(torch.device("cpu"), memory_format=memory_format)

    def pin_memory(self, device: object = None) -> Any:
        if self._spec.device.type != "cpu":
            return torch.Tensor.pin_memory(self)
        pinned: Any = self if self._is_pinned else self.clone()
        pinned._is_pinned = True
        return pinned

    def is_pinned(self, device: object = None) -> bool:
        return self._is_pinned

    def new_tensor(  # type: ignore[override]
        self, data: object, *, dtype: Any = None, device: Any = None, **options: Any
    ) -> torch.Tensor:
        device = self._spec.device if device is None else device
        dtype = self._spec.dtype if dtype is None else dtype
        with self.fake_mode:
            if isinstance(data, torch.Tensor):
                copy = data.detach().to(device, dtype, copy=True)
                return copy.requires_grad_(options.get("requires_grad", False))
            return torch.tensor(data, dtype=dtype, device=device, **options)

    def tensor_split(self, *args: Any, **kwargs: Any) -> Any:
        return torch.tensor_split(
            self, *args, **kwargs
        )  # which is patched: C++ reads a tensor of split points from memory

    # --- storage and determined values ---------------------------------------------------------------------------

    @property
    def nbytes(self) -> Any:  # type: ignore[override]
        if not self._spec.is_symbolic:
            return torch.Tensor.nbytes.__get__(self)  # type: ignore[attr-defined]
        return self.numel() * self._spec.dtype.itemsize

    @property
    def data(self) -> torch.Tensor:
        alias = _torch.native_data.__get__(self)
        if type(alias) is FakeTensor:
            alias._determined, alias._range = record_for_alias(self), None
            if self.real_tensor is not None:
                alias.real_tensor = self.real_tensor.detach()
        return alias

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        if type(other) is not FakeTensor:
            raise with_line(
                NoDataError("the data of a stand-in tensor can only be set to another stand-in"),
                "Tensor.data.__set__", f"{self._spec}, {type(other).__name__}", "convert it with mode.from_tensor(...)",
            )  # fmt: skip
        self.fake_mode.adopt(self, other)

    def untyped_storage(self) -> Any:
        ENGINE.begin_with_modes(STORAGES)
        storage: Any = _torch.hand_out_storage(self)
        storage.determined = record_for_alias(
            self
        )  # read by `set_`, when another tensor is put on this storage
        storage.is_of_fake = True
        if "is_shared" not in vars(
            storage
        ):  # C++ would look at memory that is not there, and end the process
            storage.is_shared = _return_true if self._spec.device.type == "cuda" else _return_false
        if (
            self._spec.device.type == "cpu" and storage.device.type == "meta"
        ):  # it was resized, and C++ moved it
            storage.resized_of = weakref.ref(self)
        return storage

    @property
    def constant(self) -> torch.Tensor | None:
        """The value of a one-element tensor that was made from a literal."""
        known = self._determined
        if known is None or known.content is None or not known.literal or self._spec.numel != 1:
            return None
        return self.fake_mode.value_of(self)

    def extreme_values(self, without: int | None = None) -> tuple[Any, Any] | None:
        """The minimum and maximum of determined integers; None if they are not determined, too many, or none."""
        spec = self._spec
        if spec.dtype not in INDEX_DTYPES:
            return None
        found = self.fake_mode.extremes_without_guards(self)
        if found is not None:
            return None if found == (without, without) else found
        if spec.is_symbolic or not 0 < spec.numel <= MOST_CHECKED_INDICES:
            return None
        values = self.fake_mode.value_without_guards(self)
        if values is None:
            return None
        with _torch.PastDispatch():
            kept = values if without is None else values[values != without]
            if kept.numel() == 0:
                return None
            least, most = torch.aminmax(kept)
            return least.item(), most.item()

    def recall_size(self, question: object) -> Any:
        """Return the memoised data-dependent size of an operator's result on this tensor, or None."""
        return recall(self, (self._size_memos or {}).get(question))

    def remember_size(self, question: tuple[object, ...], size: int | torch.SymInt) -> None:
        self._size_memos = {**(self._size_memos or {}), question: make_memo(self, size)}

    def get_nested_int(self, *, coeff: int = 1) -> Any:
        """Called by jagged tensors on their offsets."""
        if self.nested_int_memo is None:
            self.nested_int_memo = _torch.new_nested_int(RaggedNode)
        return self.nested_int_memo * coeff

    # --- methods that skip the dispatcher where the result is the same --------------------------------------------

    normal_ = initial_values.normal_
    uniform_ = initial_values.uniform_
    fill_ = initial_values.fill_
    zero_ = initial_values.zero_

    # --- methods that need data ---------------------------------------------------------------------------------

    def _refuse(
        self, what: str, hint: str = "work on its metadata, or run this part on real tensors"
    ) -> NoReturn:
        raise with_line(
            NoDataError(f"{what}(): {self._spec} is a stand-in and has no data"), what, self._spec, hint
        )

    def tolist(self) -> Any:
        return self.fake_mode.tolist(self)

    def numpy(self, *, force: bool = False) -> Any:
        if not force and (self.requires_grad or self._spec.device.type != "cpu"):
            self._refuse(
                "Tensor.numpy", "call .detach() and .cpu() first, as for real tensors, or numpy(force=True)"
            )
        known = self.fake_mode.values_for_numpy(self)
        if known is None:
            self._refuse("Tensor.numpy")
        with _torch.PastDispatch():
            return known.numpy(force=force)

    def __array__(self, dtype: object = None, copy: object = None) -> Any:
        array = self.numpy(force=True)
        return array if dtype is None else array.astype(dtype)

    def data_ptr(self) -> int:
        if has_torch_function_unary(self):  # a function mode may answer for tensors without data
            address = int(handle_torch_function(torch.Tensor.data_ptr, (self,), self))
            if address != self.storage_offset() * self.element_size():  # C++ counts from 0
                return address
        return self._refuse("Tensor.data_ptr")

    def const_data_ptr(self) -> NoReturn:
        self._refuse("Tensor.const_data_ptr")

    def __dlpack__(self, **kwargs: object) -> NoReturn:
        self._refuse("Tensor.__dlpack__")

    def __dlpack_device__(self) -> NoReturn:
        self._refuse("Tensor.__dlpack_device__")

    @property
    def __cuda_array_interface__(self) -> NoReturn:
        raise AttributeError("__cuda_array_interface__: a stand-in has no data")

    def apply_(self, function: object) -> NoReturn:  # C++ would read memory that is not there
        self._refuse("Tensor.apply_")

    def share_memory_(self) -> FakeTensor:
        storage: Any = _torch.native_storage(self)
        storage.is_shared = _return_true
        return self

    def is_shared(self) -> bool:
        """As on real tensors: always on CUDA devices, on the CPU after `share_memory_`."""
        return (
            self._spec.device.type == "cuda"
            or vars(_torch.native_storage(self)).get("is_shared") is _return_true
        )

    # --- copies ------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, object]) -> FakeTensor:
        if has_torch_function_unary(self):
            return handle_torch_function(FakeTensor.__deepcopy__, (self,), self, memo)
        return self.fake_mode.deep_copy(self, memo)

    def __copy__(self) -> FakeTensor:
        return self.fake_mode.shallow_copy(self)

    def __reduce_ex__(self, protocol: object) -> Any:
        return self.fake_mode.reduce(self)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        spec = self._spec
        dtype = str(spec.dtype).removeprefix("torch.")
        parts = [f"{tuple(spec.shape)}", f"dtype={dtype}", f"device='{spec.device}'"]
        if spec.layout is torch.strided and not spec._is_plainly_contiguous:
            parts.append(f"stride={tuple(spec.stride)}")
        if spec.layout is not torch.strided:
            parts.append(f"layout={spec.layout}")
        if self.grad_fn is not None:
            parts.append(f"grad_fn=<{type(self.grad_fn).__name__}>")
        elif self.requires_grad:
            parts.append("requires_grad=True")
        name = "FakeParameter" if getattr(self, "_is_param", False) else "FakeTensor"
        return f"{name}({', '.join(parts)})"

    __str__ = __repr__

    def __format__(self, format_spec: str) -> str:
        mode = self.fake_mode
        # Without a format, a number that would be an error, or a new symbol, is not read.
        if self._spec.shape or not (
            format_spec or mode.answers is not None or mode.value_of(self) is not None
        ):
            return object.__format__(
                self, format_spec
            )  # as on real tensors: only a single number has formats
        return format(self.item(), format_spec)


META = torch.device("meta")
STATE = frozenset(
    ("nonzero_memo", "item_memo", "unique_memo", "unique_consecutive_memo", "nested_int_memo", "_debug_trace")
).union(
    f"_{name}_memo{end}"
    for name in ("nonzero", "item", "unique", "unique_consecutive", "nested_int")
    for end in ("", "_vc", "_epoch")
)  # fmt: skip
"""Attributes of a stand-in that belong to it alone: a new one is not given them."""


def mode_and_tensor(first: Any, mode: Any, elem: Any) -> Any:
    """The mode and the tensor among the arguments of `FakeTensor`, which are given in one of two orders."""
    if isinstance(first, torch.Tensor):
        if elem is not None:
            raise TypeError(
                "FakeTensor: expected (fake_mode, elem, ...) or (elem, fake_mode=..., ...), got two tensors"
            )
        elem = first
    elif first is not None:
        if mode is not None and mode is not first:
            raise TypeError("FakeTensor: expected one fake_mode, got conflicting fake_mode values")
        mode = first
    if mode is None and type(elem) is FakeTensor:
        mode = elem.fake_mode
    for name, value in (("fake_mode", mode), ("elem", elem)):
        if value is None:
            raise TypeError(f"FakeTensor: missing required argument: {name!r}")
    if not hasattr(mode, "fake_tensor_converter"):
        raise TypeError(
            f"FakeTensor: expected a FakeTensorMode or Tensor as the first argument, got {type(mode)}"
        )
    return mode, elem


def only_device(**given: Any) -> torch.device:
    """The device that is given under one or more of several names."""
    devices = {name: canonical(torch.device(value)) for name, value in given.items() if value is not None}
    if not devices:
        raise TypeError("FakeTensor: missing required argument: 'device' (or 'fake_device')")
    if len(set(devices.values())) > 1:
        shown = ", ".join(f"{name}={device}" for name, device in devices.items())
        raise ValueError(f"FakeTensor: expected one device, got conflicting device values: {shown}")
    return next(iter(devices.values()))


def _return_true() -> bool:
    return True


def _return_false() -> bool:
    return False


_torch.allow_foreach(FakeTensor)


TORCH_CLASSES = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor})
DEFAULT_TORCH_FUNCTIONS = frozenset({torch.Tensor.__torch_function__.__func__, _torch.no_torch_function})  # type: ignore[attr-defined]
COPIED_ATTRIBUTES = frozenset({"_is_param", "_is_buffer", "persistent"})


def native_argument(value: object) -> Any:
    """An argument of `.to`: a device, in any of its forms, as C++ has to see it; anything else unchanged."""
    if isinstance(value, torch.device):
        return native(value)
    if isinstance(value, str):
        return native(torch.device(value))
    if type(value) is int:
        return native(torch.device("cuda", value))
    return value


def find_mode(args: Any, kwargs: Any) -> Any:
    for value in (*args, *(kwargs or {}).values()):
        if isinstance(value, (list, tuple)):
            found = find_mode(value, None)
            if found is not None:
                return found
        elif type(value) is FakeTensor:
            return value.fake_mode
    return None
