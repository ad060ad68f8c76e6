"""Composite operators on symbolic sizes, from memory.

C++ breaks `matmul`, `linear`, attention and others up into simpler operators, and asks the sizes what to do: hundreds of
questions for one `matmul`, each of them a call into Python. What it did once for some specs, it does again for the same
ones: the simple operators that a call led to are its recipe. Stand-ins with symbolic sizes carry a dispatch key of
their own, above autograd, on which the kernels of this file are registered; they look for a recipe first.

A recipe is followed through the dispatcher, so that autograd and every mode hear the same operators as before. Where
nobody would hear of them, and the result is a new tensor, that tensor is all there is to make.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from understudy import _torch
from understudy.fake.realise import make_new
from understudy.fake.templates import make_symbolic, on_first_symbol
from understudy.fake.tensor import FakeTensor
from understudy.infer.cache import PLAIN_TYPES, SIZED_TYPES, UnusualArgument, add_value
from understudy.infer.engine import cache
from understudy.infer.shared import SharedPlans, SharedQuestion
from understudy.ops.registry import hidden_writes
from understudy.ops.shared.decompositions import decomposed_kernel, decomposition
from understudy.ops.traits.caching import asks_much, remembered, remembered_if_strided
from understudy.shapes.patterns import Pattern
from understudy.shapes.sizes import from_torch, to_torch
from understudy.spec import TensorSpec
from understudy.spec.call import flat

if TYPE_CHECKING:
    from understudy.fake.mode import FakeTensorMode

is_grad_enabled = torch.is_grad_enabled
count_dispatch_modes = _torch.count_dispatch_modes


class NoRecipe(Exception):
    """An argument that no recipe can be found by, or made of."""


class RecipeStep(NamedTuple):
    """A call of a simple operator. `tensors` says which value goes to which position, or name, among the arguments: the
    inputs of the composite come first, then the results of the steps before."""

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
    `spec`: if that is a new tensor, or a view of one, and nothing else can be told from the steps, the new tensor's.
    `views`: the steps from there to the result. `spoilt`: the inputs that are written to although no schema says so.
    `is_nothing`: the result is an input, as it is."""

    __slots__ = ("calls", "is_nothing", "result", "spec", "spoilt", "steps", "views")

    def __init__(
        self, steps: list[RecipeStep], result: int, spec: TensorSpec | None = None, views: tuple[RecipeStep, ...] = (),
        spoilt: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        self.steps = steps
        self.result = result
        self.spec = spec
        self.views = views
        self.spoilt = spoilt
        self.is_nothing = not steps and result >= 0
        self.calls = [(_torch.native_call(step.op), step) for step in steps]

    def follow(self, tensors: list[FakeTensor]) -> Any:
        """Through the dispatcher, operator by operator. The list is used up."""
        values: list[Any] = tensors
        for run, (_, args, places, kwargs) in self.calls:
            args = args.copy()
            for position, number in places:
                if type(position) is int:
                    args[position] = values[number]
                else:
                    kwargs = {**kwargs, position: values[number]}
            made = run(*args, **kwargs)
            if type(made) is tuple or type(made) is list:  # (a stand-in takes its time to say what it is an instance of)
                values.extend(made)
            else:
                values.append(made)
        return values[self.result]

    def result_in(self, mode: FakeTensorMode, tensors: list[FakeTensor]) -> Any:
        """The result alone."""
        cache.hits += 1
        for number in self.spoilt:
            record = tensors[number]._known
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
            fake = step.call(AlwaysOne(fake))
        return fake


class AlwaysOne:
    """The one value that every number stands for."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __getitem__(self, number: int) -> FakeTensor:
        return self.value


NONE = Recipe([], -1)
"""Stands for calls that are left to C++."""


# --- finding ------------------------------------------------------------------------------------------------------


def _kernel(op: Any) -> Callable[..., Any]:
    is_attention = op is torch.ops.aten.scaled_dot_product_attention.default
    state = _attention_backends if is_attention else None  # what else C++ looks at
    is_curious = asks_much.of(op) is not None
    run = decomposed_kernel(op, decomposition.of(op))

    def kernel(*args: object, **kwargs: object) -> object:
        if not is_curious and _is_listened_to(args):
            return run(*args, **kwargs)
        tensors: list[FakeTensor] = []
        key: list[Any] = [op, is_grad_enabled()]
        try:
            _describe(key, tensors, args)
            if kwargs:
                key.extend(kwargs)
                _describe(key, tensors, kwargs.values())
            if state is not None:
                key.append(state())
            mode = _mode_of(tensors)
            recipe = mode._cache.recipes.get(tuple(key))
        except (NoRecipe, UnusualArgument, TypeError):
            recipe = NONE
        if recipe is None:
            question = mode._shared.question(tuple(key))
            recipe = None if question is None else mode._shared.answer(question, partial(_localise_recipe, mode._shared))
            if recipe is None:
                return _record_recipe(mode, run, args, kwargs, tensors, tuple(key), question)
            mode._cache.recipes[tuple(key)] = recipe
        if recipe.spec is not None and _torch.goes_unnoticed(mode):
            return recipe.result_in(mode, tensors)
        if recipe.is_nothing:
            return tensors[recipe.result]
        if is_curious and recipe is not NONE:
            return recipe.follow(tensors)
        return run(*args, **kwargs)

    return kernel


def _is_listened_to(args: tuple[object, ...]) -> bool:
    """Whether more than the result is wanted: another mode is active, or autograd records."""
    if count_dispatch_modes() > 1:
        return True
    if is_grad_enabled():
        for value in args:
            if type(value) is FakeTensor and value.requires_grad:
                return True
    return False


def _describe(key: list[object], tensors: list[FakeTensor], values: Any) -> None:
    """Add to the key all that C++ could ask of these arguments."""
    add = key.append
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            add(value._spec)
            add(value.requires_grad)
            add(value._known is not None and value._known.content is not None)
            for position, other in enumerate(tensors):
                if other is value:  # what is done to the one can't be told from what is done to the other
                    add(position)
                    break
            tensors.append(value)
        elif kind is list or kind is tuple:
            add(kind)
            add(len(value))
            _describe(key, tensors, value)
        elif kind is torch.device:
            add(value)
        else:
            add_value(key, kind, value)


def _mode_of(tensors: list[FakeTensor]) -> FakeTensorMode:
    """The mode of these tensors, if it is one for all, and if nothing stands between the call and its operators."""
    if not tensors:
        raise NoRecipe
    mode = tensors[0].fake_mode
    for tensor in tensors:
        if tensor.fake_mode is not mode:
            raise NoRecipe
    if not mode._direct or _torch.composites_are_special():
        raise NoRecipe
    return mode


def _attention_backends() -> tuple[bool, ...]:
    return tuple(_torch.attention_backends())


# --- recording ----------------------------------------------------------------------------------------------------


class OperatorListener(_torch.TorchDispatchMode):
    """Takes down the operators that it hears."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.heard: list[tuple[Any, Any, Any, Any]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.heard.append((func, args, kwargs or {}, made))
        return made


def _record_recipe(
    mode: FakeTensorMode, run: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object],
    tensors: list[FakeTensor], key: object,
    question: SharedQuestion | None,
) -> object:  # fmt: skip
    with OperatorListener() as listener:
        result = run(*args, **kwargs)
    if not mode.shape_env.suppresses_guards:  # a recipe would never record what it assumes
        recipe = mode._cache.recipes[key] = _recipe(listener.heard, tensors, result)
        if question is not None:
            mode._shared.keep(question, partial(_generalise_recipe, mode._shared), recipe)
    return result


