"""Recorded decompositions of composite operators.

C++ decomposes `matmul`, `linear`, attention and others into simpler operators, and branches on the sizes: where they are
symbolic, hundreds of comparisons for one `matmul`, each a call into Python. For the same specs the decomposition is always
the same: the list of simple operators is the recipe of the call. Stand-ins with symbolic sizes, and those with plain sizes
that are made where no gradient is recorded, carry a spare dispatch key above autograd, on which the kernels of this file
are registered; they look for a recipe first.

Where no other mode is active, no gradient is recorded and the result is a new tensor, only that tensor is made. Otherwise
the recipe is replayed through the dispatcher (symbolic sizes), or C++ runs (plain sizes): autograd and every mode see the
same operators.

The result of the most common composites on ordinary operands of plain sizes is a fact of the operator, `whole_result`: a
recipe is made of it, and C++ is not run even once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from understudy import _torch
from understudy._torch import Device
from understudy.errors import OperatorError
from understudy.fake.misses import make_call
from understudy.fake.native import on_first_recipe
from understudy.fake.realise import make_new
from understudy.fake.templates import make_symbolic, on_first_symbol
from understudy.fake.tensor import FakeTensor
from understudy.infer.cache import NAN, ORDINARY_FLOATS, PLAIN_TYPES, SIZED_TYPES, UnusualArgument, add_value
from understudy.infer.engine import cache
from understudy.infer.shared import SharedPlans, SharedQuestion
from understudy.ops.registry import record_of, user_rule
from understudy.ops.shared.decompositions import decomposed_kernel, decomposition, is_recorded_symbolically
from understudy.ops.shared.layouts import check_storage_size
from understudy.ops.traits.caching import (
    ViewOfNew,
    has_recipe,
    has_recipe_if_static,
    has_recipe_if_strided,
)
from understudy.ops.traits.writes import written_inputs
from understudy.shapes.patterns import Pattern
from understudy.shapes.sizes import from_torch, to_torch
from understudy.spec import TensorSpec
from understudy.spec.call import flat

if TYPE_CHECKING:
    from understudy.fake.mode import FakeTensorMode

is_grad_enabled = torch.is_grad_enabled
count_dispatch_modes = _torch.count_dispatch_modes
aten = torch.ops.aten


class NoRecipe(Exception):
    """The call has an argument that can't be part of a recipe or of its key."""


class RecipeStep(NamedTuple):
    """A call of a simple operator. `tensors` pairs positions or names of arguments with numbers of values: the inputs
    of the composite come first, then the results of the steps before."""

    op: Any
    args: list[Any]
    tensors: tuple[tuple[Any, int], ...]
    kwargs: dict[str, Any]

    def call(self, values: Any) -> Any:
        args, kwargs = self.args.copy(), self.kwargs
        for position, number in self.tensors:
            if type(position) is int:
                args[position] = values[number]
            else:
                kwargs = {**kwargs, position: values[number]}
        return _torch.native_call(self.op)(*args, **kwargs)


