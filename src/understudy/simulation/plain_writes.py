"""Writes that C++ does in place with plain tensors, and out of place while any mode is active.

While a mode is active, C++ allocates a new tensor for the sum of two gradients, for a gradient formula that would
write into zeros, and for the sum of a product and a bias or mask. Without a mode it writes in place. So these calls
are answered as in-place writes.

The first two come straight from autograd's engine: no Python function runs inside of the backward pass. It is a sum of
gradients, except for the first sum of a node whose formula adds on its own account. The last one is of a product that was
made just before, and that Python has no reference to.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from understudy import _torch
from understudy.fake.tensor import FakeTensor
from understudy.ops.registry import record_of
from understudy.ops.traits.writes import PlainWrite, plain_write
from understudy.spec.strides import is_dense

if TYPE_CHECKING:
    from understudy.simulation.storages import ObservedMode

IN_PLACE: dict[int, tuple[PlainWrite, _torch.OpOverload]] = {}
"""Where C++ writes in place, and by which operator: by the identity of the one that it calls while a mode is active."""
for _name, _place in plain_write.items():
    _packet, _, _overload = _name.partition(".")
    IN_PLACE[id(_torch.operator_named(_name))] = (
        _place,
        _torch.operator_named(f"{_packet}_.{_overload}".rstrip(".")),
    )

ADDING_NODES = frozenset(
    "AminmaxBackward0 Atan2Backward0 CholeskyBackward0 CholeskyInverseBackward0 CholeskySolveBackward0 "
    "LinalgCholeskyExBackward0 LinalgDetBackward0 LinalgLstsqBackward0 LinalgLuBackward0 LinalgLuFactorExBackward0 "
    "LinalgLuSolveBackward0 LinalgPinvBackward0 LinalgQrBackward0 LinalgSvdBackward0 LogcumsumexpBackward0 "
    "LuUnpackBackward0 MvlgammaBackward0 NativeGroupNormBackward0 SpecialI1EBackward0 SpecialLogNdtrBackward0 "
    "StdMeanBackward0 TriangularSolveBackward0 VarMeanBackward0".split()
)
"""Nodes of autograd whose formula adds tensors, found by running samples of all operators."""
MASKING_NODES = frozenset({"MaxBackward1", "MinBackward1"})
"""Nodes whose formula joins masks in place: where the largest or smallest of all elements are."""
MOST_NODES = 8192
"""The limit of nodes that are read: torch frees nodes that Python has seen recursively, and some 30,000 in a row exceed the
stack. After that, all sums count as sums of gradients."""
CALL_REFERENCES = 3
"""References of Python to an argument that only C++ owns: the object's own, the call's, and that of this check."""
PASSED_THROUGH = ("torch._ops", "understudy.fake.kernels.autocast")
"""Modules between the engine and a mode: kernels of autocast call the operator again."""


class PlainWrites:
    """The substitutions for one mode."""

    def __init__(self) -> None:
        self._asked = 0
        self._last_adding: int | None = None
        """The number of the last node whose formula has added."""
        self._formula = (-1, -1, -1)
        """For the gradient of a loss of logits: serial numbers of the tensor that its formula writes to, of its
        newest tensor, and of its node."""

    def find(self, mode: ObservedMode, func: _torch.OpOverload, args: tuple[Any, ...]) -> _torch.OpOverload:
        """The operator that C++ would call if no mode were active, from within `__torch_dispatch__`."""
        place, variant = IN_PLACE[id(func)]
        if place is PlainWrite.CONTINUES_FORMULA and self._formula[1] != mode.births:
            return func
        is_temporary = sys.getrefcount(args[0]) <= CALL_REFERENCES
        first = args[0]
        if type(first) is not FakeTensor:
            return func
        if torch.is_grad_enabled() or not _is_called_by_engine(sys._getframe(2)):
            if place is not PlainWrite.ADDS_GRADIENT:
                return func
            is_biased = (
                is_temporary and _is_biased_product(mode, args) and not _is_in_transform(sys._getframe(2))
            )
            return variant if is_biased else func
        if place is PlainWrite.STARTS_FORMULA:
            self._start_formula(mode)
            return func
        if place is PlainWrite.CONTINUES_FORMULA:
            return variant if self._continues_formula(mode, first) else func
        if place is PlainWrite.FILLS_ZEROS:
            return variant if _are_new_zeros(mode, first) else func
        if place is PlainWrite.JOINS_MASKS:
            return variant if self._find_name() in MASKING_NODES else func
        return variant if _is_sum(args) and _may_take(first) and not self._adds_in_place() else func

    def _start_formula(self, mode: ObservedMode) -> None:
        (made, latest, node), running = self._formula, self._ask_for_node()
        if running is None:
            return
        number = mode.births + 1  # which the result will be
        is_same = latest == mode.births and node == _torch.number_of_node(running)
        self._formula = made if is_same else number, number, _torch.number_of_node(running)

    def _continues_formula(self, mode: ObservedMode, fake: FakeTensor) -> bool:
        record, (made, _, node) = mode.find_record(fake), self._formula
        running = self._ask_for_node() if record is not None and record.serial == made else None
        return running is not None and node == _torch.number_of_node(running)

    def _adds_in_place(self) -> bool:
        """Whether the formula of the running node asks for the sum."""
        if self._find_name() not in ADDING_NODES:
            return False
        before, self._last_adding = self._last_adding, _torch.number_of_node(_torch.running_node())
        return before != self._last_adding

    def _find_name(self) -> str:
        """Return the name of the running node; "" after too many questions."""
        node = self._ask_for_node()
        return "" if node is None else str(node.name())

    def _ask_for_node(self) -> Any:
        """The running node; None after so many questions."""
        if self._asked >= MOST_NODES:
            return None
        self._asked += 1
        return _torch.running_node()


def _is_called_by_engine(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_globals.get("__name__") in PASSED_THROUGH:
        frame = frame.f_back
    return frame is not None and frame.f_code is _torch.BACKWARD


def _is_in_transform(frame: FrameType | None) -> bool:
    """Whether a transform of torch.func is on the way: its wrappers, which C++ has, may be the program's."""
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("torch._functorch"):
            return True
        frame = frame.f_back
    return False


