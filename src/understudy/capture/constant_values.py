"""The values of constants: a trace may decide by the value of a tensor that never changes.

Small integer buffers that no checkpoint holds (`persistent=False`), such as a stride, are constants of the program. So are
real tensors outside of modules, if they are single numbers or small tensors of integers: the mode reports them when it
converts them. Parameters and other buffers are state: their values may be others when the graph runs.

A tensor that the program writes to is state as well. If it is written to before its value is read, the value is unknown
from then on. If its value was read, the graph would hold that value fixed: the trace is refused.
"""

from __future__ import annotations

from typing import Any, NamedTuple, final

import torch

from understudy import _torch
from understudy.errors import Context, DataDependentOutputException
from understudy.fake.mode import FakeTensorMode
from understudy.fake.tensor import FakeTensor
from understudy.fake.values.determined import MOST_READABLE, DeterminedContents, LiteralStorage
from understudy.lines import user_frames, user_line


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
    """The constants of one trace whose values are known, from when it is made until `forget`. `knows_buffers`: whether
    buffers of modules are among them."""

    def __init__(self, mode: FakeTensorMode, knows_buffers: bool) -> None:
        self._mode = mode
        self._includes_buffers = knows_buffers
        self._known: list[KnownConstant] = []
        self._written: set[int] = set()
        """The storages of constants that were written to."""
        mode.constant_listeners.append(self._register_converted)

    def register_buffers(
        self, module: torch.nn.Module, path: str, tensors: list[tuple[str, torch.Tensor, object]]
    ) -> None:
        """Register the buffers of a module that no checkpoint holds. `tensors`: name, tensor, stand-in."""
        names = module._non_persistent_buffers_set if self._includes_buffers else ()
        for name, real, stand_in in tensors:
            if name in names and is_small_integer_tensor(real):
                with _torch.no_modes():
                    values = real.detach().clone()
                self._register_constant(f"{path}.{name}" if path else name, stand_in, real, values, False)

    def _register_converted(self, fake: FakeTensor, real: torch.Tensor, values: torch.Tensor) -> None:
        self._register_constant("", fake, real, values, True)

    def _register_constant(
        self, name: str, fake: object, real: torch.Tensor, values: torch.Tensor, is_converted: bool
    ) -> None:
        if type(fake) is not FakeTensor or fake.fake_mode is not self._mode or fake._determined is not None:
            return
        if _torch.storage_id(fake) not in self._written:
            contents = fake._determined = ConstantContents(self, values)
            contents.known = KnownConstant(name, fake, real, contents, is_converted)
            self._known.append(contents.known)

    def write(self, written: KnownConstant) -> None:
        """Called for the first write to a constant: from now on nothing is known of the tensors on its memory."""
        storage = _torch.storage_id(written.fake)
        self._written.add(storage)
        for known in self._known:
            if known.contents.literal and _torch.storage_id(known.fake) == storage:
                if known.contents.literal_storage.line is not None:
                    raise refuse_written_constant(known)
                known.contents.literal = False
                known.contents._content = None

    def refuse_read_of_written(self, known: KnownConstant) -> None:
        """Called when the value is read first: it may be that of a call before a write, and read after it."""
        if not known.contents.literal:
            raise refuse_written_constant(known)

    def forget(self) -> None:
        """The stand-ins may belong to a mode of the user, and outlive the trace."""
        self._mode.constant_listeners.remove(self._register_converted)
        for known in self._known:
            known.contents.release()
            known.fake._determined = None
            if known.is_converted:
                self._mode.fake_tensor_converter.forget(known.real)
        self._known.clear()


def refuse_written_constant(known: KnownConstant) -> DataDependentOutputException:
    """The error for a constant whose value was read and which is written to."""
    if known.name:
        what, advice = f"the buffer {known.name!r}", "register it with persistent=True, which makes it state"
    else:
        what, advice = _describe_outside_tensor(known), "pass it as an input"
    read = known.contents.literal_storage.line
    return DataDependentOutputException(
        f"the value of {what} was read{f' at {read}' if read else ''}, and the program also writes to it: the graph would "
        "keep the value of this run",
        context=Context(line=user_line(), hint=f"{advice}, or read its value before the trace"),
    )


def _describe_outside_tensor(known: KnownConstant) -> str:
    """`the tensor 'count', i64[]@cpu`: by the name that it has in the calling functions."""
    for frame in user_frames():
        for variables in (frame.f_locals, frame.f_globals):
            for name, value in list(variables.items()):
                if value is known.real:
                    return f"the tensor {name!r}, {known.fake._spec}"
    return f"the tensor {known.fake._spec}"


def is_small_integer_tensor(tensor: torch.Tensor) -> bool:
    """Whether this is a small tensor of integers or bools with a memory of its own."""
    if (
        type(tensor) is not torch.Tensor
        or tensor.is_floating_point()
        or tensor.is_complex()
        or tensor.is_quantized
    ):
        return False
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.numel() > MOST_READABLE:
        return False
    return (
        tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    )
