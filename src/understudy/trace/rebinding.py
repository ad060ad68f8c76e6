"""A graph run again on stand-ins, whose data-dependent sizes are those of the first run."""

from __future__ import annotations

from typing import Any

import torch

from understudy import _torch
from understudy.shapes.bindings import rebind_unbacked


class PropagateUnbackedSymInts(torch.fx.Interpreter):
    """Runs a graph inside a fake mode; what its nodes have in `meta["unbacked_bindings"]` tells new symbols from old."""

    def run_node(self, n: torch.fx.Node) -> Any:
        result = super().run_node(n)
        mode = _torch.active_fake_mode()
        if mode is None:
            raise AssertionError("there is no fake mode: run the graph inside one, with mode: …")
        rebind_unbacked(mode.shape_env, n, result)
        return result
