"""The slow path of modes whose calls someone wants to see: a subclass that overrides `dispatch`, real tensors beside
stand-ins, switches for debugging.

Whether a mode takes it is decided once, when the mode is made: it then looks up its plans in `refuse_key`, so that the hot
path has no branch for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from understudy import _torch
from understudy.errors import MetaDeviceError
from understudy.fake.misses import make_call
from understudy.fake.realise import make_new
from understudy.fake.tensor import FakeTensor
from understudy.infer.cache import UnusualArgument
from understudy.ops.registry import record_of
from understudy.ops.traits.writes import written_inputs
from understudy.spec.call import flat, map_structure
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
    if mode.preferred_device_type is not None:
        args, kwargs = move_to_preferred(mode, func, args, kwargs or {})
    result = mode.dispatch(func, types, args, kwargs)
    if needs_look_at_results(mode):
        for fake in flat(FakeTensor, (result,), {}):
            look_at(mode, fake, str(func))
    return result


def move_to_preferred(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of a call on one device: where some inputs are on a device of the preferred type, the others stand for
    tensors there as well. Those that the call writes to stay where they are."""
    wanted = mode.preferred_device_type
    inputs = flat(FakeTensor, args, kwargs)
    device = next((fake._spec.device for fake in inputs if fake._spec.device.type == wanted), None)
    if device is None or all(fake._spec.device == device for fake in inputs):
        return args, kwargs
    if record_of(func).may_mix is not None:
        return args, kwargs
    written = {id(inputs[position]) for position in written_inputs(make_call(mode, func, args, kwargs))}

    def move(fake: FakeTensor) -> FakeTensor:
        spec = fake._spec
        is_moved = spec.device.type != wanted and spec.shape and id(fake) not in written
        return make_new(mode, spec.on(device)) if is_moved else fake

    return map_structure(move, FakeTensor, (tuple(args), kwargs))


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
