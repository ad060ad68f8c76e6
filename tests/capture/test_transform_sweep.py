"""A sample of the operators below transforms of torch.func; `python -m tests.oracle.transform_sweep` takes all."""

from __future__ import annotations

import pytest

from tests.oracle.transform_sweep import TRANSFORMS, examine, samples_of

OPERATORS = (
    "nn.functional.layer_norm",
    "nn.functional.group_norm",
    "softmax",
    "matmul",
    "nn.functional.linear",
    "gather",
    "cumsum",
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("op", OPERATORS)
def test_sample(op: str, mode: str) -> None:
    samples = samples_of(op, 2)
    assert samples
    for sample in samples:
        found = {transform: examine(op, sample, transform, mode) for transform in TRANSFORMS}
        assert {name: each for name, each in found.items() if each[0] not in ("ok", "refused")} == {}


def test_a_difference_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.oracle import transform_sweep

    (sample,) = samples_of("softmax", 1)
    monkeypatch.setattr(
        transform_sweep,
        "make_fx",
        lambda program, tracing_mode: lambda *given: lambda *given: program(*given)[:1],
    )
    assert examine("softmax", sample, "vmap", "fake")[0] == "wrong"
