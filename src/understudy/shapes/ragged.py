"""The size of a jagged dimension: a number of its own kind, of which torch knows multiples by plain numbers only."""

from __future__ import annotations

from typing import Any

from understudy._torch import NestedIntNode


class RaggedNode(NestedIntNode):
    """As torch's, and may meet symbols: what is multiplied with it, the size of a row, is the one at hand from then on."""

    def mul(self, other: Any) -> RaggedNode:
        times = other.constant_int() if other.is_constant() else other.guard_int("", 0)
        return RaggedNode(self.t_id, self.coeff * times)