class Recipe:
    """`steps`: the simple operators, in order. `result`: the number of the value that is their result.
    `spec`: that of the new tensor, if the result is a new tensor or a view of one, and the steps have no other effect.
    `views`: the steps from there to the result. `undeclared_writes`: inputs that are written to, against the schema.
    `is_identity`: the result is an input, unchanged."""

    __slots__ = ("calls", "is_identity", "result", "spec", "steps", "undeclared_writes", "views")

    def __init__(
        self, steps: list[RecipeStep], result: int, spec: TensorSpec | None = None, views: tuple[RecipeStep, ...] = (),
        undeclared_writes: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        self.steps = steps
        self.result = result
        self.spec = spec
        self.views = views
        self.undeclared_writes = undeclared_writes
        self.is_identity = not steps and result >= 0
        self.calls = [(_torch.native_call(step.op), step) for step in steps]

    def replay(self, tensors: list[FakeTensor]) -> Any:
        """Call the operators in order, through the dispatcher. Results are appended to the list of tensors."""
        values: list[Any] = tensors
        for run, (_, args, tensor_positions, kwargs) in self.calls:
            args = args.copy()
            for position, number in tensor_positions:
                if type(position) is int:
                    args[position] = values[number]
                else:
                    kwargs = {**kwargs, position: values[number]}
            made = run(*args, **kwargs)
            if type(made) is tuple or type(made) is list:  # (isinstance is slow on stand-ins)
                values.extend(made)
            else:
                values.append(made)
        return values[self.result]

    def make_result(self, mode: FakeTensorMode, tensors: list[FakeTensor]) -> Any:
        """Make the result only, without calling the operators."""
        for number in self.undeclared_writes:
            record = tensors[number]._determined
            if record is not None:
                record.forget()
        spec = self.spec
        assert spec is not None
        if spec.is_symbolic:
            fake = make_symbolic(spec)
            fake._spec = spec
            fake.fake_mode = mode
        else:
            fake = make_new(mode, spec)
        for step in self.views:
            fake = step.call(ConstantSequence(fake))
        return fake


class ConstantSequence:
    """A sequence whose elements are all the same value."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __getitem__(self, number: int) -> FakeTensor:
        return self.value


NONE = Recipe([], -1)
"""Marks calls that are left to C++."""


# --- finding ------------------------------------------------------------------------------------------------------


def _make_kernel(op: Any) -> Callable[..., Any]:
    state = _find_state(op)
    record = record_of(op)
    needs_recipe_always = record.needs_recipe is not None
    run = decomposed_kernel(op, record.decomposition)

    def kernel(*args: object, **kwargs: object) -> object:
        if not needs_recipe_always and _needs_each_operator(args):
            return run(*args, **kwargs)
        tensors: list[FakeTensor] = []
        key: list[Any] = [op, is_grad_enabled(), needs_recipe_always and is_recorded_symbolically()]
        try:
            _add_to_key(key, tensors, args)
            if kwargs:
                key.extend(kwargs)
                _add_to_key(key, tensors, kwargs.values())
            if state is not None:
                key.append(state())
            mode = _mode_of(tensors)
            if _torch.composites_are_observed():
                raise NoRecipe
            recipe = mode._cache.recipes.get(tuple(key))
        except (NoRecipe, UnusualArgument, TypeError):
            recipe = NONE
        if recipe is None:
            question = mode._shared_plans.make_question(tuple(key))
            if question is not None:
                recipe = mode._shared_plans.find_answer(
                    question, partial(_localise_recipe, mode._shared_plans)
                )
            if recipe is None:
                return _record_recipe(mode, run, args, kwargs, tensors, tuple(key), question)
            mode._cache.add_recipe(tuple(key), recipe)
        if recipe.spec is not None and _torch.can_skip_dispatch_for(mode):
            cache.hits += 1
            return recipe.make_result(mode, tensors)
        if recipe.is_identity:
            return tensors[recipe.result]
        if needs_recipe_always and recipe is not NONE:
            return recipe.replay(tensors)
        return run(*args, **kwargs)

    return kernel


def _make_static_kernel(op: Any) -> Callable[..., Any]:
    """For plain sizes, which C++ decomposes quickly: a recipe is used only where nothing but its result has to be made."""
    state = _find_state(op)
    run = decomposed_kernel(op, None)

    def kernel(*args: object, **kwargs: object) -> object:
        if is_grad_enabled() or count_dispatch_modes() > 1:
            return run(*args, **kwargs)
        tensors: list[FakeTensor] = []
        key: list[Any] = [id(op), None if state is None else state()]  # hashing an operator is slow
        try:
            _add_to_key(key, tensors, args)
            if kwargs:
                key.extend(kwargs)
                _add_to_key(key, tensors, kwargs.values())
            mode = _mode_of(tensors)
        except (NoRecipe, UnusualArgument, TypeError):
            return run(*args, **kwargs)
        if not (mode.can_skip_dispatch and _torch.can_skip_composites_for(mode)):
            return run(*args, **kwargs)
        key.append(mode._facts_number)
        full = tuple(key)
        recipe = mode._cache.recipes.get(full)
        if recipe is None:
            recipe = _infer_whole(mode, op, args, kwargs, tensors)
            if recipe is None:
                return _record_recipe(mode, run, args, kwargs, tensors, full, None)
            mode._cache.add_recipe(full, recipe, is_inferred=True)
            return recipe.make_result(mode, tensors)
        if recipe.spec is not None:
            cache.hits += 1
            return recipe.make_result(mode, tensors)
        return tensors[recipe.result] if recipe.is_identity else run(*args, **kwargs)

    return kernel


def _infer_whole(
    mode: FakeTensorMode, op: Any, args: Any, kwargs: Any, tensors: list[FakeTensor]
) -> Recipe | None:
    """A recipe from the result alone, without the operators inside the composite; None if they are needed."""
    whole = record_of(op).whole_result
    if (
        whole is None
        or not _are_ordinary(tensors)
        or any(name.startswith("aten::") for name in user_rule.names)
    ):
        return None
    call = make_call(mode, op, args, kwargs)
    try:
        answer = whole(*call.args, **call.kwargs)
        if answer is NotImplemented:
            return None
        spec = answer.base if isinstance(answer, ViewOfNew) else answer
        check_storage_size(spec)
    except OperatorError:
        return None  # the operator inside that refuses it has more to say
    views = () if spec is answer else (RecipeStep(aten.view.default, [None, [*answer.shape]], ((0, 0),), {}),)
    return Recipe([], -1, spec, views, written_inputs(call))


def _are_ordinary(tensors: list[FakeTensor]) -> bool:
    """Whether they are of one floating-point dtype, or masks, on one device, have elements, and not all have determined
    values."""
    specs = [tensor._spec for tensor in tensors]
    dtype, device = specs[0].dtype, specs[0].device
    if dtype not in ORDINARY_FLOATS or all(tensor._determined is not None for tensor in tensors):
        return False
    for spec in specs:
        if (
            (spec.dtype is not dtype and spec.dtype is not torch.bool)
            or spec.device != device
            or 0 in spec.shape
        ):
            return False
        if spec.is_symbolic or spec.sparse is not None or spec.neg:
            return False
    return True


def _find_state(op: Any) -> Callable[[], tuple[bool, ...]] | None:
    """What C++ branches on besides the arguments of this operator."""
    return _attention_backends if op is aten.scaled_dot_product_attention.default else None


def _needs_each_operator(args: tuple[object, ...]) -> bool:
    """Whether each operator has to be dispatched: another mode is active, or autograd records."""
    if count_dispatch_modes() > 1:
        return True
    if is_grad_enabled():
        for value in args:
            if type(value) is FakeTensor and value.requires_grad:
                return True
    return False


def _add_to_key(key: list[object], tensors: list[FakeTensor], values: Any) -> None:
    """Add everything to the key that C++ may branch on."""
    add = key.append
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            add(value._spec)
            add(value.requires_grad)
            add(value._determined is not None and value._determined.content is not None)
            for position, other in enumerate(tensors):
                if other is value:  # the same tensor twice: the recipe depends on it
                    add(position)
                    break
            tensors.append(value)
        elif kind is float or kind is bool:
            key += (kind, value if value == value else NAN)
        elif kind is list or kind is tuple:
            add(kind)
            add(len(value))
            _add_to_key(key, tensors, value)
        elif kind is Device:
            add(value)
        else:
            add_value(key, kind, value)


def _mode_of(tensors: list[FakeTensor]) -> FakeTensorMode:
    """The mode of these tensors. Raises `NoRecipe` if there are several, or if its cache is not used."""
    if not tensors:
        raise NoRecipe
    mode = tensors[0].fake_mode
    for tensor in tensors:
        if tensor.fake_mode is not mode:
            raise NoRecipe
    if not mode._can_replay:
        raise NoRecipe
    return mode


def _attention_backends() -> tuple[bool, ...]:
    return tuple(_torch.attention_backends())


# --- recording ----------------------------------------------------------------------------------------------------


class OperatorLog(_torch.TorchDispatchMode):
    """Records the operators that are dispatched."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, made))
        return made


def _record_recipe(
    mode: FakeTensorMode, run: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object],
    tensors: list[FakeTensor], key: object,
    question: SharedQuestion | None,
) -> object:  # fmt: skip
    with _torch.dispatch_mode(OperatorLog()) as log:
        result = run(*args, **kwargs)
    env = mode.shape_env
    if (
        env is None or not env.suppresses_guards
    ):  # replaying the recipe would not record the guards that it needs
        recipe = _make_recipe(log.calls, tensors, result)
        mode._cache.add_recipe(key, recipe)
        if question is not None:
            mode._shared_plans.share_answer(question, partial(_generalise_recipe, mode._shared_plans), recipe)
    return result


