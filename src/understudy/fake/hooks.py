"""The slow path of modes whose calls someone wants to see: a subclass that overrides `dispatch`, real tensors beside
stand-ins, switches for debugging.

Whether a mode takes it is decided once, when the mode is made: it then looks up its plans in `refuse_key`, so that the hot
path has no branch for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from understudy import _torch
from understudy.errors import MetaDeviceError
from understudy.fake.tensor import FakeTensor
from understudy.infer.cache import UnusualArgument
from understudy.spec.call import flat
from understudy.spec.error_context import with_line

if TYPE_CHECKING:
    from understudy.fake.mode import FakeTensorMode


def refuse_key(key: object) -> Any:
    """In the place of a look-up of plans: sends the call to the slow path."""
    raise UnusualArgument


def needs_look_at_results(mode: FakeTensorMode) -> bool:
    """Whether a switch asks for something to be done with each new stand-in of a mode."""
    return _torch.FakeTensorConfig.debug or not mode.allow_meta


def dispatch_hooked(mode: FakeTensorMode, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """A call of a hooked mode."""
    result = mode.dispatch(func, types, args, kwargs)
    if needs_look_at_results(mode):
        for fake in flat(FakeTensor, (result,), {}):
            look_at(mode, fake, str(func))
    return result


def look_at(mode: FakeTensorMode, fake: FakeTensor, made_by: str) -> None:
    """Do what the switches of a mode ask for with a new stand-in."""
    if not mode.allow_meta and fake._spec.device.type == "meta":
        raise with_line(
            MetaDeviceError(f"expected a tensor on a real device, got {fake._spec}: this mode refuses meta tensors"),
            made_by, fake._spec,
            "name the device that it stands for, or set torch._functorch.config.fake_tensor_allow_meta before the mode is "
            "made",
        )  # fmt: skip
    if _torch.FakeTensorConfig.debug and "_debug_trace" not in vars(fake):
        vars(fake)["_debug_trace"] = _torch.capture_traceback()
