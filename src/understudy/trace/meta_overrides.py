"""Metadata that the user knows better: a function or a type of module, and the function that says what it gives.

    @manual_meta_overrides.register(my_kernel)      # or: manual_meta_overrides[my_kernel] = …
    def _(x, weight):
        return x.new_empty(x.shape[0], weight.shape[1])

The function gets stand-ins in the place of tensors (and the module first, for a type of module) and gives stand-ins.
The table is empty at first: everything that torch has is derived by running it on stand-ins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Override = Callable[..., Any]


class Overrides(dict[Any, Override]):
    """function or type of module → what it gives, in stand-ins. A plain dict, with a decorator."""

    def register(self, target: Any) -> Callable[[Override], Override]:
        def remember(override: Override) -> Override:
            self[target] = override
            return override

        return remember

    def for_module(self, module: Any) -> Override | None:
        """The override of the most special class of this module."""
        return next((self[kind] for kind in type(module).__mro__ if kind in self), None)


manual_meta_overrides = Overrides()
