"""What torch answers otherwise for as long as a fake mode is active, and why.

Each function takes torch's own object and gives the one that stands in its place: an answer for threads in which a fake
mode is active, or for stand-ins, and torch's own answer for all others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from understudy import _torch
from understudy._torch import active_fake_mode, while_active
from understudy.fake import higher_order as _higher_order  # noqa: F401  (registers how each is run)
from understudy.fake.kernels.transforms import with_rules
from understudy.ops import hops

Function = Callable[..., Any]

for _place in ("levels of vmap", "levels of grad", "levels of jvp"):
    while_active(_place)(with_rules)


@while_active("compile")
def compiled_elsewhere(original: Function) -> Function:
    """torch's compiler does not know stand-ins, and there is nothing to win: what they run is run as it is.
    Higher-order operators that are called eagerly compile themselves."""

    def compile(model: Any = None, **options: Any) -> Any:
        if active_fake_mode() is None and not _records_branches(_torch.active_recorder()):
            return original(model, **options)
        return (lambda function: function) if model is None else model

    return compile


@while_active("higher-order operators")
def run_in_the_open(original: Function) -> Function:
    """torch's own way makes graphs of the functions that the operator is given, with its own mode and tracer."""

    def dispatch(self: Any, key: Any, /, *args: Any, **kwargs: Any) -> Any:
        key = _torch.key_without_spare(self, key, args, kwargs)
        recorder = _torch.active_recorder()
        if _records_branches(recorder):
            return recorder.call_higher_order(original, self, key, args, kwargs)
        run = hops.higher_order(self).run
        mode = active_fake_mode()
        if (
            run is None
            or mode is None
            or type(mode) is _torch.torch_fake_mode_class()
            or _torch.is_recording()
        ):
            return original(self, key, *args, **kwargs)
        return run(*args, **kwargs)

    return dispatch


def _records_branches(recorder: Any) -> bool:
    """Whether this is a recorder of ours: it wants to hear of a higher-order operator before autograd does."""
    return hasattr(type(recorder), "call_higher_order")


@while_active("operands of cond")
def any_structure(original: Function) -> Function:
    """Operands may be structures: for torch its compiler has taken them apart before, for us the recorder does."""

    def check(operands: Any) -> None:
        if not _records_branches(_torch.active_recorder()):
            original(operands)

    return check


@while_active("scripted functions")
def as_python_has_it(original: Function) -> Function:
    """TorchScript knows sizes as integers only, and makes real tensors of numbers. What it was made of does neither."""

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_watched = active_fake_mode() is not None or _torch.active_recorder() is not None
        written = _torch.function_behind(self) if is_watched else None
        return original(self, *args, **kwargs) if written is None else written(*args, **kwargs)

    return called