def _make_recipe(calls: list[tuple[Any, Any, Any, Any]], tensors: list[FakeTensor], result: object) -> Recipe:
    values: list[Any] = list(tensors)
    numbers: dict[int, int] = {}
    for number, tensor in enumerate(tensors):
        numbers.setdefault(id(tensor), number)
    steps: list[RecipeStep] = []
    step_of: dict[int, RecipeStep] = {}
    try:
        for op, args, kwargs, made in calls:
            step = _make_step(op, args, kwargs, numbers)
            steps.append(step)
            for part in made if isinstance(made, (tuple, list)) else (made,):
                numbers.setdefault(id(part), len(values))
                step_of[len(values)] = step
                values.append(part)
    except NoRecipe:
        return NONE
    if id(result) not in numbers:
        return NONE
    spec, views = _find_new_tensor(numbers[id(result)], values, step_of, tensors)
    if spec is None or any(_writes_to(step, values, tensors) for step in steps):
        return Recipe(steps, numbers[id(result)])
    undeclared_writes = {
        number for step in steps for number in _find_undeclared_writes(step) if number < len(tensors)
    }
    return Recipe(steps, numbers[id(result)], spec, views, tuple(undeclared_writes))


def _make_step(op: object, args: Any, kwargs: Any, numbers: dict[int, int]) -> RecipeStep:
    given = dict(enumerate(args)) | kwargs
    tensor_positions = []
    for position, value in given.items():
        if isinstance(value, torch.Tensor):
            if id(value) not in numbers:
                raise NoRecipe  # a tensor that C++ made without the dispatcher
            tensor_positions.append((position, numbers[id(value)]))
            given[position] = None
        elif flat(torch.Tensor, (value,), {}):
            raise NoRecipe
    return RecipeStep(
        op,
        [given[i] for i in range(len(args))],
        tuple(tensor_positions),
        {name: given[name] for name in kwargs},
    )


