"""Releases of torch that this version of the library does not know."""

from __future__ import annotations

import warnings

import pytest

from understudy._torch import warn_of_newer_release


@pytest.mark.parametrize("version", ["2.13.0+cpu", "2.14.1", "2.15.0+cu132"])
def test_known_releases_are_taken_silently(version: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_newer_release(version)


@pytest.mark.parametrize("version", ["2.16.0", "3.0.0a0+git1234"])
def test_a_newer_release_gives_a_warning(version: str) -> None:
    with pytest.warns(UserWarning, match=rf"torch {version.split('+')[0]}.* is newer than 2.15"):
        warn_of_newer_release(version)
