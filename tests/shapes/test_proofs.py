"""A million random proofs against brute force: none may be wrong. A sample runs in `test_facts.py`."""

from __future__ import annotations

import pytest

from .proofs import run


@pytest.mark.conformance
@pytest.mark.parametrize("seed", range(100, 110))
def test_no_proof_is_wrong(seed: int) -> None:
    tally = run(100_000, seed)
    assert tally.count >= 100_000
    assert not tally.unsound, "\n\n".join(tally.unsound[:5])
