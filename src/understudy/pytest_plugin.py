"""The pytest plugin: tests that fail where a training step would not fit on a card.

    @pytest.mark.rehearse(device="l40s", budget="40GiB")
    def test_step_fits():
        model = Model().cuda()
        ...                                 # runs on stand-ins: no card, no memory, no data

    def test_by_hand(rehearse):
        result = rehearse(train_step, batch, device="h100", budget="60GiB")
        assert result.peak.phase == "backward"

It is loaded with every pytest run of an environment that has understudy: it imports torch only when a test asks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from understudy.report.rehearsal import Rehearsal

MARKER = (
    "rehearse(device, budget=None, strict=False, options=None): run the test on stand-ins on this card; it fails if it does "
    "not fit, or needs more than the budget"
)
TOP = 5
"""Lines of the program in the message of a failure."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARKER)


@pytest.fixture
def rehearse(request: pytest.FixtureRequest) -> Callable[..., Rehearsal]:
    """`rehearse(function, *args, device=..., budget=..., **kwargs)`: the rehearsal, or a failure with its lines."""
    marker = request.node.get_closest_marker("rehearse")
    defaults = {} if marker is None else _read_marker(marker)

    def run(function: Callable[..., object], *args: object, **kwargs: object) -> Rehearsal:
        settings = {name: kwargs.pop(name, defaults.get(name)) for name in SETTINGS}
        return _rehearse(function, args, kwargs, settings)

    return run


SETTINGS = ("device", "budget", "strict", "options")


@pytest.hookimpl(hookwrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """A marked test is called by the rehearsal, unless it takes the fixture and calls it itself."""
    marker = pyfuncitem.get_closest_marker("rehearse")
    if marker is None or "rehearse" in pyfuncitem.fixturenames:
        yield
        return
    settings = _read_marker(marker)
    original = pyfuncitem.obj

    @functools.wraps(original)
    def run_rehearsal(*args: object, **kwargs: object) -> None:
        _rehearse(original, args, kwargs, settings)

    pyfuncitem.obj = run_rehearsal
    try:
        yield
    finally:
        pyfuncitem.obj = original


def _read_marker(marker: pytest.Mark) -> dict[str, Any]:
    names = dict(zip(("device", "budget"), marker.args, strict=False)) | dict(marker.kwargs)
    unknown = sorted(set(names) - set(SETTINGS))
    if unknown or len(marker.args) > 2:
        raise pytest.UsageError(
            f"the marker rehearse accepts {', '.join(SETTINGS)}, got {', '.join(unknown) or 'more arguments'}"
        )
    return names


def _rehearse(
    function: Callable[..., object], args: Any, kwargs: dict[str, Any], settings: dict[str, Any]
) -> Rehearsal:
    # why: this file is loaded with every run of pytest
    import understudy
    from understudy.cli.tables import parse_size  # why: as above
    from understudy.errors import UnderstudyError  # why: as above
    from understudy.lines import drop_own_frames  # why: as above
    from understudy.report.rehearsal import DOES_NOT_FIT, NO_VERDICT, TIGHT  # why: as above
    from understudy.simulation.simulator import find_device  # why: as above

    problem = ""
    try:
        budget = (
            parse_size(settings["budget"])
            if isinstance(settings.get("budget"), str)
            else settings.get("budget")
        )
        if settings.get("device") is not None:
            find_device(settings["device"])
    except (UnderstudyError, OSError, ValueError) as error:
        problem = str(error)
    if problem:
        pytest.fail(f"rehearse: {problem}", pytrace=False)
    given = {name: settings[name] for name in ("device", "options") if settings.get(name) is not None}
    try:
        result: Rehearsal = understudy.rehearse(function, *args, **given, **kwargs)
    except Exception as error:
        raise error.with_traceback(drop_own_frames(error.__traceback__)) from error.__cause__
    if result.verdict == NO_VERDICT:
        pytest.fail(result.headline, pytrace=False)
    if result.verdict == DOES_NOT_FIT or (settings.get("strict") and result.verdict == TIGHT):
        pytest.fail(_explain(result, result.headline), pytrace=False)
    if budget is not None and result.peak.reserved_bytes > budget:
        over = result.peak.reserved_bytes - budget
        reason = f"{over:,} bytes over the budget of {settings['budget']}: {result.headline}"
        pytest.fail(_explain(result, reason), pytrace=False)
    return result


def _explain(result: Rehearsal, reason: str) -> str:
    from understudy.report.text import format_size  # why: only where a test fails

    lines = [f"  {format_size(row.bytes):>12}  {row.line}  {row.source}" for row in result.lines[:TOP]]
    return "\n".join([reason, "at the peak, by line:", *lines])
