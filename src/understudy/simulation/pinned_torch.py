"""The release of torch that a project asks for, read from the files beside its script."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

FILES = (
    "requirements*.txt", "requirements/*.txt", "pyproject.toml", "setup.py", "setup.cfg", "environment*.y*ml", "uv.lock",
    "poetry.lock", "pdm.lock", "Pipfile.lock",
)  # fmt: skip
MOST_PARENTS = 2
"""A script may be in a folder of its project."""
LIMIT = re.compile(
    r"(?<![\w.-])(?:py)?torch[\s\"']*(?:\[[^]]*\])?[\s\"']*(?:>=?\s*[\d.]+\s*,\s*)?(===?|~=|<=|<|=)\s*[\"']?v?(\d+(?:\.\d+)+)"
)
"""torch==2.6.0, torch<2.7, torch >=2.1,<2.4, pytorch=2.1 (conda)."""
LOCKED = re.compile(
    r'name = "torch"\s*\nversion = "(\d+(?:\.\d+)+)|"torch":\s*\{[^}]*"version":\s*"==(\d+(?:\.\d+)+)'
)


@dataclass(frozen=True)
class PinnedRelease:
    """`text` is as the file has it: "==2.6.0"."""

    text: str
    file: str


def find_older_release(script: str, installed: str) -> PinnedRelease | None:
    """The release that the project of a script asks for, if it is older than the one that is installed."""
    folder = Path(script).resolve().parent
    for place in (folder, *folder.parents[:MOST_PARENTS]):
        for path in sorted(found for pattern in FILES for found in place.glob(pattern)):
            pinned = _read_limit(path, _read_release(installed))
            if pinned is not None:
                return pinned
        if (place / ".git").exists():
            break
    return None


def _read_limit(path: Path, installed: tuple[int, int]) -> PinnedRelease | None:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    for found in LOCKED.finditer(text):
        version = found[1] or found[2]
        if _read_release(version) < installed:
            return PinnedRelease(f"=={version}", path.name)
    for found in LIMIT.finditer(
        "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    ):
        operator, version = found[1], found[2]
        is_open = operator == "~=" and version.count(".") < 2  # ~=2.6 allows 2.7
        is_older = (
            _read_release(version) <= installed if operator == "<" else _read_release(version) < installed
        )
        if is_older and not is_open:
            return PinnedRelease(f"{operator}{version}", path.name)
    return None


def _read_release(version: str) -> tuple[int, int]:
    numbers = re.findall(r"\d+", version)
    return int(numbers[0]), int(numbers[1]) if len(numbers) > 1 else 0
