"""to_torch: hand a captured graph over to torch's own tools."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule


def to_torch(graph_module: GraphModule, mode: Any = None) -> GraphModule:
    """The same graph, with torch's own fake tensors and symbols in `meta["val"]`, for `torch._inductor` and its like.

    `mode`: the `torch._subclasses.FakeTensorMode` that they shall belong to. Parameters and constants are shared with
    the given graph module, which stays as it is.
    """
    from understudy.trace.interop import handed_over  # why: loads torch's own symbolic shapes

    return handed_over(graph_module, mode)
