"""FakeTensorMode: while it is active, every factory and operator gives stand-ins."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any, Protocol, TypeVar

import torch

from understudy import _torch
from understudy._torch import Device
from understudy.errors import NotProvidedError
from understudy.fake import collectives as _collectives  # noqa: F401  (registers them)
from understudy.fake import kernels as _kernels  # noqa: F401  (registers them)
from understudy.fake import patches as _patches  # noqa: F401  (registers them)
from understudy.fake import real_tensors, tensor_calls
from understudy.fake.convert import FakeTensorConverter
from understudy.fake.hooks import dispatch_hooked, refuse_key
from understudy.fake.inputs import accept_inputs
from understudy.fake.kernels import autocast
from understudy.fake.misses import answer_miss
from understudy.fake.native import canonical, in_inference_mode, is_grad_enabled, prepare
from understudy.fake.realise import make_new, make_view, realise
from understudy.fake.services import ModeServices
from understudy.fake.templates import make_symbolic
from understudy.fake.tensor import FakeTensor
from understudy.fake.values import determined, ranges
from understudy.fake.values.answers import (
    AnswerPolicy,
    Answers,
    make_policy,
)
from understudy.fake.values.sizes_in_tensors import enable_symbolic_indexing
from understudy.infer.cache import NAN, PLAIN_TYPES, Cache, DispatchCacheInfo, UnusualArgument, add_value
from understudy.infer.crosscheck import check_option
from understudy.infer.engine import cache
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
    run_effects,
)
from understudy.infer.shared import SharedPlans
from understudy.lines import format_frames, keep_frames
from understudy.patching import ANY_MODE, SYMBOLS, combine
from understudy.shapes.env import ShapeEnv
from understudy.shapes.node import SymNode
from understudy.spec.call import flat_exact
from understudy.spec.error_context import refuse_order

READ_SWITCHES = (
    "fake_tensor_propagate_real_tensors", "fake_tensor_allow_meta", "fake_tensor_cache_crosscheck_enabled",
    "fake_tensor_cache_enabled", "fake_tensor_prefer_device_type",
)  # fmt: skip
"""Torch's switches that are read when a mode is made."""
PLAIN_SCOPES, SYMBOLIC_SCOPES = combine(ANY_MODE), combine(ANY_MODE, SYMBOLS)
"""Which patches of torch a mode needs."""
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
SymInt = torch.SymInt
INTEGERS = frozenset({int})
default_dtype = torch.get_default_dtype
make_wrapper = _torch.make_wrapper
Module = TypeVar("Module", bound=torch.nn.Module)


UNUSUAL_ARGUMENT = Plan(())
"""Marks a call with an argument that can't be part of a key."""