def _is_biased_product(mode: ObservedMode, args: tuple[Any, ...]) -> bool:
    """Whether a bias is added to a product that was made just before, and the shape and dtype stay: in a linear layer
    whose input is a batch in another order, in attention that is computed step by step."""
    record = mode.find_record(args[0])
    if record is None or record.serial != mode.births or not isinstance(record.maker, _torch.OpOverload):
        return False
    if not record_of(record.maker).uses_blas or len(args) != 2 or type(args[1]) is not FakeTensor:
        return False
    product, other = args[0]._spec, args[1]._spec
    sizes = zip(reversed(product.shape), reversed(other.shape), strict=False)
    fits = other.ndim <= product.ndim and all(theirs in (1, ours) for ours, theirs in sizes)
    return bool(fits and product.dtype is other.dtype and product.device == other.device)


def _are_new_zeros(mode: ObservedMode, fake: FakeTensor) -> bool:
    """Whether these zeros are the latest tensor that was made."""
    record = mode.find_record(fake)
    if record is None or record.serial != mode.births or not isinstance(record.maker, _torch.OpOverload):
        return False
    return record_of(record.maker).gives_zeros is not None


def _is_sum(args: tuple[Any, ...]) -> bool:
    """Whether it adds two tensors of one shape and dtype, without a factor."""
    if len(args) != 2 or type(args[1]) is not FakeTensor:
        return False
    one, other = args[0]._spec, args[1]._spec
    return bool(one.shape == other.shape and one.dtype is other.dtype and one.device == other.device)


def _may_take(fake: FakeTensor) -> bool:
    """Whether the engine writes into this gradient: it has no other owner, and fills its memory."""
    spec = fake._spec
    return spec.sparse is None and is_dense(spec.shape, spec.stride) and _torch.is_held_only_by_caller(fake)