def _find_new_tensor(
    number: int, values: list[Any], step_of: dict[int, RecipeStep], tensors: list[FakeTensor]
) -> tuple[TensorSpec | None, tuple[RecipeStep, ...]]:
    """The spec of the new tensor that the result is, or is a view of, and the steps that make the view."""
    views: list[RecipeStep] = []
    if values[number].requires_grad or values[number]._determined is not None or values[number]._version:
        return None, ()
    while number in step_of and values[number]._is_view():
        step = step_of[number]
        if len(step.tensors) != 1 or isinstance(values[number], (tuple, list)):
            return None, ()
        views.insert(0, step)
        number = step.tensors[0][1]
    spec = values[number]._spec
    is_plain = spec.layout is torch.strided and not (spec.conj or spec.neg or values[number]._determined)
    if not is_plain or _torch.storage_id(values[number]) in _storages(tensors):
        return None, ()
    return spec, tuple(views)


def _writes_to(step: RecipeStep, values: list[torch.Tensor], tensors: list[FakeTensor]) -> bool:
    """Whether the step writes to the storage of one of these tensors."""
    written = {place for argument in _torch.written_arguments(step.op) for place in argument}
    return any(
        position in written and _torch.storage_id(values[number]) in _storages(tensors)
        for position, number in step.tensors
    )


