"""What a mode does beside dispatch: values, copies and conversion of stand-ins, functions run on stand-ins."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from understudy import _torch
from understudy.errors import ContradictoryOptions, UnderstudyError
from understudy.fake import copying, tensor_calls
from understudy.fake.realise import adopt, make_new
from understudy.fake.tensor import FakeTensor
from understudy.fake.values import determined
from understudy.fake.values.answers import is_in_composite, refuse_in_composite
from understudy.fake.values.determined import DeterminedContents, LiteralStorage, StoragePart
from understudy.infer.crosscheck import compare_with_eager
from understudy.infer.engine import infer
from understudy.infer.kernels import outcomes_of
from understudy.infer.plan import Plan
from understudy.ops.shared.decompositions import decompose
from understudy.shapes.node import SymNode
from understudy.shapes.sizes import to_torch
from understudy.spec import TensorSpec
from understudy.spec.call import Call, map_structure
from understudy.spec.error_context import with_context

Module = TypeVar("Module", bound=torch.nn.Module)


DEVICE_FACTS_NUMBERS: dict[Hashable, int] = {}
"""A number for each set of device facts: keys hold the number, because hashing the facts is slow."""


class ModeServices(_torch.TorchDispatchMode):
    """The base of `FakeTensorMode`, whose attributes it reads."""

    if TYPE_CHECKING:
        shape_env: Any
        answers: Any
        static_shapes: bool
        allow_fallback_kernels: bool
        allow_non_fake_inputs: bool
        export: bool
        crosscheck: bool | str
        propagate_real_tensors: bool
        allow_meta: bool
        preferred_device_type: str | None
        is_hooked: bool
        fake_tensor_converter: Any
        _device_facts: Hashable | None
        _facts_number: int

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

    def casts_parts(self) -> bool:
        """Whether autocast is enabled for the parts of a composite operator."""
        return bool(_torch.enabled_autocast_keys()) and not is_in_composite()

    def decompose(self, func: _torch.OpOverload, args: Any, kwargs: Any) -> Any:
        """Break up a composite operator that has come whole, as in inference mode: those inside it come to this mode."""
        with self, _torch.inside_composite(func):
            return decompose(func, args, kwargs)

    # --- inference

    def _infer(self, call: Call) -> Plan:
        try:
            plan = infer(call, self)
            if self.crosscheck == "eager":
                compare_with_eager(call, plan.outcomes)
            return plan
        except UnderstudyError as error:
            if self.crosscheck == "eager":
                compare_with_eager(call, error)
            raise with_context(error, call, self._list_assumed_integers()) from error.__cause__
        except (RuntimeError, IndexError, ValueError, TypeError, AssertionError, AttributeError) as error:
            raise with_context(error, call, self._list_assumed_integers()) from error

    def _list_assumed_integers(self) -> list[str]:
        """The last integers that the policy for missing data has answered."""
        given = self.answers.given if self.answers is not None else ()
        return [str(answer) for answer in given if type(answer.answer) is int][-2:]

    # --- running registered fakes and decompositions ------------------------------------------------------------

    def run_on_fakes(self: Any, function: Callable[..., object], call: Call) -> Any:
        """Run a function on stand-ins for the call's inputs inside this mode, and return its outcomes, or NotImplemented."""
        stand_ins: list[FakeTensor] = []

        def make_input(spec: TensorSpec) -> FakeTensor:
            made = make_new(self, spec)
            if call.leaves:
                requires_grad, is_parameter = call.leaves[len(stand_ins)]
                if requires_grad:
                    made.requires_grad_()
                if is_parameter:
                    vars(made)["_is_param"] = True
            stand_ins.append(made)
            return made

        args, kwargs = map_structure(make_input, TensorSpec, (call.args, call.kwargs))
        args, kwargs = map_structure(to_torch, SymNode, (args, kwargs))
        refusing = refuse_in_composite() if _torch.has_composite_kernel(call.op) else nullcontext()
        make_size = functools.partial(tensor_calls.dynamic_size, self, call)
        with self, _torch.fake_context(call.op, make_size, self.shape_env), refusing:
            result = function(*args, **kwargs)
        if result is NotImplemented:
            return NotImplemented
        return outcomes_of(
            result, stand_ins, call, functools.partial(tensor_calls.spec_of_function_result, call)
        )

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
        if (
            self.shape_env is not None
            and record is not None
            and record.content is not None
            and record.content.has_symbols
        ):
            return None
        return self.value_of(fake)

    @staticmethod
    def extremes_without_guards(fake: FakeTensor) -> tuple[Any, Any] | None:
        """The least and the greatest value of a tensor of symbolic size; None if they are not known."""
        return determined.extremes_of(fake._determined, fake._spec)

    def remember_literal(self, fake: FakeTensor, real: torch.Tensor) -> None:
        fake._determined = DeterminedContents(LiteralStorage(real), literal=True)

    def tolist(self: Any, fake: FakeTensor) -> Any:
        return tensor_calls.tolist(self, fake)

    def values_for_numpy(self: Any, fake: FakeTensor) -> torch.Tensor | None:
        return tensor_calls.numpy(self, fake)

    # --- conversion and copies ---------------------------------------------------------------------------------

    def from_tensor(
        self, tensor: torch.Tensor, *, static_shapes: bool | None = None, source: object = None,
        symbolic_context: object = None, trace: bool = True,
    ) -> FakeTensor:  # fmt: skip
        """The stand-in for a real tensor: the same one for as long as both live."""
        if static_shapes is None:
            static_shapes = self.static_shapes
        if static_shapes and symbolic_context is not None:
            raise ContradictoryOptions(
                f"from_tensor: symbolic_context={symbolic_context!r:.80} makes symbols of sizes, and this mode has no "
                "ShapeEnv to own them: FakeTensorMode(shape_env=ShapeEnv())"
                if self.shape_env is None
                else "from_tensor: expected static_shapes=False with a symbolic_context, got True (call or mode); "
                "leave out one of the two"
            )
        return self.fake_tensor_converter.from_real_tensor(
            self,
            tensor,
            static_shapes=static_shapes,
            source=source,
            symbolic_context=symbolic_context,
            trace=trace,
        )

    def from_module(self: Any, module: Module) -> Module:
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

    def deep_copy(self: Any, fake: FakeTensor, memo: dict[int, Any]) -> FakeTensor:
        return copying.deep_copy(self, fake, memo)

    def shallow_copy(self: Any, fake: FakeTensor) -> FakeTensor:
        return copying.shallow_copy(self, fake)

    def reduce(self, fake: FakeTensor) -> Any:
        return copying.reduce(fake)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self

    def __reduce__(self) -> Any:
        options = (self.allow_fallback_kernels, self.allow_non_fake_inputs, self.export, self.crosscheck)
        return copying.mode_for_unpickling, options
