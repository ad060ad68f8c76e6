"""A transformer in jax of the same size as the benchmark's own, for `benchmarks.make_fx`. Needs jax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from examples.llama import LlamaSize


def transformer(size: LlamaSize, batch: int, length: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function and arguments of the right shapes."""
    width, hidden, heads = size.width, size.hidden, size.heads

    def weight(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    layer = {
        "norm": weight(width), "query": weight(width, width), "key": weight(width, width), "value": weight(width, width),
        "out": weight(width, width), "norm2": weight(width), "gate": weight(width, hidden), "up": weight(width, hidden),
        "down": weight(hidden, width),
    }  # fmt: skip
    weights = {
        "embedding": weight(size.vocabulary, width), "layers": [layer] * size.layers, "norm": weight(width),
        "head": weight(width, size.vocabulary),
    }  # fmt: skip

    def norm(x: Any, scale: Any) -> Any:
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5) * scale

    def rotated(x: Any, cos: Any, sin: Any) -> Any:
        first, second = jnp.split(x, 2, axis=-1)
        return x * cos + jnp.concatenate([-second, first], axis=-1) * sin

    def attention(x: Any, w: Any, cos: Any, sin: Any) -> Any:
        def split(y: Any) -> Any:
            return y.reshape(batch, length, heads, width // heads).transpose(0, 2, 1, 3)

        query, key = (rotated(split(x @ w[name]), cos, sin) for name in ("query", "key"))
        scores = query @ key.swapaxes(-1, -2) / (width // heads) ** 0.5
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
        mixed = jax.nn.softmax(scores) @ split(x @ w["value"])
        return mixed.transpose(0, 2, 1, 3).reshape(batch, length, width) @ w["out"]

    def forward(weights: Any, tokens: Any) -> Any:
        x = weights["embedding"][tokens]
        angles = jnp.outer(
            jnp.arange(length), 1.0 / 10_000 ** (jnp.arange(0, width // heads, 2) / (width // heads))
        )
        angles = jnp.concatenate([angles, angles], axis=-1)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        for w in weights["layers"]:
            x = x + attention(norm(x, w["norm"]), w, cos, sin)
            y = norm(x, w["norm2"])
            x = x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"]
        return norm(x, weights["norm"]) @ weights["head"]

    return forward, (weights, jax.ShapeDtypeStruct((batch, length), jnp.int32))


def equations(closed: Any) -> int:
    """The equations of a jaxpr and of those inside it."""
    jaxpr = getattr(closed, "jaxpr", closed)
    values = [value for equation in jaxpr.eqns for value in equation.params.values()]
    inner = [value for value in values if hasattr(value, "eqns") or hasattr(value, "jaxpr")]
    return len(jaxpr.eqns) + sum(map(equations, inner))
