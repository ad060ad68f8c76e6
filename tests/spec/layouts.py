"""Real tensors in many layouts, for tests that compare with reality."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

SIZES = st.sampled_from([0, 1, 1, 2, 3, 4])


@st.composite
def tensor_of_shape(draw: st.DrawFn, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of this shape: permuted, sliced, or both, or with odd strides in dimensions of size 1."""
    order = draw(st.permutations(range(len(shape))))
    steps = [draw(st.sampled_from([1, 1, 1, 2])) for _ in shape]
    big = torch.zeros([shape[dim] * steps[dim] for dim in order])
    tensor = big.permute([order.index(dim) for dim in range(len(shape))])
    for dim, step in enumerate(steps):
        if step > 1:
            tensor = tensor[(slice(None),) * dim + (slice(None, None, step),)]
    if draw(st.booleans()):
        strides = [
            draw(st.sampled_from([0, 1, 2, 7])) if size == 1 and draw(st.booleans()) else stride
            for size, stride in zip(shape, tensor.stride(), strict=True)
        ]
        tensor = tensor.as_strided(shape, strides)
    return tensor


@st.composite
def broadcastable(draw: st.DrawFn, count: int, max_ndim: int = 5) -> list[torch.Tensor]:
    """Tensors that broadcast together: missing dimensions, sizes of 1, and expanded ones."""
    shape = tuple(draw(st.lists(SIZES, min_size=0, max_size=max_ndim)))
    tensors = []
    for _ in range(count):
        kind = draw(st.sampled_from(["same", "same", "same", "ones", "expanded"]))
        own = list(shape)
        if kind != "same":
            own = [1 if draw(st.booleans()) else size for size in own]
        if kind == "ones":
            own = own[draw(st.integers(0, len(own))) :]
        tensor = draw(tensor_of_shape(tuple(own)))
        tensors.append(tensor.expand(shape) if kind == "expanded" else tensor)
    return tensors
