"""FakeTensorMode: while it is active, every factory and operator gives stand-ins."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch

from understudy import _torch
from understudy._torch import Device
from understudy.contexts import GuardedExit, guard_exit
from understudy.errors import DataDependentOutputException, DynamicOutputShapeException, UnderstudyError
from understudy.fake import copying, tensor_calls
from understudy.fake import kernels as _kernels  # noqa: F401  (registers them)
from understudy.fake import patches as _patches  # noqa: F401  (registers them)
from understudy.fake.convert import FakeTensorConverter
from understudy.fake.inputs import accept_inputs
from understudy.fake.kernels import autocast
from understudy.fake.native import canonical, in_inference_mode, is_grad_enabled, prepare
from understudy.fake.realise import adopt, make_new, make_view, realise
from understudy.fake.templates import make_symbolic
from understudy.fake.tensor import FakeTensor
from understudy.fake.tensor_calls import TENSOR_SOURCES
from understudy.fake.values import data_dependent, determined, ranges
from understudy.fake.values.answers import (
    AnswerPolicy,
    Answers,
    is_in_composite,
    make_policy,
    refuse_in_composite,
)
from understudy.fake.values.determined import DeterminedContents, LiteralStorage, StoragePart
from understudy.fake.values.sizes_in_tensors import enable_symbolic_indexing
from understudy.infer.cache import PLAIN_TYPES, Cache, DispatchCacheInfo, UnusualArgument, add_value
from understudy.infer.engine import cache, infer
from understudy.infer.kernels import outcomes_of
from understudy.infer.plan import (
    BOUNDED,
    COMPOSITE,
    DECOMPOSED,
    FIRST_ITSELF,
    FIRST_VIEWED,
    ONE_DETERMINED,
    ONE_NEW,
    ONE_NEW_SYMBOLIC,
    RANGED,
    TRACKED,
    Plan,
    is_cast_inside,
    run_effects,
)
from understudy.infer.shared import SharedPlans, SharedQuestion
from understudy.ops.shared.decompositions import decompose
from understudy.ops.traits.caching import uncached
from understudy.patching import ANY_MODE, SYMBOLS, combine
from understudy.shapes.env import ShapeEnv
from understudy.shapes.node import SymNode
from understudy.shapes.sizes import from_torch, to_torch
from understudy.spec import TensorSpec
from understudy.spec.call import Call, flat_exact, map_structure
from understudy.spec.error_context import refuse_order, with_context

PLAIN_SCOPES, SYMBOLIC_SCOPES = combine(ANY_MODE), combine(ANY_MODE, SYMBOLS)
"""Which patches of torch a mode needs."""
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
SymInt = torch.SymInt
default_dtype = torch.get_default_dtype
make_wrapper = _torch.make_wrapper
Module = TypeVar("Module", bound=torch.nn.Module)


DEVICE_FACTS_NUMBERS: dict[Hashable, int] = {}
"""A number for each set of device facts: keys hold the number, because hashing the facts is slow."""
UNUSUAL_ARGUMENT = Plan(())
"""Marks a call with an argument that can't be part of a key."""


