"""The values of constants: a trace may decide by the value of a tensor to which it does not write.

A read of a parameter or buffer (`self.scale.item()`) gives its value, which becomes a part of the graph, as in torch's
graphs: see `Constants.read_value`. Of single numbers and small tensors of integers, what is computed from them is known,
too: of buffers, and of real tensors outside of modules, which the mode reports when it converts them.

A tensor that the program writes to is state. If it is written to before its value is read, the value is unknown from then
on. If its value was read, the graph would hold that value fixed: the trace is refused.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple, final

import torch

from understudy import _torch
from understudy.capture.constants import Constants, describe_real, refuse_written_constant
from understudy.errors import DataDependentOutputException
from understudy.fake.mode import FakeTensorMode
from understudy.fake.tensor import FakeTensor
from understudy.fake.values.determined import MOST_READABLE, DeterminedContents, LiteralStorage
from understudy.lines import user_line


@final
class ConstantLiteral(LiteralStorage):
    """The value of a constant. It records the line that read it first."""

    __slots__ = ("_constant", "line")

    def __init__(self, real: torch.Tensor, constant: ConstantContents) -> None:
        super().__init__(real)
        self._constant = constant
        self.line: str | None = None
        """Where the value was read; None if it was not."""

    def storage(self) -> torch.Tensor:
        if self.line is None:
            self.line = user_line()
            self._constant.check_read()
        return self.real


@final
class ConstantContents(DeterminedContents):
    """The contents of a constant: unknown after the first write."""

    __slots__ = ("_content", "_values", "known", "literal_storage")

    def __init__(self, values: ConstantValues, real: torch.Tensor) -> None:
        self._values: ConstantValues | None = None
        self.literal_storage = ConstantLiteral(real, self)
        super().__init__(self.literal_storage, literal=True)
        self._values = values
        self.known: KnownConstant

    @property
    def content(self) -> Any:
        return self._content

    @content.setter
    def content(self, content: Any) -> None:
        """Set by each write to the memory of the constant."""
        if self._values is None:
            self._content = content
        else:
            self._values.write(self.known)

    def check_read(self) -> None:
        if self._values is not None:
            self._values.refuse_read_of_written(self.known)

    def release(self) -> None:
        """The trace has ended, or the constant was written to: nothing is known."""
        self._values = None
        self.content = None


class KnownConstant(NamedTuple):
    """A constant whose values are known."""

    name: str
    """The path of a buffer; empty for a tensor outside of modules."""
    fake: FakeTensor
    real: torch.Tensor
    contents: ConstantContents
    is_converted: bool
    """Whether its stand-in was made when the program used it, and not for a module."""


class ConstantValues:
    """The constants of one trace whose values are known, from when it is made until `forget`. Parameters and buffers of
    modules are among them if `constants.knows_values`."""

    def __init__(self, mode: FakeTensorMode, constants: Constants) -> None:
        self._mode = mode
        self._constants = constants
        self._known: dict[int, list[KnownConstant]] = {}
        """By storage."""
        self._written: set[int] = set()
        """The storages of constants that were written to."""
        mode.constant_listeners.append(self)

    def register_buffers(
        self, module: torch.nn.Module, path: str, tensors: list[tuple[str, torch.Tensor, object]]
    ) -> None:
        """Register the small buffers of a module. `tensors`: name, tensor, stand-in. Layers of torch decide by none, and
        count batches in one: what is read of it directly is known without this."""
        kind = type(module)
        if kind is not torch.nn.Module and kind.__module__.startswith("torch."):
            return
        buffers = module._buffers
        for name, real, stand_in in tensors:
            if name in buffers and is_small_constant(
                real
            ):  # the trace writes to stand-ins only: no copy is needed
                self._register_constant(f"{path}.{name}" if path else name, stand_in, real, real, False)

    def register_converted(self, fake: FakeTensor, real: torch.Tensor, values: torch.Tensor) -> None:
        """Called by the mode, which has converted a real constant of the program."""
        self._register_constant("", fake, real, values, True)

    def read_value(self, fake: FakeTensor) -> torch.Tensor | None:
        """A real tensor with the values of a parameter or buffer, if the trace has not written to it."""
        return self._constants.read_value(fake)

    def _register_constant(
        self, name: str, fake: object, real: torch.Tensor, values: torch.Tensor, is_converted: bool
    ) -> None:
        if type(fake) is not FakeTensor or fake.fake_mode is not self._mode or fake._determined is not None:
            return
        storage = _torch.storage_id(fake)
        if storage not in self._written:
            contents = fake._determined = ConstantContents(self, values)
            contents.known = KnownConstant(name, fake, real, contents, is_converted)
            self._known.setdefault(storage, []).append(contents.known)

    def write(self, written: KnownConstant) -> None:
        """Called for the first write to a constant: from now on nothing is known of the tensors on its memory."""
        storage = _torch.storage_id(written.fake)
        self._written.add(storage)
        for known in self._known[storage]:
            if known.contents.literal:
                if known.contents.literal_storage.line is not None:
                    raise _refuse_written(known)
                known.contents.literal = False
                known.contents._content = None

    def refuse_read_of_written(self, known: KnownConstant) -> None:
        """Called when the value is read first: it may be that of a call before a write, and read after it."""
        if not known.contents.literal:
            raise _refuse_written(known)

    def forget(self) -> None:
        """The stand-ins may belong to a mode of the user, and outlive the trace."""
        self._mode.constant_listeners.remove(self)
        for known in itertools.chain.from_iterable(self._known.values()):
            known.contents.release()
            known.fake._determined = None
            if known.is_converted:
                self._mode.fake_tensor_converter.forget(known.real)
        self._known.clear()


def _refuse_written(known: KnownConstant) -> DataDependentOutputException:
    what = f"the buffer {known.name!r}" if known.name else describe_real(known.real)
    return refuse_written_constant(what, known.contents.literal_storage.line)


def is_small_constant(tensor: torch.Tensor) -> bool:
    """Whether this is a single number, or a small tensor of integers or bools, with a memory of its own."""
    count = tensor.numel()
    if type(tensor) is not torch.Tensor or count > MOST_READABLE or tensor.requires_grad:
        return False
    dtype = tensor.dtype
    if (count > 1 and (dtype.is_floating_point or dtype.is_complex)) or tensor.is_quantized:
        return False
    if not tensor.is_cpu or tensor.layout is not torch.strided or not tensor.is_contiguous():
        return False
    return tensor.untyped_storage().nbytes() == count * dtype.itemsize
