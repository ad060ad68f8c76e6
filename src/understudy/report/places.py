"""Where a program is: module path, phase, step, line of the user's code.

    phases   setup ──► forward ──► backward ──► after backward ──► optimizer ──► between steps ──► forward …
             evaluation: from the call of a model that is evaluated to the next call of one that is trained, or its step

A module has the path that it has below its root: the outermost module that was called, or, where a method of a larger
module called it (`training_step` of Lightning, `encode` of an autoencoder), that one. A path begins with the name of the
root in the program; `shorten_path` leaves it out where there is only one model. Backward has no modules: autograd numbers
its nodes in the order in which the forward made them, so the counter at the entry and exit of each module identifies
the module of the running node.

All of it is asked for at every allocation. Step, phase and the count of calls change seldom, and are one `StepPhase` until
they do. The line outside of the call of a module stays the same for as long as the call runs: it is looked for once. So does
the line that an optimizer of torch is called from: no code of the user runs inside, unless it was given a closure.
"""

from __future__ import annotations

import sys
import weakref
from bisect import bisect_right
from collections.abc import Callable
from inspect import CO_OPTIMIZED
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from understudy import _torch
from understudy.lines import is_generated, is_installed, is_user_file, user_frames
from understudy.patching import OBSERVATION, patch
from understudy.simulation.events import MemoryRecord
from understudy.simulation.steps import StepCounter

SETUP, FORWARD, BACKWARD, AFTER_BACKWARD, OPTIMIZER, BETWEEN, EVALUATION = (
    "setup", "forward", "backward", "after backward", "optimizer", "between steps", "evaluation",
)  # fmt: skip

MOST_NODES = 8192
"""For this many nodes of a backward pass, each allocation gets its module; then every sixteenth does, and finally
none. torch frees nodes that Python has seen one inside of the other: some 30,000 in a row exceed the stack."""
SPARSE = 16
BACKWARD_CODE = _torch.BACKWARD
active_fake_mode = _torch.active_fake_mode
running_node, number_of_node = _torch.running_node, _torch.number_of_node
count_autograd_nodes = _torch.count_autograd_nodes

LinePlace = tuple[CodeType, int] | tuple[CodeType, int, Any]
"""A line of the user's own code; third, the innermost line of an installed package that it was calling."""
NOT_THE_USERS, INSTALLED, BOUNDARY, OWN, GENERATED = range(5)


_kinds = {__file__: BOUNDARY}
"""By the name of a file. The functions of this one around code that is running are calls of modules, and backward passes."""
get_kind = _kinds.get
_lines: dict[tuple[int, int], LinePlace] = {}
"""By the identity of the code, which has a hash that costs, and the instruction: many allocations are of one line."""
_called_lines: dict[tuple[int, int], LinePlace] = {}
"""Own lines with the line of a package that they call, by the identities of both."""


def _find_kind(code: CodeType) -> int:
    file = code.co_filename
    if not is_user_file(file):
        kind = NOT_THE_USERS
    elif is_generated(code):
        kind = GENERATED
    else:
        kind = INSTALLED if is_installed(file) else OWN
    if file != "<string>":  # both `python -c` and generated functions
        _kinds[file] = kind
    return kind


def _find_line_place(frame: FrameType) -> LinePlace:
    code, instruction = frame.f_code, frame.f_lasti
    line = _lines.get((id(code), instruction))
    if line is None:
        line = _lines[id(code), instruction] = code, frame.f_lineno
    return line


def _join(line: LinePlace | None, frame: FrameType | None) -> LinePlace | None:
    """An own line, and the frame of a package that it calls."""
    if frame is None:
        return line
    called = _find_line_place(frame)
    if line is None:
        return called
    found = _called_lines.get((id(line), id(called)))
    if found is None:
        found = _called_lines[id(line), id(called)] = line[0], line[1], called
    return found


def write_phase(phase: str) -> str:
    """When something was: `in backward`, `after backward`."""
    return phase if phase in (AFTER_BACKWARD, BETWEEN) else f"in {phase}"