def _find_undeclared_writes(step: RecipeStep) -> list[int]:
    """The values that the step writes to against its schema."""
    hidden = record_of(step.op).hidden_writes
    if hidden is None:
        return []
    names = _torch.argument_names(step.op)
    is_written = dict(zip(names, step.args, strict=False), **step.kwargs)[hidden.switch]
    tensor_positions = {*hidden.written, *map(names.index, hidden.written)} if is_written else set()
    return [number for position, number in step.tensors if position in tensor_positions]


def _storages(tensors: list[FakeTensor]) -> set[int]:
    return {_torch.storage_id(tensor) for tensor in tensors if tensor._spec.sparse is None}


# --- sharing ------------------------------------------------------------------------------------------------------


class SharedRecipe(NamedTuple):
    """A recipe in which symbols are replaced by patterns; `views` are positions among the steps."""

    steps: list[RecipeStep]
    result: int
    spec: Any
    views: tuple[int, ...]
    undeclared_writes: tuple[int, ...]


def _generalise_recipe(shared: SharedPlans, recipe: Recipe) -> SharedRecipe | None:
    if recipe is NONE:
        return None
    positions = {id(step): position for position, step in enumerate(recipe.steps)}
    return SharedRecipe(
        [_change_step(step, partial(_generalise_argument, shared)) for step in recipe.steps], recipe.result,
        shared.generalise(recipe.spec), tuple([positions[id(step)] for step in recipe.views]), recipe.undeclared_writes,
    )  # fmt: skip


def _localise_recipe(shared: SharedPlans, known: SharedRecipe | None) -> Recipe:
    if known is None:
        return NONE
    steps = [_change_step(step, partial(_localise_argument, shared)) for step in known.steps]
    views = tuple([steps[position] for position in known.views])
    return Recipe(steps, known.result, shared.localise(known.spec), views, known.undeclared_writes)


def _change_step(step: RecipeStep, change: Callable[[object], object]) -> RecipeStep:
    kwargs = {name: change(value) for name, value in step.kwargs.items()}
    return RecipeStep(step.op, [change(value) for value in step.args], step.tensors, kwargs)


def _generalise_argument(shared: SharedPlans, value: Any) -> Any:
    kind = type(value)
    if kind is list or kind is tuple:
        return kind([_generalise_argument(shared, part) for part in value])
    is_plain = kind in PLAIN_TYPES or kind in SIZED_TYPES or kind is Device
    return value if is_plain else shared.generalise(from_torch(value))


def _localise_argument(shared: SharedPlans, value: Any) -> Any:
    kind = type(value)
    if kind is list or kind is tuple:
        return kind([_localise_argument(shared, part) for part in value])
    return to_torch(shared.localise(value)) if kind is Pattern else value


# --- registration -------------------------------------------------------------------------------------------------

_libraries: list[Any] = []
_static_libraries: list[Any] = []
_registering = threading.Lock()


def register_kernels() -> None:
    """Called once, when the first stand-in with symbolic sizes is made."""
    with _registering:
        if not _libraries:
            for key, names in (
                (_torch.SPARE_WRAPPER, has_recipe),
                (_torch.SPARE_MODE, has_recipe_if_strided),
            ):
                kernels, others = _torch.kernel_libraries(key)
                _libraries.extend((kernels, others))
                for name in names:
                    kernels.impl(name, _make_kernel(_torch.operator_named(name)))
            for name, function in decomposition.items():
                if name not in has_recipe and name not in has_recipe_if_strided:
                    _libraries[0].impl(name, decomposed_kernel(_torch.operator_named(name), function))


def register_static_kernels() -> None:
    """Called once, when the first stand-in that carries their key is made."""
    with _registering:
        if not _static_libraries:
            _static_libraries.extend(_torch.kernel_libraries(_torch.SPARE_STATIC))
            for name in has_recipe_if_static:
                _static_libraries[0].impl(name, _make_static_kernel(_torch.operator_named(name)))


on_first_symbol.append(register_kernels)
on_first_recipe.append(register_static_kernels)