def _recipe(heard: list[tuple[Any, Any, Any, Any]], tensors: list[FakeTensor], result: object) -> Recipe:
    values: list[Any] = list(tensors)
    numbers: dict[int, int] = {}
    for number, tensor in enumerate(tensors):
        numbers.setdefault(id(tensor), number)
    steps: list[RecipeStep] = []
    makers: dict[int, RecipeStep] = {}
    try:
        for op, args, kwargs, made in heard:
            step = _step(op, args, kwargs, numbers)
            steps.append(step)
            for part in made if isinstance(made, (tuple, list)) else (made,):
                numbers.setdefault(id(part), len(values))
                makers[len(values)] = step
                values.append(part)
    except NoRecipe:
        return NONE
    if id(result) not in numbers:
        return NONE
    spec, views = _origin(numbers[id(result)], values, makers, tensors)
    if spec is None or any(_writes_to(step, values, tensors) for step in steps):
        return Recipe(steps, numbers[id(result)])
    spoilt = {number for step in steps for number in _spoilt_by(step) if number < len(tensors)}
    return Recipe(steps, numbers[id(result)], spec, views, tuple(spoilt))


def _step(op: object, args: Any, kwargs: Any, numbers: dict[int, int]) -> RecipeStep:
    given = dict(enumerate(args)) | kwargs
    places = []
    for position, value in given.items():
        if isinstance(value, torch.Tensor):
            if id(value) not in numbers:
                raise NoRecipe  # a tensor that C++ made past the dispatcher
            places.append((position, numbers[id(value)]))
            given[position] = None
        elif flat(torch.Tensor, (value,), {}):
            raise NoRecipe
    return RecipeStep(
        op, [given[i] for i in range(len(args))], tuple(places), {name: given[name] for name in kwargs}
    )