class FakeTensorMode(_torch.TorchDispatchMode):
    """Operators on tensors without data.

        with FakeTensorMode():
            y = torch.nn.Linear(10_000, 10_000)(torch.empty(64, 10_000))   # no memory, no time

    `allow_fallback_kernels`: operators without any shape rule may run for real on small zeros.
    `allow_non_fake_inputs`: real tensors beside fakes are converted instead of refused.
    `crosscheck`: every cache hit is computed again and compared.
    `answers`: the result of data-dependent reads: "error", "symbol", "plausible", "worst", or a policy
    of one's own (`fake/values/answers.py`).
    """

    _mode_key = _torch.FAKE
    supports_higher_order_operators = True
    # Read by torch's tools. This mode never runs kernels on meta tensors, and keeps no real tensors beside fakes.
    in_kernel_invocation = False
    propagate_real_tensors = False
    allow_meta = True
    is_observed = False
    """Whether `observe_new_storage` and `observe_resize` have to be called."""

    def __init__(
        self,
        *,
        allow_fallback_kernels: bool = True,
        allow_non_fake_inputs: bool = False,
        shape_env: Any = None,
        static_shapes: bool | None = None,
        export: bool = False,
        crosscheck: bool = False,
        answers: str | AnswerPolicy = "error",
    ) -> None:
        if shape_env is not None and not isinstance(shape_env, ShapeEnv):
            kind = f"{type(shape_env).__module__}.{type(shape_env).__name__}"
            raise TypeError(f"shape_env is a {kind}, where an understudy.ShapeEnv is expected: import that one")
        if answers == "symbol" and shape_env is None:
            shape_env, static_shapes = ShapeEnv(), static_shapes is None or static_shapes
        policy = make_policy(answers)
        self.answers = None if policy is None else Answers(policy)
        self.allow_fallback_kernels = allow_fallback_kernels
        self.allow_non_fake_inputs = allow_non_fake_inputs
        self.shape_env: Any = shape_env
        self.static_shapes = shape_env is None if static_shapes is None else static_shapes
        self.export, self.crosscheck = export, crosscheck
        self.cache_enabled = True
        self.epoch = 0
        self.uncounted_writes = 0
        # Of the traces that run: the last one is given each real constant that is converted, its stand-in, and its values.
        self.constant_listeners: list[Callable[[FakeTensor, torch.Tensor, torch.Tensor], None]] = []
        self._device_facts: Hashable | None = None
        self._facts_number = 0
        # The plan of the latest call, None after a cache miss. Read by modes that observe storages.
        self.last_plan: Plan | None = None
        # Plans with symbols in their keys must not outlive their environment.
        self._cache = cache if shape_env is None else Cache(counters=cache)
        # With plain sizes, almost all plans are in the cache of the process.
        self._uses_process_cache = shape_env is None or self.static_shapes
        self._find_plan = cache.plans.get if self._uses_process_cache else self._cache.plans.get
        self._shared: Any = None if shape_env is None else SharedPlans(shape_env, cache)
        self.fake_tensor_converter = FakeTensorConverter()
        self.patch_scopes = PLAIN_SCOPES if shape_env is None else SYMBOLIC_SCOPES
        if shape_env is not None:
            enable_symbolic_indexing()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True would wrap __torch_dispatch__ in a layer that costs more than the dispatch itself.
        return False

    @classmethod
    def is_infra_mode(cls) -> bool:
        # torch's compiler skips code under a mode that is not an infra mode.
        return False

    # torch asks `isinstance(mode, <its own class>)` when it loads checkpoints and looks for the active fake mode.
    def _claimed_class(self) -> Any:
        return _torch.torch_fake_mode_class()

    __class__ = property(_claimed_class)

    @property
    def device_facts(self) -> Hashable | None:
        """The facts of simulated devices. They are part of every key: a plan for one card is not replayed on another."""
        return self._device_facts

    @device_facts.setter
    def device_facts(self, facts: Hashable) -> None:
        self._device_facts = facts
        self._facts_number = DEVICE_FACTS_NUMBERS.setdefault(facts, len(DEVICE_FACTS_NUMBERS) + 1)

    def reset_nt_tensor_id_counter(self) -> None:
        """Called by torch's tools before they run a program again. Ragged sizes go with their offsets here: the same
        offsets have the same size in each run."""

    @property
    def allow_scalar_outputs(self) -> bool:
        """Whether data-dependent numbers become unbacked symbols: a setting of the shape environment."""
        return self.shape_env is not None and self.shape_env.settings.allow_scalar_outputs

    @allow_scalar_outputs.setter
    def allow_scalar_outputs(self, allow: bool) -> None:
        if self.shape_env is not None:
            self.shape_env.settings = replace(self.shape_env.settings, allow_scalar_outputs=allow)

    # --- entering and leaving ------------------------------------------------------------------------------

    def __enter__(self) -> FakeTensorMode:
        entry = _torch.FakeModeEntry(self)
        guard_exit(self, entry.leave)
        try:
            entry.enter(self.patch_scopes)
        except BaseException:  # an interrupt, where no `with` statement guards it
            entry.leave()
            raise
        return self

    @GuardedExit
    def __exit__(self, *exception: object) -> None:
        entry = _torch.latest_entry(_torch.ENTERED.fakes, self)
        is_innermost = entry is not None and entry.is_innermost()
        try:
            if entry is not None:
                entry.leave()
                autocast.clear_cast_cache()
        except BaseException:  # an interrupt
            entry.leave()
            raise
        if not is_innermost:
            refuse_order(entry, self, exception)

    # --- one operator call ---------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: object, types: object, args: Any = (), kwargs: Any = None) -> Any:
        """The hot path: key → plan → tensors, about 3 µs of Python. Misses and unusual calls go to other methods."""
        key: list[Any] = [id(func), default_dtype(), self._facts_number]
        add = key.append
        has_determined = False
        try:
            for value in args:
                kind = type(value)
                if kind is FakeTensor:
                    if value.fake_mode is not self:
                        return self._dispatch_unusual(func, types, args, kwargs)
                    add(value._spec)
                    if value._determined is not None:
                        has_determined = True
                elif kind in PLAIN_TYPES:
                    add(value)
                else:
                    has_determined = self._add_to_key(key, kind, value) or has_determined
            if kwargs:
                for name, value in kwargs.items():
                    add(name)
                    has_determined = self._add_to_key(key, type(value), value) or has_determined
            full = tuple(key)
            plan = self.last_plan = self._find_plan(full)
        except (UnusualArgument, TypeError):
            plan = UNUSUAL_ARGUMENT
        if plan is UNUSUAL_ARGUMENT:
            return self._dispatch_unusual(func, types, args, kwargs)
        if plan is None or not self._can_replay or (has_determined and plan.tracks_values(any(map(_is_undetermined, args)))):
            return self._infer_or_replay(func, args, kwargs or {}, full, plan, has_determined)
        cache.hits += 1
        if plan.effects:
            plan = run_effects(plan, flat_exact(FakeTensor, args, kwargs or {}))
        if (answer := plan.kind) == ONE_NEW:
            spec = plan.spec
            arguments = spec.prepared_no_grad
            if arguments is None or not self.can_skip_dispatch or is_grad_enabled() or in_inference_mode():
                arguments = spec.prepared or prepare(spec)
            fake = make_wrapper(FakeTensor, *arguments)
            fake._spec, fake.fake_mode = spec, self
            return fake
        if answer == FIRST_VIEWED:
            return make_view(self, args[0], plan.spec)
        if answer == FIRST_ITSELF:
            return args[0]
        if answer == ONE_NEW_SYMBOLIC:
            fake = make_symbolic(plan.spec)
            fake._spec, fake.fake_mode = plan.spec, self
            return fake
        return self._replay(func, plan, args, kwargs or {}, False)

    def _add_to_key(self, key: list[Any], kind: type, value: Any) -> bool:
        """Add an argument to a key. Returns whether it contains a tensor with determined values."""
        if kind is FakeTensor:
            if value.fake_mode is not self:
                raise UnusualArgument
            key.append(value._spec)
            return value._determined is not None
        if kind is list or kind is tuple:
            key.append(kind)
            key.append(len(value))
            has_determined = False
            for part in value:
                part_kind = type(part)
                if part_kind is int:
                    key.append(part)
                elif part_kind is SymInt and type(part.node) is SymNode:
                    key.append(SymInt)
                    key.append(part.node)
                else:
                    has_determined = self._add_to_key(key, part_kind, part) or has_determined
            return has_determined
        if kind is Device:
            key.append(canonical(value))
        else:
            add_value(key, kind, value)
        return False

    def _infer_or_replay(
        self, func: Any, args: Any, kwargs: Any, key: object, plan: Plan | None, has_determined: bool
    ) -> Any:
        """Answer a cache miss, a hit with determined values, or a hit that is cross-checked."""
        if plan is None:
            for source in TENSOR_SOURCES:
                answer = source(self, func, args, kwargs)
                if answer is not NotImplemented:
                    cache.bypass("answered from tensors, not from specs")
                    return answer
        question = None
        if plan is None and self._can_replay and key is not None:
            plan, question = self._find_shared(func, key)
        if plan is None or not self.cache_enabled:
            call = self._make_call(func, args, kwargs)
            try:
                plan = self._infer(call)
            except (DataDependentOutputException, DynamicOutputShapeException) as refusal:
                answer = data_dependent.answer(self, func, args, kwargs)
                if answer is NotImplemented:
                    raise
                refusal.__traceback__ = None  # its frames hold the error: tensors would live until garbage is collected
                cache.bypass("data-dependent output")
                return answer
            except UnderstudyError:
                if not is_cast_inside(call) or not self._casts_parts():
                    raise
                return self.decompose(func, args, kwargs)  # once they are cast, the operands may fit each other
            self._cache_plan(call, key, plan, question)
        else:
            cache.hits += 1
            if self.crosscheck:
                call = self._make_call(func, args, kwargs)
                tensor_calls.crosscheck(call, plan, self._infer(call))
        if plan.effects:
            plan = run_effects(plan, flat_exact(FakeTensor, args, kwargs))
        return self._replay(func, plan, args, kwargs, has_determined)

    def _replay(self, func: Any, plan: Plan, args: Any, kwargs: Any, has_determined: bool) -> Any:
        """Make the tensors of a plan, and track determined values and ranges."""
        if plan.kind == ONE_DETERMINED:
            made = make_new(self, plan.spec)
            made._determined = determined.start_contents(func, args, kwargs, plan.spec)
            return made
        if plan.kind == BOUNDED:
            made = make_new(self, plan.spec)
            made._determined = determined.start_extremes(func, args, plan.spec)
            return made
        if plan.kind == DECOMPOSED or (plan.kind == COMPOSITE and self._casts_parts()):
            return self.decompose(func, args, kwargs)
        inputs = flat_exact(FakeTensor, args, kwargs)
        if not has_determined and plan.kind < TRACKED:
            return realise(self, plan.outcomes, inputs)
        is_tracked = has_determined or plan.kind == TRACKED
        before = determined.freeze_arguments(plan, args, kwargs, inputs) if is_tracked else None
        is_ranged = plan.kind == RANGED and before is None
        bounds = ranges.infer_ranges_by_plan(func, plan, args, kwargs, inputs) if is_ranged else None
        result = realise(self, plan.outcomes, inputs)
        if is_tracked:
            determined.update_contents(func, plan, before, inputs, flat_exact(FakeTensor, (result,), {}))
        if bounds is not None:
            written = [inputs[position] for position in plan.written]
            ranges.store_ranges(bounds, written or flat_exact(FakeTensor, (result,), {}), bool(written))
        return result

    def _casts_parts(self) -> bool:
        """Whether autocast is enabled for what a composite operator consists of."""
        return bool(_torch.enabled_autocast_keys()) and not is_in_composite()

    def decompose(self, func: _torch.OpOverload, args: Any, kwargs: Any) -> Any:
        """Break up a composite operator that has come whole, as in inference mode: those inside it come to this mode."""
        with self, _torch.inside_composite(func):
            return decompose(func, args, kwargs)

    def _make_call(self, func: Any, args: Any, kwargs: Any) -> Call:
        inputs: list[TensorSpec] = []
        args = _as_spec(tuple(args), inputs)
        kwargs = {name: _as_spec(value, inputs) for name, value in kwargs.items()}
        if self.shape_env is not None:
            args, kwargs = map_structure(from_torch, SYMBOLIC, (args, kwargs))
        return Call(func, args, kwargs, tuple(inputs))

    def _infer(self, call: Call) -> Plan:
        try:
            return infer(call, self)
        except UnderstudyError as error:
            raise with_context(error, call) from error.__cause__
        except (RuntimeError, IndexError, ValueError, TypeError, AssertionError, AttributeError) as error:
            raise with_context(error, call) from error

    def _cache_plan(self, call: Call, key: Any, plan: Plan, question: SharedQuestion | None) -> None:
        reason = uncached.of(call.op) if self.cache_enabled else "cache disabled"
        if self.shape_env is not None and self.shape_env.suppresses_guards:
            reason = "guards are suppressed"  # a cache hit would not record the guards that this answer needs
        if reason is not None:
            cache.bypass(reason)
        elif key is not None:
            self._cache.add(key, plan)
            if question is not None:
                self._shared.share_plan(question, plan)
            elif self._cache is not cache and not any(map(_is_symbolic, key)):
                cache.share(key, plan)

    def _find_shared(self, func: object, key: Any) -> tuple[Plan | None, SharedQuestion | None]:
        """Look for a plan in the caches that the hot path skips: the other cache, and the plans shared between
        environments."""
        if self._cache is cache:
            return cache.find_for_any_floats(func, key), None
        if self._uses_process_cache:
            plan = self._cache.plans.get(key)
        else:
            plan = cache.plans.get(key)
            if plan is not None:
                self._cache.share(key, plan)
        if plan is not None or not any(map(_is_symbolic, key)):
            return plan, None
        question = self._shared.make_question(key)
        plan = None if question is None else self._shared.find_plan(question)
        if plan is not None:
            self._cache.share(key, plan)
        return plan, question

    def _dispatch_unusual(self, func: object, types: object, args: Any, kwargs: Any) -> Any:
        """Dispatch higher-order operators and calls with other subclasses, real tensors, fakes of other modes, or
        symbols."""
        kwargs = kwargs or {}
        if isinstance(func, _torch.HigherOrderOperator):
            return tensor_calls.by_higher_order(self, func, args, kwargs)
        accepted = accept_inputs(self, func, types, args, kwargs)
        if accepted is NotImplemented:
            return NotImplemented
        answer, args, kwargs = accepted
        if answer is not None:
            return answer[0]
        key: Any = None
        try:
            key, has_determined = self._make_key(func, args, kwargs)
            plan = self._find_plan(key)
        except (UnusualArgument, TypeError):
            plan, has_determined = None, any(fake._determined is not None for fake in flat_exact(FakeTensor, args, kwargs))
            cache.bypass("an argument that no key can hold")
        return self._infer_or_replay(func, args, kwargs, key, plan, has_determined)

    def _make_key(self, func: object, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], bool]:
        """The key of a call, and whether a tensor with determined values is among its arguments."""
        key: list[Any] = [id(func), default_dtype(), self._facts_number]
        has_determined = False
        for value in args:
            has_determined = self._add_to_key(key, type(value), value) or has_determined
        for name, value in kwargs.items():
            key.append(name)
            has_determined = self._add_to_key(key, type(value), value) or has_determined
        return tuple(key), has_determined

    # --- running registered fakes and decompositions ------------------------------------------------------------

    def run_on_fakes(self, function: Callable[..., object], call: Call) -> Any:
        """Run a function on stand-ins for the call's inputs inside this mode, and return its outcomes, or NotImplemented."""
        stand_ins: list[FakeTensor] = []

        def make_input(spec: TensorSpec) -> FakeTensor:
            stand_ins.append(make_new(self, spec))
            return stand_ins[-1]

        args, kwargs = map_structure(make_input, TensorSpec, (call.args, call.kwargs))
        args, kwargs = map_structure(to_torch, SymNode, (args, kwargs))
        refusing = refuse_in_composite() if _torch.has_composite_kernel(call.op) else nullcontext()
        with self, _torch.fake_context(call.op, self._dynamic_size, self.shape_env), refusing:
            result = function(*args, **kwargs)
        if result is NotImplemented:
            return NotImplemented
        return outcomes_of(result, stand_ins, call, functools.partial(tensor_calls.spec_of_function_result, call))

    def _dynamic_size(self, op: Any, least: int, most: int | None) -> Any:
        return tensor_calls.dynamic_size(self, op, least, most)

    # --- hooks for modes that observe storages --------------------------------------------------------------------

    def observe_new_storage(self, fake: FakeTensor) -> None:
        """Called when a stand-in with a new storage was made outside of the hot path."""

    def observe_resize(self, storage: torch.UntypedStorage) -> None:
        """Called when the size of a storage may have changed."""

    # --- determined values ------------------------------------------------------------------------------------

    def value_of(self, fake: FakeTensor) -> torch.Tensor | None:
        """The real value of a tensor whose value is determined, None otherwise."""
        record = fake._determined
        if record is None or record.content is None:
            return determined.empty_value(fake._spec)
        with _torch.PastDispatch():
            return StoragePart(record.content, fake._spec).real().clone()

    def value_without_guards(self, fake: FakeTensor) -> torch.Tensor | None:
        """As `value_of`, but None where computing the value would add guards on symbols."""
        record = fake._determined
        if self.shape_env is not None and record is not None and record.content is not None and record.content.has_symbols:
            return None
        return self.value_of(fake)

    @staticmethod
    def extremes_without_guards(fake: FakeTensor) -> tuple[Any, Any] | None:
        """The least and the greatest value of a tensor of symbolic size; None if they are not known."""
        return determined.extremes_of(fake._determined, fake._spec)

    def remember_literal(self, fake: FakeTensor, real: torch.Tensor) -> None:
        fake._determined = DeterminedContents(LiteralStorage(real), literal=True)

    def tolist(self, fake: FakeTensor) -> Any:
        return tensor_calls.tolist(self, fake)

    def values_for_numpy(self, fake: FakeTensor) -> torch.Tensor | None:
        return tensor_calls.numpy(self, fake)

    # --- conversion and copies ---------------------------------------------------------------------------------

    def from_tensor(
        self, tensor: torch.Tensor, *, static_shapes: bool | None = None, source: object = None,
        symbolic_context: object = None, trace: bool = True,
    ) -> FakeTensor:  # fmt: skip
        """The stand-in for a real tensor: the same one for as long as both live."""
        return self.fake_tensor_converter.from_real_tensor(
            self, tensor, static_shapes=static_shapes, source=source, symbolic_context=symbolic_context, trace=trace
        )

    def from_module(self, module: Module) -> Module:
        """A copy of a module with stand-ins for its parameters and buffers; the module itself stays as it is.

            fake = mode.from_module(model)
            with mode:
                fake(torch.empty(1, 3, 224, 224))
        """
        return copying.copy_module(self, module)

    def is_our_fake(self, t: object) -> bool:
        return type(t) is FakeTensor and t.fake_mode is self

    def adopt(self, fake: FakeTensor, other: FakeTensor) -> None:
        adopt(fake, other)

    def deep_copy(self, fake: FakeTensor, memo: dict[int, Any]) -> FakeTensor:
        return copying.deep_copy(self, fake, memo)

    def shallow_copy(self, fake: FakeTensor) -> FakeTensor:
        return copying.shallow_copy(self, fake)

    def reduce(self, fake: FakeTensor) -> Any:
        return copying.reduce(fake)

    def __deepcopy__(self, memo: dict[int, Any]) -> FakeTensorMode:
        return self

    def __reduce__(self) -> Any:
        options = (self.allow_fallback_kernels, self.allow_non_fake_inputs, self.export, self.crosscheck)
        return copying.mode_for_unpickling, options

    # --- the cache -----------------------------------------------------------------------------------------------

    @property
    def cache_enabled(self) -> bool:
        return self._cache_enabled

    @cache_enabled.setter
    def cache_enabled(self, enabled: bool) -> None:
        self._cache_enabled = enabled
        self._can_replay = enabled and not self.crosscheck
        self.can_skip_dispatch = self._can_replay and type(self).__torch_dispatch__ is FakeTensorMode.__torch_dispatch__

    @classmethod
    def cache_info(cls) -> DispatchCacheInfo:
        return cache.info()

    @classmethod
    def cache_clear(cls) -> None:
        cache.clear()


def _is_undetermined(value: object) -> bool:
    return type(value) is FakeTensor and value._determined is None


def _is_symbolic(part: object) -> bool:
    return type(part) is SymNode or (type(part) is TensorSpec and part.is_symbolic)


def _as_spec(value: Any, inputs: list[TensorSpec]) -> Any:
    """An argument as rules see it: specs for tensors, which are added to the inputs, devices with their index."""
    kind = type(value)
    if kind is FakeTensor:
        inputs.append(value._spec)
        return value._spec
    if kind in PLAIN_TYPES:
        return value
    if kind is not list and kind is not tuple:
        return canonical(value) if kind is Device else value
    parts: list[Any] = []
    for part in value:
        part_kind = type(part)
        if part_kind is FakeTensor:
            inputs.append(part._spec)
            parts.append(part._spec)
        else:
            parts.append(part if part_kind in PLAIN_TYPES else _as_spec(part, inputs))
    return parts if kind is list else tuple(parts)


_torch.hide_from_compiler(FakeTensorMode.__torch_dispatch__)