class CacheCounter:
    """A field of `FakeTensorMode.cache_info()`, as an attribute of the class and of modes."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, mode: object, kind: type) -> Any:
        return getattr(cache.info(), self._name)


class ConstantListener(Protocol):
    """An active trace, which knows the values of real constants of its program. The last one of a mode is asked."""

    def register_converted(self, fake: FakeTensor, real: torch.Tensor, values: torch.Tensor) -> None:
        """The mode has converted a real constant."""

    def read_value(self, fake: FakeTensor) -> torch.Tensor | None:
        """A real tensor with the values of this stand-in, if they are constant."""


class FakeTensorMode(ModeServices):
    """Operators on tensors without data.

        with FakeTensorMode():
            y = torch.nn.Linear(10_000, 10_000)(torch.empty(64, 10_000))   # no memory, no time

    `allow_fallback_kernels`: operators without any shape rule may run for real on small zeros.
    `allow_non_fake_inputs`: real tensors beside fakes are converted instead of refused.
    `crosscheck`: True infers every cache hit again and compares; "eager" also compares each small CPU call with the real
    operator, run on zeros in this process.
    `answers`: the result of data-dependent reads: "error", "symbol", "plausible", "worst", or a policy
    of one's own (`fake/values/answers.py`).
    `propagate_real_tensors`: each operator also runs on the real tensors that the stand-ins were made from
    (`fake/real_tensors.py`).

    torch's switches for its own mode (`torch._functorch.config.fake_tensor_*`, `torch._dynamo.config.fake_tensor_cache_*`)
    are read when a mode is made. A subclass may override `dispatch` or `_dispatch_impl`, which then see every call.
    """

    _mode_key = _torch.FAKE
    supports_higher_order_operators = True
    in_kernel_invocation = False
    """Whether this mode's stand-ins pose as meta tensors: see `in_kernel_invocation_manager`."""
    propagate_real_tensors = False
    allow_meta = True
    preferred_device_type: str | None = None
    """The type of the device on which calls with inputs on several devices run, where torch's switch names one."""
    is_hooked = False
    """Whether all calls take the slow path, where something looks at them: see `fake/hooks.py`."""
    network: Any = None
    """What exchanges the values of collectives with other processes."""
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
        crosscheck: bool | str = False,
        answers: str | AnswerPolicy = "error",
        propagate_real_tensors: bool | None = None,
    ) -> None:
        if shape_env is not None and not isinstance(shape_env, ShapeEnv):
            kind = f"{type(shape_env).__module__}.{type(shape_env).__name__}"
            raise TypeError(
                f"shape_env: expected an understudy.ShapeEnv, got a {kind}; import ShapeEnv from understudy"
            )
        if answers == "symbol" and shape_env is None:
            shape_env, static_shapes = ShapeEnv(), static_shapes is None or static_shapes
        if crosscheck:
            check_option(crosscheck)
        self._follow_switches(crosscheck, propagate_real_tensors)
        policy = None if answers == "error" else make_policy(answers)
        self.answers = None if policy is None else Answers(policy)
        self.allow_fallback_kernels = allow_fallback_kernels
        self.allow_non_fake_inputs = allow_non_fake_inputs
        self.shape_env: Any = shape_env
        self.static_shapes = shape_env is None if static_shapes is None else static_shapes
        self.export = export
        self.epoch = 0
        self.uncounted_writes = 0
        self.constant_listeners: list[ConstantListener] = []
        self._device_facts: Hashable | None = None
        self._facts_number = 0
        # The plan of the latest call, None after a cache miss. Read by modes that observe storages.
        self.last_plan: Plan | None = None
        # Plans with symbols in their keys must not outlive their environment.
        self._cache = cache if shape_env is None else Cache(counters=cache)
        # With plain sizes, almost all plans are in the cache of the process.
        self._uses_process_cache = shape_env is None or self.static_shapes
        self._recall_plan = cache.plans.get if self._uses_process_cache else self._cache.plans.get
        # A hooked mode finds no plan on the hot path: each call goes to `_dispatch_unusual`.
        self._find_plan: Any = refuse_key if self.is_hooked else self._recall_plan
        self.fake_tensor_converter = FakeTensorConverter(copy_data=self.propagate_real_tensors, export=export)
        self._made_at = keep_frames(1)
        self.patch_scopes = PLAIN_SCOPES if shape_env is None else SYMBOLIC_SCOPES
        if shape_env is not None and not FakeTensor._has_symbolic_indexing:
            enable_symbolic_indexing()

    def _follow_switches(self, crosscheck: bool | str, propagate_real_tensors: bool | None) -> None:
        """Set what torch's switches decide where the caller does not."""
        propagates, allows_meta, crosschecks, caches, preferred = _torch.switches(*READ_SWITCHES)
        if propagate_real_tensors is None:
            propagate_real_tensors = propagates
        # Only what differs from the default: with more than 30 attributes in its dict, reading them is slow.
        if propagate_real_tensors:
            self.propagate_real_tensors = True
        if not allows_meta:
            self.allow_meta = False
        if preferred is not None:
            self.preferred_device_type = preferred
        self._crosscheck = crosscheck or crosschecks
        self.cache_enabled = caches and not propagate_real_tensors
        own_class: Any = type(self)
        self.is_hooked = bool(
            propagate_real_tensors
            or _torch.FakeTensorConfig.debug
            or not allows_meta
            or preferred is not None
            or has_hooks(own_class)
        )

    stands_for_compiled = False
    """Whether the program, which runs uncompiled here, would be compiled: some kernels exist only then."""

    @functools.cached_property
    def _shared_plans(self) -> SharedPlans:
        """The plans that environments share."""
        return SharedPlans(self.shape_env, cache)

    avoid_device_init = True
    """Named by torch's mode: no device is initialised for a stand-in, whatever is there."""

    @property
    def _allow_unsafe_data_ptr_access(self) -> bool:
        return False

    @_allow_unsafe_data_ptr_access.setter
    def _allow_unsafe_data_ptr_access(self, allow: bool) -> None:
        if allow:
            raise NotProvidedError(
                "stand-ins have no data to point to. Call the code that needs pointers in a custom operator with a fake "
                "implementation: torch.library.register_fake"
            )

    @property
    def stack(self) -> str:
        """Where this mode was made."""
        return format_frames(self._made_at)

    # --- entering and leaving ------------------------------------------------------------------------------

    def __enter__(self) -> FakeTensorMode:
        entry = _torch.FakeModeEntry(self)
        entry.enter(self.patch_scopes)
        return self

    def __exit__(self, *exception: object) -> None:
        entry = _torch.latest_entry(_torch.ENTERED.fakes, self)
        is_innermost = entry is not None and entry.leave(*exception[1:2])
        autocast.clear_cast_cache()
        if not is_innermost:
            refuse_order(entry, self, exception)

    # --- one operator call ---------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: object, types: object, args: Any = (), kwargs: Any = None) -> Any:
        """The hot path: key → plan → tensors, about 3 µs of Python. Misses and unusual calls go to other methods."""
        key: list[Any] = [id(func), default_dtype(), self._facts_number]
        add = key.append
        has_determined = has_undetermined = False
        try:
            for value in args:
                kind = type(value)
                if kind is FakeTensor:
                    if value.fake_mode is not self:
                        return self._dispatch_unusual(func, types, args, kwargs)
                    add(value._spec)
                    if value._determined is None:
                        has_undetermined = True
                    else:
                        has_determined = True
                elif kind in PLAIN_TYPES:
                    add(value)
                elif kind is float or kind is bool:
                    key += (kind, value if value == value else NAN)
                elif (kind is list or kind is tuple) and INTEGERS.issuperset(map(type, value)):
                    key += (kind, len(value), *value)
                else:
                    has_determined = self._add_to_key(key, kind, value) or has_determined
            if kwargs:
                for name, value in kwargs.items():
                    add(name)
                    kind = type(value)
                    if kind in PLAIN_TYPES:
                        add(value)
                    elif kind is float or kind is bool:
                        key += (kind, value if value == value else NAN)
                    else:
                        has_determined = self._add_to_key(key, kind, value) or has_determined
            full = tuple(key)
            plan = self.last_plan = self._find_plan(full)
        except (UnusualArgument, TypeError):
            plan = UNUSUAL_ARGUMENT
        if plan is UNUSUAL_ARGUMENT:
            return self._dispatch_unusual(func, types, args, kwargs)
        if (
            plan is None
            or not self._can_replay
            or (
                has_determined
                and plan.kind != FIRST_VIEWED
                and (plan.written or not has_undetermined)  # it changes known values
            )
        ):
            return answer_miss(self, func, args, kwargs or {}, full, plan, has_determined)
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
        return self.replay(func, plan, args, kwargs or {}, False)

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

    def replay(self, func: Any, plan: Plan, args: Any, kwargs: Any, has_determined: bool) -> Any:
        """Make the tensors of a plan, and track determined values and ranges."""
        if plan.kind == ONE_NEW and not has_determined:
            return make_new(self, plan.spec)
        if plan.kind == ONE_DETERMINED:
            made = make_new(self, plan.spec)
            made._determined = determined.start_contents(func, args, kwargs, plan.spec)
            return made
        if plan.kind == BOUNDED:
            made = make_new(self, plan.spec)
            made._determined = determined.start_extremes(func, args, plan.spec)
            return made
        if plan.kind == DECOMPOSED or (plan.kind == COMPOSITE and self.casts_parts()):
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

    def _dispatch_unusual(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Dispatch higher-order operators and calls with other subclasses, real tensors, fakes of other modes, or
        symbols; all calls of a hooked mode."""
        if self.is_hooked:
            return dispatch_hooked(self, func, types, args, kwargs or {})
        return self._dispatch_any(func, types, args, kwargs or {})

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One operator call. A subclass that overrides this is given every call; it may call this one to answer it."""
        return self._dispatch_impl(func, types, args, kwargs or {})

    def _dispatch_impl(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """As `dispatch`, which calls it: a hook under the name that torch's own mode has for it."""
        if self.propagate_real_tensors:
            return real_tensors.dispatch(self, func, types, args, kwargs)
        return self._dispatch_any(func, types, args, kwargs)

    def _dispatch_any(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Answer any call."""
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
            plan = self._recall_plan(key)
        except (UnusualArgument, TypeError):
            plan, has_determined = (
                None,
                any(fake._determined is not None for fake in flat_exact(FakeTensor, args, kwargs)),
            )
            cache.bypass("an argument that no key can hold")
        return answer_miss(self, func, args, kwargs, key, plan, has_determined)

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

    # --- the cache -----------------------------------------------------------------------------------------------

    @property
    def cache_enabled(self) -> bool:
        return self._cache_enabled

    @cache_enabled.setter
    def cache_enabled(self, enabled: bool) -> None:
        self._cache_enabled = enabled
        self._can_replay = enabled and not self._crosscheck
        self.can_skip_dispatch = (
            self._can_replay
            and not self.is_hooked
            and type(self).__torch_dispatch__ is FakeTensorMode.__torch_dispatch__
        )

    @property
    def crosscheck(self) -> bool | str:
        return self._crosscheck

    @crosscheck.setter
    def crosscheck(self, wanted: bool | str) -> None:
        if wanted:
            check_option(wanted)
        self._crosscheck = wanted
        self.cache_enabled = self._cache_enabled

    cache_crosscheck_enabled = crosscheck
    """The name of torch's mode for `crosscheck`."""

    @classmethod
    def cache_info(cls) -> DispatchCacheInfo:
        return cache.info()

    @classmethod
    def cache_clear(cls) -> None:
        cache.clear()

    cache_hits, cache_misses, cache_bypasses = map(CacheCounter, ("hits", "misses", "bypasses"))


HOOKS = ("dispatch", "_dispatch_impl")
"""Methods that a subclass may override to see every call."""


@functools.cache
def has_hooks(kind: Any) -> bool:
    """Whether a class of modes overrides one of these."""
    return any(getattr(kind, name) is not getattr(FakeTensorMode, name) for name in HOOKS)


_torch.hide_from_compiler(FakeTensorMode.__torch_dispatch__)