def _origin(
    number: int, values: list[Any], makers: dict[int, RecipeStep], tensors: list[FakeTensor]
) -> tuple[TensorSpec | None, tuple[RecipeStep, ...]]:
    """The spec of the new tensor that a result is, or is a view of, and how the view was made."""
    views: list[RecipeStep] = []
    if values[number].requires_grad or values[number]._known is not None or values[number]._version:
        return None, ()
    while number in makers and values[number]._is_view():
        step = makers[number]
        if len(step.tensors) != 1 or isinstance(values[number], (tuple, list)):
            return None, ()
        views.insert(0, step)
        number = step.tensors[0][1]
    spec = values[number]._spec
    is_plain = spec.layout is torch.strided and not (spec.conj or spec.neg or values[number]._known)
    if not is_plain or _torch.storage_id(values[number]) in _storages(tensors):
        return None, ()
    return spec, tuple(views)


def _writes_to(step: RecipeStep, values: list[torch.Tensor], tensors: list[FakeTensor]) -> bool:
    """Whether it writes to the storage of one of these tensors."""
    written = {place for argument in _torch.written_arguments(step.op) for place in argument}
    return any(
        position in written and _torch.storage_id(values[number]) in _storages(tensors)
        for position, number in step.tensors
    )


def _spoilt_by(step: RecipeStep) -> list[int]:
    """The values that it writes to without counting."""
    hidden = hidden_writes.of(step.op)
    if hidden is None:
        return []
    names = _torch.argument_names(step.op)
    is_written = dict(zip(names, step.args, strict=False), **step.kwargs)[hidden.switch]
    places = {*hidden.written, *map(names.index, hidden.written)} if is_written else set()
    return [number for position, number in step.tensors if position in places]


def _storages(tensors: list[FakeTensor]) -> set[int]:
    return {_torch.storage_id(tensor) for tensor in tensors}


# --- sharing ------------------------------------------------------------------------------------------------------


class SharedRecipe(NamedTuple):
    """A recipe with forms in the place of specs and numbers; `views` are positions among the steps."""

    steps: list[RecipeStep]
    result: int
    spec: Any
    views: tuple[int, ...]
    spoilt: tuple[int, ...]


def _generalise_recipe(shared: SharedPlans, recipe: Recipe) -> SharedRecipe | None:
    if recipe is NONE:
        return None
    positions = {id(step): position for position, step in enumerate(recipe.steps)}
    return SharedRecipe(
        [_change_step(step, partial(_argument_anywhere, shared)) for step in recipe.steps], recipe.result,
        shared.anywhere(recipe.spec), tuple([positions[id(step)] for step in recipe.views]), recipe.spoilt,
    )  # fmt: skip


def _localise_recipe(shared: SharedPlans, known: SharedRecipe | None) -> Recipe:
    if known is None:
        return NONE
    steps = [_change_step(step, partial(_argument_here, shared)) for step in known.steps]
    views = tuple([steps[position] for position in known.views])
    return Recipe(steps, known.result, shared.here(known.spec), views, known.spoilt)


def _change_step(step: RecipeStep, change: Callable[[object], object]) -> RecipeStep:
    kwargs = {name: change(value) for name, value in step.kwargs.items()}
    return RecipeStep(step.op, [change(value) for value in step.args], step.tensors, kwargs)


def _argument_anywhere(shared: SharedPlans, value: Any) -> Any:
    kind = type(value)
    if kind is list or kind is tuple:
        return kind([_argument_anywhere(shared, part) for part in value])
    is_plain = kind in PLAIN_TYPES or kind in SIZED_TYPES or kind is torch.device
    return value if is_plain else shared.anywhere(from_torch(value))


def _argument_here(shared: SharedPlans, value: Any) -> Any:
    kind = type(value)
    if kind is list or kind is tuple:
        return kind([_argument_here(shared, part) for part in value])
    return to_torch(shared.here(value)) if kind is Pattern else value


# --- registration -------------------------------------------------------------------------------------------------

_libraries: list[Any] = []
_registering = threading.Lock()


def register_kernels() -> None:
    """Once, when the first stand-in with symbolic sizes is made."""
    with _registering:
        if not _libraries:
            for key, names in ((_torch.SPARE_WRAPPER, remembered), (_torch.SPARE_MODE, remembered_if_strided)):
                kernels, others = _torch.kernel_libraries(key)
                _libraries.extend((kernels, others))
                for name in names:
                    kernels.impl(name, _kernel(_torch.operator_named(name)))
            for name, function in decomposition.items():
                if name not in remembered and name not in remembered_if_strided:
                    _libraries[0].impl(name, decomposed_kernel(_torch.operator_named(name), function))


on_first_symbol.append(register_kernels)
