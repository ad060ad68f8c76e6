"""Stand-ins with symbolic sizes.

C++ derives a lot from symbolic sizes, with a call into Python for each operation. That is done once for each spec, in a
template tensor; a stand-in starts as a minimal wrapper, and then takes over the template's metadata.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from understudy import _torch
from understudy.fake.native import CPU, WITHOUT_INDEX, prepare
from understudy.fake.tensor import FakeTensor
from understudy.ops.shared.decompositions import provides_contiguity
from understudy.shapes.arithmetic import NotMemoised
from understudy.shapes.node import SymNode
from understudy.shapes.sizes import at_least_one, has_unbacked, to_torch
from understudy.spec import TensorSpec
from understudy.spec.tensor_spec import is_contiguous

make_wrapper = _torch.make_wrapper
give_storage = _torch.give_storage
take_metadata, is_function_mode_active = _torch.set_native_data, _torch.is_function_mode_active
NoDispatch = _torch.NoDispatch
in_inference_mode = torch.is_inference_mode_enabled
NO_STORAGE: Any = make_wrapper(FakeTensor, (0,))
on_first_symbol: list[Callable[[], object]] = []
"""Called before the first stand-in with symbolic sizes is made, to set up what these need."""


FIRST_INTERVAL, GROWTH = 8, 4
"""C++ caches on each tensor whether it is contiguous. A template takes over that answer when the eighth stand-in of its
spec is made, and, if C++ has not asked any of them by then, after four times as many again. Most stand-ins of a capture
are never asked."""


class TemplatePool:
    """What stand-ins of a spec are made from: the arguments of the minimal wrapper, and the unused templates.

    Inference mode has its own templates. A template is removed while it is used: two threads never share one.
    `countdown` is the number of stand-ins before the next call of `cache_contiguity`, `interval` the number between
    calls; `countdown` is 0 once that succeeded.
    """

    __slots__ = ("countdown", "interval", "no_storage", "options", "start", "templates")

    def __init__(self, spec: TensorSpec) -> None:
        while on_first_symbol:
            on_first_symbol.pop()()
        plain = prepare(spec)[3:7]
        keys = _torch.SYMBOLIC_KEYS if is_contiguous_as_written(spec) else _torch.SCATTERED_KEYS
        if spec.device.type not in WITHOUT_INDEX:
            keys = keys | _torch.STAND_IN_KEYS
        self.options: Any = (*plain, False, False, None, False, False, keys)
        self.start: Any = (
            (FakeTensor, (0,)) if spec.device == CPU else (FakeTensor, (0,), None, None, *self.options)
        )
        self.no_storage: Any = NO_STORAGE if spec.device == CPU else make_wrapper(*self.start)
        self.templates: tuple[list[FakeTensor], list[FakeTensor]] = ([], [])
        self.countdown = self.interval = FIRST_INTERVAL
        spec.prepared = self


def is_contiguous_as_written(spec: TensorSpec) -> bool:
    """Whether the strides are literally those of a contiguous tensor, without proofs or guards."""
    wanted: Any = 1
    inner: Any = 1  # the size of the next inner dimension
    for size, step in zip(reversed(spec.shape), reversed(spec.stride), strict=True):
        if type(inner) is not int or inner != 1:
            wanted = wanted * at_least_one(inner)
        if step is not wanted and not (type(step) is type(wanted) is int and step == wanted):
            return False
        inner = size
    return True


def make_symbolic(
    spec: TensorSpec, base: FakeTensor | None = None, expects_operators: bool = True
) -> FakeTensor:
    """A stand-in with symbolic sizes, on the storage of `base` or on a new one. `expects_operators`: whether C++ is
    likely to ask for its layout."""
    if is_function_mode_active():  # if C++ calls operators directly, as in backward passes
        with _torch.NoFunctionModes():  # it would be given stand-ins that are half made
            return make_symbolic(spec, base, expects_operators)
    prepared: TemplatePool = spec.prepared or TemplatePool(spec)
    templates = prepared.templates[in_inference_mode()]
    template = templates.pop() if templates else make_template(spec, prepared)
    if prepared.countdown and expects_operators:
        prepared.countdown -= 1
        if not prepared.countdown and not cache_contiguity(spec, template):
            prepared.countdown = prepared.interval = prepared.interval * GROWTH
    guard = NoDispatch()
    try:
        fake: FakeTensor = make_wrapper(*prepared.start)
        if base is None:
            # The storage of the wrapper comes back to it with the metadata.
            give_storage(template, fake)
            take_metadata(fake, template)
            give_storage(template, prepared.no_storage)
        else:
            take_metadata(fake, template)
            give_storage(fake, base)
    finally:
        del guard
    templates.append(template)
    return fake


def make_template(spec: TensorSpec, prepared: TemplatePool) -> FakeTensor:
    shape, stride = [to_torch(size) for size in spec.shape], [to_torch(size) for size in spec.stride]
    template: FakeTensor = make_wrapper(
        FakeTensor, shape, stride, to_torch(spec.offset), *prepared.options, storage_size=0
    )
    return template


@provides_contiguity
def decide_contiguity(spec: TensorSpec) -> None:
    """Decide, with one guard, whether stand-ins of this spec are contiguous. C++ would ask several questions, each of
    which adds a guard: so the answer is cached on the templates."""
    if not spec.is_symbolic or has_unbacked(*spec.shape, *spec.stride):
        return
    prepared: TemplatePool = spec.prepared or TemplatePool(spec)
    templates = prepared.templates[in_inference_mode()]
    if not templates:
        templates.append(make_template(spec, prepared))
    is_contiguous(spec.shape, spec.stride)
    with _env_of(spec).suppress_guards():
        for template in templates:
            template.is_contiguous()


def cache_contiguity(spec: TensorSpec, template: FakeTensor) -> bool:
    """Let C++ cache on the template whether it is contiguous: stand-ins take that over.

    Only if the environment has answered these questions before, so that nothing is proved or guarded here. Returns
    whether it has.
    """
    try:
        with _env_of(spec).decisions.limit_to_memo():
            template.is_contiguous()
    except NotMemoised:
        return False
    return True


def _env_of(spec: TensorSpec) -> Any:
    return next(size.shape_env for size in (*spec.shape, *spec.stride, spec.offset) if type(size) is SymNode)