class StepPhase(NamedTuple):
    """A moment of a run: finished steps, the phase, outermost calls of modules, started backward passes."""

    step: int
    phase: str
    root_calls: int
    backward_passes: int


class ModulePlace:
    """One module of the program, with the totals of its work."""

    __slots__ = ("calls", "kind", "macs", "module", "path")

    def __init__(self, path: str, kind: str, module: torch.nn.Module | None = None) -> None:
        self.path = path
        self.kind = kind
        self.module: Callable[[], torch.nn.Module | None] = (
            weakref.ref(module) if module is not None else lambda: None
        )
        self.calls = 0
        self.macs = 0


class Root(NamedTuple):
    """A module that is called from outside of all modules. `has_parameters`: it is a model, and no loss function."""

    module: weakref.ref[torch.nn.Module]
    has_parameters: bool


class Places:
    """Followed while an ObservedMode with this as its `places` is active. Use as a context manager."""

    # Not in the instance's dict: with more than 30 attributes in it, Python no longer reads any of them by its position.
    __slots__ = (
        "_asked", "_backward_line", "_backward_passes", "_begun_passes", "_birthplace", "_by_module", "_hooks", "_idle",
        "_latest", "_located", "_marked", "_marks", "_only_model", "_optimizer_place", "_outer_lines", "_stepping", "_steps",
        "by_path", "module", "moment", "on_backward_end", "on_moment_end", "on_optimizer", "on_root_call", "optimizer_place",
        "outside", "phase", "root_calls", "roots", "step", "torch_optimizer_line",
    )  # fmt: skip

    def __init__(self) -> None:
        self.step = 0
        """Steps that are done, of the optimizer that steps most seldom."""
        self._steps = StepCounter(None)
        self.outside = ModulePlace("", "")
        self.module = self.outside
        self.roots: dict[str, Root] = {}
        """By the names that their paths begin with. Of several modules that had a name in turn, the last."""
        self._only_model: str | None = None
        self.root_calls = 0
        self.by_path: dict[str, ModulePlace] = {}
        self.on_root_call: Callable[[torch.nn.Module, Any, Any], None] | None = None
        self.on_optimizer: Callable[[torch.optim.Optimizer, bool], None] | None = None
        self.on_backward_end: Callable[[], None] | None = None
        self.on_moment_end: Callable[[StepPhase], None] | None = None
        self.phase = SETUP
        self.moment = StepPhase(0, SETUP, 0, 0)
        self._idle = SETUP
        self._stepping: list[torch.optim.Optimizer] = []
        """Optimizers whose step runs, outermost first: one may call another's, as those of sharded states do."""
        self.optimizer_place: tuple[StepPhase, ModulePlace, LinePlace | None] | None = None
        """Where the present moment is, as a whole: a step of one of torch's optimizers."""
        self.torch_optimizer_line: LinePlace | None = None
        """The line from which an optimizer of torch was called that is running, without a closure."""
        self._optimizer_place: tuple[StepPhase, ModulePlace, LinePlace | None] | None = None
        """Where all is born that such an optimizer makes."""
        self._located = 0
        """The number of the call that memory was born in last."""
        self._birthplace: tuple[StepPhase, ModulePlace, LinePlace | None] = (self.moment, self.outside, None)
        self._backward_passes = 0
        self._begun_passes = 0
        self._backward_line: LinePlace | None = None
        """The line outside of the innermost backward pass, once it was looked for from autograd's engine."""
        self._asked = 0
        self._latest = self.outside
        """The module that was found last in backward."""
        self._by_module: dict[int, ModulePlace] = {}
        self._outer_lines: dict[int, LinePlace | None] = {}
        """The user's own line outside of a call that runs, once it was looked for. By the identity of this file's frame."""
        self._marks: list[int] = []
        self._marked: list[ModulePlace] = []
        self._hooks: list[Any] = []

    def __enter__(self) -> Places:
        self._steps.__enter__()
        self._hooks.append(register_optimizer_step_pre_hook(self._enter_optimizer))
        self._hooks.append(register_optimizer_step_post_hook(self._leave_optimizer))
        return self

    def __exit__(self, *exception: object) -> None:
        self._steps.__exit__()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    # --- where are we

    def _find_phase(self) -> str:
        if self._backward_passes:
            return BACKWARD
        if self.module is self.outside or self._idle is EVALUATION:
            return self._idle
        return FORWARD

    def _begin_moment(self) -> None:
        if self.on_moment_end is not None:
            self.on_moment_end(self.moment)
        self.phase = self._find_phase()
        self.moment = StepPhase(self.step, self.phase, self.root_calls, self._begun_passes)
        line = self.torch_optimizer_line if self.phase is OPTIMIZER else None
        self._optimizer_place = self.optimizer_place = (
            None if line is None else (self.moment, self.module, line)
        )

    def begin_backward(self) -> None:
        self._outer_lines[id(sys._getframe(1))] = None
        self._backward_passes += 1
        self._begun_passes += 1
        self._backward_line = None
        self._asked = 0
        self._begin_moment()

    def end_backward(self) -> None:
        self._outer_lines.pop(id(sys._getframe(1)), None)
        self._backward_passes -= 1
        self._backward_line = None
        if not self._backward_passes:
            self._idle = OPTIMIZER if self._stepping else AFTER_BACKWARD
            if self.on_backward_end is not None:
                self.on_backward_end()
        self._begin_moment()

    def module_of(self, phase: str) -> ModulePlace:
        """The module that the running operator belongs to."""
        if (
            phase is not BACKWARD or self.module is not self.outside
        ):  # checkpointing calls modules in backward
            return self.module
        if not self._marks:
            return self.outside
        self._asked = asked = self._asked + 1
        if asked > MOST_NODES and (asked % SPARSE or asked > SPARSE * MOST_NODES):
            return self._latest
        node = running_node()
        index = 0 if node is None else bisect_right(self._marks, number_of_node(node))
        self._latest = latest = self._marked[index - 1] if index else self.outside
        return latest

    def module_of_call(self, call: int) -> ModulePlace:
        """The same, of the call with this number: found already if it has made something."""
        return self._birthplace[1] if self._located == call else self.module_of(self.phase)

    def locate(self, record: MemoryRecord) -> None:
        """Write down where memory is born. All results of one call are born in one place."""
        place = self._optimizer_place
        if place is not None:
            record.birthplace = place
            return
        call = record.call
        if self._located == call and record.maker is not None:
            record.birthplace = self._birthplace
            return
        module = self.module if self.phase is not BACKWARD else self.module_of(BACKWARD)
        line = self.torch_optimizer_line
        if line is None:
            frame = sys._getframe(4)  # up to there, it is ours
            if frame.f_code is not BACKWARD_CODE:
                line = self._search_line(frame)
            else:
                line = self._backward_line = self._backward_line or self._search_line(frame)
        record.birthplace = self._birthplace = self.moment, module, line
        self._located = call  # memory born after the call has no operator

    def _search_line(self, frame: FrameType | None) -> LinePlace | None:
        """The innermost line of the user's own code, as a code object and a number: text comes later. Where none is running,
        that of an installed package which is neither torch nor this one."""
        outer_lines = self._outer_lines
        innermost: FrameType | None = None
        outermost: FrameType | None = None
        line: LinePlace | None = None
        passed: dict[int, FrameType | None] = {}
        """Boundaries whose line is not known yet, with the innermost frame of a package outside of them."""
        while frame is not None:
            code = frame.f_code
            kind = get_kind(code.co_filename)
            if kind is None:
                kind = _find_kind(code)
            if kind:
                if kind == INSTALLED:
                    innermost = innermost or frame
                    for number, outer in passed.items():
                        passed[number] = outer or frame
                elif kind == BOUNDARY:
                    if (number := id(frame)) in outer_lines:
                        line = outer_lines[number]
                        if line is not None:
                            break
                        passed[number] = None
                elif kind == OWN:
                    line = _find_line_place(frame)
                    break
                elif (
                    code.co_name == "<module>"
                ):  # generated code has no line, but for the outermost: that of `python -c`
                    outermost = frame
            frame = frame.f_back
        if line is None and outermost is not None:
            line = _find_line_place(outermost)
        if line is not None:
            for number, outer in passed.items():
                outer_lines[number] = _join(line, outer)
        return _join(line, innermost)

    def describe(self) -> tuple[int, str, str]:
        """Step, phase and the path of the module."""
        return self.step, self.phase, self.module_of(self.phase).path

    # --- modules

    def enter_module(self, module: torch.nn.Module, args: object, kwargs: object) -> ModulePlace:
        """Returns the module that was running before, for `leave_module`."""
        self._outer_lines[id(sys._getframe(1))] = None
        before = self.module
        place = self._by_module.get(id(module))
        if place is None or place.module() is not module:
            place = self._add_module(module)
        if before is self.outside:
            self.root_calls += 1
            if not self._backward_passes:
                self._idle = self._find_phase_of_call(module)  # also in the closure of an optimizer
            self._begin_moment()
            if self.on_root_call is not None:
                self.on_root_call(module, args, kwargs)
        place.calls += 1
        self.module = place
        self._mark(place)
        return before

    def _find_phase_of_call(self, module: torch.nn.Module) -> str:
        """EVALUATION where a model that is being trained is called without gradients, and for a loss function after it. A
        model without anything to train (a teacher, a frozen encoder) is a part of the step."""
        if torch.is_grad_enabled() or not (self._begun_passes or self._steps.counts):
            return FORWARD
        parameters = list(module.parameters())
        if any(parameter.requires_grad for parameter in parameters):
            return FORWARD if module.training else EVALUATION
        return EVALUATION if self._idle is EVALUATION else FORWARD

    def leave_module(self, before: ModulePlace) -> None:
        self._outer_lines.pop(id(sys._getframe(1)), None)
        self.module = before
        self._mark(before)
        if before is self.outside:
            self._begin_moment()

    def _mark(self, place: ModulePlace) -> None:
        number = count_autograd_nodes()
        if self._marks and self._marks[-1] >= number:
            self._marked[-1] = place
        else:
            self._marks.append(number)
            self._marked.append(place)

    def _add_module(self, module: torch.nn.Module) -> ModulePlace:
        """Register a module; with a root, all modules below it."""
        if self.module is self.outside:
            frames = _list_frames()
            root = _find_root(module, frames)
            name = self._name_root(root, frames)
            self.roots[name] = Root(weakref.ref(root), next(root.parameters(), None) is not None)
            self._only_model = self._find_only_model()
            for path, part in root.named_modules():
                self._by_module[id(part)] = self._place(f"{name}.{path}" if path else name, part)
        else:  # made in forward, or not registered
            self._by_module[id(module)] = self._place(f"{self.module.path}.{type(module).__name__}", module)
        return self._by_module[id(module)]

    def _name_root(self, root: torch.nn.Module, frames: list[FrameType]) -> str:
        """Its name in the program. A number is added where another module has the name, or one of another
        class had it."""
        name = wanted = _find_name(root, frames) or type(root).__name__
        number = 1
        while name in self.roots and (
            self.roots[name].module() not in (None, root) or self.by_path[name].kind != type(root).__name__
        ):
            number += 1
            name = f"{wanted}_{number}"
        return name

    def _find_only_model(self) -> str | None:
        models = [name for name, root in self.roots.items() if root.has_parameters] or list(self.roots)
        return models[0] if len(models) == 1 else None

    def shorten_path(self, path: str) -> str:
        """The path without the name of the model, if the program has only one model."""
        model = self._only_model
        if model is None or not path.startswith(model):
            return path
        return path[len(model) + 1 :] if path[len(model) : len(model) + 1] in ("", ".") else path

    def _place(self, path: str, module: torch.nn.Module) -> ModulePlace:
        place = ModulePlace(path, type(module).__name__, module)
        known = self.by_path.setdefault(path, place)
        if known is not place and known.kind == place.kind and known.module() in (None, module):
            known.module = place.module
            return known
        return place

    # --- optimizers

    def _enter_optimizer(
        self, optimizer: torch.optim.Optimizer, args: tuple[object, ...], kwargs: object
    ) -> None:
        if getattr(active_fake_mode(), "places", None) is self:
            if optimizer in self._stepping:  # its step before has failed
                self._stepping.clear()
            self._stepping.append(optimizer)
            self._idle = OPTIMIZER
            if type(optimizer).__module__.startswith("torch.optim") and len(args) < 2 and not kwargs:
                self.torch_optimizer_line = self._search_line(sys._getframe(1))
            self._begin_moment()
            if self.on_optimizer is not None:
                self.on_optimizer(optimizer, False)

    def _leave_optimizer(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        if optimizer in self._stepping and getattr(active_fake_mode(), "places", None) is self:
            del self._stepping[self._stepping.index(optimizer) :]
            self.torch_optimizer_line = self._optimizer_place = None
            self._idle = OPTIMIZER if self._stepping else BETWEEN
            if self.on_optimizer is not None:
                self.on_optimizer(optimizer, True)
            self._steps.count(optimizer)
            if not self._stepping:
                self.step = self._steps.steps
            self._begin_moment()

    def end_failed_step(self) -> None:
        """An operator has failed. A step of torch's optimizers ends with it, and their hook is not called."""
        if self.torch_optimizer_line is not None:
            self._stepping.clear()
            self.torch_optimizer_line, self._idle = None, BETWEEN
            self._begin_moment()


# --- the names of models


def _list_frames() -> list[FrameType]:
    """List frames of the program and of packages, outermost first, without those of torch and of this library."""
    return list(user_frames())[::-1]


def _find_root(module: torch.nn.Module, frames: list[FrameType]) -> torch.nn.Module:
    """The module itself, or the outermost one that contains it and one of whose methods is running."""
    for frame in frames:
        code = frame.f_code
        owner = _read_variables(frame).get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(owner, torch.nn.Module) and any(part is module for part in owner.modules()):
            return owner
    return module


def _find_name(root: torch.nn.Module, frames: list[FrameType]) -> str | None:
    """What the program calls a module: a variable, an entry of a list (`layers.3`), an attribute of a running object."""
    own = [frame for frame in frames if not is_installed(frame.f_code.co_filename)]
    for frame in own or frames:
        variables = _read_variables(frame)
        attributes = getattr(variables.pop("self", None), "__dict__", {})
        for name, value in [*variables.items(), *attributes.items()]:
            if value is root:
                return name
            if type(value) in (list, tuple, torch.nn.ModuleList):
                for index, entry in enumerate(value):
                    if entry is root:
                        return f"{name}.{index}"
    return None


def _read_variables(frame: FrameType) -> dict[str, Any]:
    """Local variables, or, of a module, global ones. Until Python 3.13 a frame keeps what it has been asked for: tensors
    in it would live longer than in the program."""
    variables = frame.f_locals
    found = dict(variables)
    if type(variables) is dict and frame.f_code.co_flags & CO_OPTIMIZED:
        variables.clear()
    return found


@patch("torch.nn.Module.__call__", during=OBSERVATION)
def follow_modules(original: Callable[..., object]) -> Callable[..., Any]:
    """A report attributes memory to modules."""

    def __call__(module: torch.nn.Module, *args: object, **kwargs: object) -> Any:
        places = getattr(active_fake_mode(), "places", None)
        if places is None:
            return original(module, *args, **kwargs)
        before = places.enter_module(module, args, kwargs)
        try:
            return original(module, *args, **kwargs)
        finally:
            places.leave_module(before)

    return __call__


@patch("torch.autograd._engine_run_backward", "torch.autograd.graph._engine_run_backward", during=OBSERVATION)
def follow_backward(original: Callable[..., object]) -> Callable[..., Any]:
    """A report attributes memory to phases."""

    def run_backward(*args: object, **kwargs: object) -> Any:
        places = getattr(active_fake_mode(), "places", None)
        if places is None:
            return original(*args, **kwargs)
        places.begin_backward()
        try:
            return original(*args, **kwargs)
        finally:
            places.end_backward()

    return run_backward
