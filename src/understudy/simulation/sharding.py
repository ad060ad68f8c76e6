"""DTensor in an observed mode. Loaded when the first DTensor is seen, since patching that package imports it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from understudy import _torch
from understudy.patching import OBSERVATION, patch
from understudy.simulation.storages import ObservedMode


@patch(
    "torch.distributed.tensor._sharding_prop.ShardingPropagator._propagate_tensor_meta_non_cached", during=OBSERVATION
)
def compute_sharding_unheard(original: Callable[..., Any]) -> Callable[..., Any]:
    """DTensor runs each new operator once more, on tensors of the global sizes, to know the metadata of its result."""

    def propagate(*args: Any, **kwargs: Any) -> Any:
        mode = _torch.active_fake_mode()
        if not isinstance(mode, ObservedMode):
            return original(*args, **kwargs)
        with mode.pause():
            return original(*args, **kwargs)

    return propagate
