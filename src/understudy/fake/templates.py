"""Stand-ins with symbolic sizes.

C++ derives a lot from symbolic sizes, node by node. That is done once for each spec, in a template; a stand-in begins
as a small wrapper, and then takes over the template's metadata.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from understudy import _torch
from understudy.fake.native import CPU, WITHOUT_INDEX, prepare
from understudy.fake.tensor import FakeTensor
from understudy.ops.shared.decompositions import provides_contiguity
from understudy.shapes.arithmetic import NotRemembered
from understudy.shapes.node import SymNode
from understudy.shapes.sizes import at_least_one, lies_in_data, to_torch
from understudy.spec import TensorSpec
from understudy.spec.tensor_spec import is_contiguous

make_wrapper = _torch.make_wrapper
give_storage = _torch.give_storage
take_metadata = _torch.set_native_data
NoDispatch = _torch.NoDispatch
in_inference_mode = torch.is_inference_mode_enabled
NO_STORAGE: Any = make_wrapper(FakeTensor, (0,))
on_first_symbol: list[Callable[[], object]] = []
"""Called before the first stand-in with symbolic sizes is made: what these need is set up then, not at import."""


FIRST_ATTEMPT, LATER = 8, 4
"""When a template is told what C++ may have found out about other stand-ins of its spec: with the eighth of them, and, if
nobody has asked by then, after four times as many again. A capture makes most of its stand-ins without being asked."""


class TemplatePool:
    """What makes stand-ins of a spec: the arguments of the wrappers that they begin as, and templates at rest.

    Inference mode has templates of its own. A template is taken out while it is used: two threads never share one.
    `untold` counts down the stand-ins before the next attempt to tell, of which `patience` is the distance; 0 once told.
    """

    __slots__ = ("nothing", "options", "patience", "start", "templates", "untold")

    def __init__(self, spec: TensorSpec) -> None:
        while on_first_symbol:
            on_first_symbol.pop()()
        plain = prepare(spec)[3:7]
        keys = _torch.SYMBOLIC_KEYS if is_seen_contiguous(spec) else _torch.SCATTERED_KEYS
        if spec.device.type not in WITHOUT_INDEX:
            keys = keys | _torch.STAND_IN_KEYS
        self.options: Any = (*plain, False, False, None, False, False, keys)
        self.start: Any = (
            (FakeTensor, (0,)) if spec.device == CPU else (FakeTensor, (0,), (1,), 0, *self.options)
        )
        # A storage has to be on the device of its tensor.
        self.nothing: Any = NO_STORAGE if spec.device == CPU else make_wrapper(*self.start)
        self.templates: tuple[list[FakeTensor], list[FakeTensor]] = ([], [])
        self.untold = self.patience = FIRST_ATTEMPT
        spec.prepared = self


def is_seen_contiguous(spec: TensorSpec) -> bool:
    """Whether the strides are those of a contiguous tensor as they are written: nothing is to be proved or assumed."""
    wanted: Any = 1
    inner: Any = 1  # the size of the dimension before, which counts from here on
    for size, step in zip(reversed(spec.shape), reversed(spec.stride), strict=True):
        if type(inner) is not int or inner != 1:
            wanted = wanted * at_least_one(inner)
        if step is not wanted and not (type(step) is type(wanted) is int and step == wanted):
            return False
        inner = size
    return True


def make_symbolic(spec: TensorSpec, base: FakeTensor | None = None, is_asked: bool = True) -> FakeTensor:
    """A stand-in with symbolic sizes, on the storage of `base` or on one of its own. `is_asked`: operators are expected
    on it, and so questions about its layout."""
    prepared: TemplatePool = spec.prepared or TemplatePool(spec)
    templates = prepared.templates[in_inference_mode()]
    template = templates.pop() if templates else make_template(spec, prepared)
    if prepared.untold and is_asked:
        prepared.untold -= 1
        if not prepared.untold and not is_told(spec, template):
            prepared.untold = prepared.patience = prepared.patience * LATER
    guard = NoDispatch()
    try:
        fake: FakeTensor = make_wrapper(*prepared.start)
        if base is None:
            # The storage that the wrapper began with comes back to it with the metadata.
            give_storage(template, fake)
            take_metadata(fake, template)
            give_storage(template, prepared.nothing)
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
    """Assume whether stand-ins of this spec are contiguous, in one question. C++ would ask several, of which each would be
    assumed: so a template is told the answer before, and those that are made of it need not be asked."""
    if not spec.is_symbolic or lies_in_data(*spec.shape, *spec.stride):
        return
    prepared: TemplatePool = spec.prepared or TemplatePool(spec)
    templates = prepared.templates[in_inference_mode()]
    if not templates:
        templates.append(make_template(spec, prepared))
    is_contiguous(spec.shape, spec.stride)
    with _env_of(spec).suppress_guards():
        for template in templates:
            template.is_contiguous()


def is_told(spec: TensorSpec, template: FakeTensor) -> bool:
    """Let C++ find out whether the template is contiguous: stand-ins take that over, and need not be asked again.

    Only if somebody asked before: there is nothing to prove then, and nothing to assume.
    """
    try:
        with _env_of(spec).decisions.limit_to_memory():
            template.is_contiguous()
    except NotRemembered:
        return False
    return True


def _env_of(spec: TensorSpec) -> Any:
    return next(size.shape_env for size in (*spec.shape, *spec.stride, spec.offset) if type(size) is SymNode)
