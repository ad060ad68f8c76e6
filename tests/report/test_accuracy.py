"""The peak on the CPU is that of the real run, to the byte."""

from __future__ import annotations

import pytest

from tests.report.programs import PROGRAMS
from tests.report.true_peak import true_peak
from understudy.report.runs import rehearse


@pytest.mark.parametrize("name", PROGRAMS)
def test_peak_is_that_of_the_real_run(name: str) -> None:
    assert rehearse(PROGRAMS[name]).peak.allocated_bytes == true_peak(PROGRAMS[name])
