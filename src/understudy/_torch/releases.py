"""The supported releases of torch. Imported before any private API of torch."""

from __future__ import annotations

import os
import warnings

import torch

OLDEST_RELEASE = (2, 13)
"""The oldest release with the private API that this package uses; the same as in `pyproject.toml`."""
NEWEST_RELEASE = (2, 15)
"""The newest release of torch that the tests were run on."""


def check_release(version: str) -> None:
    """Raise for a release that is too old, with a clear message instead of a missing name. Warn about a newer one."""
    major, minor = (int(part) for part in version.split(".")[:2])
    if (major, minor) < OLDEST_RELEASE:
        place = os.path.dirname(torch.__file__ or "")
        raise ImportError(
            f"understudy needs torch {_show(OLDEST_RELEASE)} or newer, and torch {version} is installed (in {place}): "
            f"pip install 'torch>={_show(OLDEST_RELEASE)}'",
            name="torch",
            path=place,
        )
    if (major, minor) > NEWEST_RELEASE:
        warnings.warn(
            f"torch {version} is newer than {_show(NEWEST_RELEASE)}, the newest release that this version of "
            "understudy supports; if something fails, update understudy",
            stacklevel=2,
        )


def _show(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))


check_release(torch.__version__)
