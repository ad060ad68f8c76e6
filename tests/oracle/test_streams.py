"""The operators of a fake run are those of the real run, one by one, with the same metadata."""

from __future__ import annotations

import pytest

from tests.oracle.engines import UNDER_TEST
from tests.oracle.models import PROGRAMS, Program
from tests.oracle.streams import divergence, streams_of

pytestmark = pytest.mark.filterwarnings("ignore")

# Programs that ask whether their tensors are fake, and then do something else.
OTHER_PATHS = {
    "llama, padded": "transformers reads the mask's values for a short cut, and not when it sees fakes",
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=list(PROGRAMS))
def test_the_operator_stream_is_that_of_the_real_run(program: Program) -> None:
    real, fake = streams_of(program), streams_of(program, UNDER_TEST)
    parted = divergence(real.preparation, fake.preparation)
    assert parted is None, f"while the model is built, at {parted}"
    if program.name in OTHER_PATHS:
        assert divergence(real.step, fake.step) is not None, (
            "it takes the same path now: remove it from OTHER_PATHS"
        )
        return
    parted = divergence(real.step, fake.step)
    assert parted is None, f"in the training step, at {parted}"
