"""The documentation is true: its code runs, its output is what is printed, its links lead somewhere.

A block of ```python is run; a block of ```pycon is run as a session, and its output compared ("..." stands for
any text). The blocks of a page share their names, from top to bottom. A block that is not meant to run is
preceded by the line `<!-- not run: the reason -->`.
"""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import understudy
from tests.registered_patches import forget_new_patches
from tests.test_architecture import ROOMS, SIDE_ROOMS
from understudy.cli import main

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "understudy"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)

BLOCK = re.compile(r"(?P<before>[^\n]*)\n+```(?P<kind>python|pycon)\n(?P<code>.*?)\n```", re.DOTALL)
PATH = re.compile(r"`(?P<path>(?:[a-z_]+/)+(?:[a-z_]+\.py)?|[a-z_]+\.py)`")
LINK = re.compile(r"\]\((?P<target>[^)#\s]+)(?:#[^)]*)?\)")


@dataclass(frozen=True)
class Block:
    kind: str
    code: str
    line: int


def blocks_of(page: Path) -> Iterator[Block]:
    text = "\n" + page.read_text()
    for found in BLOCK.finditer(text):
        if not found["before"].startswith("<!-- not run:"):
            yield Block(found["kind"], found["code"], text.count("\n", 0, found.start("code")) - 1)


def run_block(block: Block, names: dict[str, object], page: Path) -> None:
    place = "\n" * block.line  # so that a traceback shows the line of the page
    if block.kind == "python":
        exec(compile(place + block.code, str(page), "exec"), names)
        return
    session = doctest.DocTestParser().get_doctest(block.code + "\n", names, page.name, str(page), block.line)
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    failed = runner.run(session, out=said.append, clear_globs=False).failed
    names.update(session.globs)
    assert not failed, "".join(said)


@each_page
def test_code_runs(page: Path) -> None:
    # Every page begins with the two imports that a reader has in mind.
    names: dict[str, object] = {"__name__": "__page__", "torch": torch}
    with forget_new_patches():
        for block in blocks_of(page):
            run_block(block, names, page)


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    targets = [m["target"] for m in LINK.finditer(page.read_text())]
    missing = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert not missing


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "scripts.md"], ids=lambda page: page.name
)  # that page lists files of other repositories
def test_files_that_are_named_exist(page: Path) -> None:
    """`fake/mode.py` is a file of the package, `tests/oracle/real.py` one of the repository."""
    named = {found["path"] for found in PATH.finditer(page.read_text())}
    missing = [path for path in sorted(named) if not any((root / path).exists() for root in (ROOT, SOURCE))]
    assert not missing, f"{page.name} names files that are not there: {missing}"


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/how-it-works.md"])
def test_rooms_are_drawn(page: str) -> None:
    """The drawing has every room of `tests/test_architecture.py`."""
    text = (ROOT / page).read_text()
    drawings = "\n".join(line for line in text.splitlines() if line.startswith("    "))
    missing = [room for room in (*ROOMS, *SIDE_ROOMS) if not re.search(rf"\b{room}\b", drawings)]
    assert not missing


def test_commands_in_the_readme_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^    |`)make ([a-z]+)", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert {"demo", "test"} <= named <= targets


def test_the_idea_from_scratch_runs() -> None:
    """The file is a program: its assertions hold, and it uses nothing of the library."""
    path = ROOT / "docs" / "understudy-from-scratch.py"
    assert "import understudy" not in path.read_text()
    subprocess.run([sys.executable, path], check=True, capture_output=True)


def test_site_is_built_without_warnings(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    built = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert built.returncode == 0, built.stderr
    assert "allow_non_fake_inputs" in (tmp_path / "reference" / "index.html").read_text()


def test_reference_has_every_public_name() -> None:
    text = (ROOT / "docs" / "reference.md").read_text()
    listed = set(re.findall(r"^::: understudy\.(\w+)$", text, re.MULTILINE))
    assert listed == set(understudy.__all__) - NOT_IN_REFERENCE


NOT_IN_REFERENCE = {"ShapeEnvSettings", "run_every_layer"}
"""An alias; a deprecated name."""


def test_changelog_knows_this_version() -> None:
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    assert f"## {version[1]}" in (ROOT / "CHANGELOG.md").read_text()


def test_demo_says_what_it_promises(capfd: pytest.CaptureFixture[str]) -> None:
    """`make demo` with a small model: the cards in a table, and where the memory goes."""
    script = str(ROOT / "examples" / "train_gpt.py")
    assert "understudy" not in Path(script).read_text()
    small = [
        script,
        *"--layers 2 --width 128 --heads 4 --length 64 --batch 2 --vocabulary 500 --amp --sdpa".split(),
    ]
    assert main(["run", "--device", "h100,t4", *small]) == 0
    said = capfd.readouterr().out
    assert [line.split()[:2] for line in said.splitlines()[-2:]] == [["h100", "fits"], ["t4", "fits"]]
    assert (
        main(["run", "--device", "t4", *small, "--checkpoint", "--accumulate", "2", "--save", "model.pt"])
        == 0
    )
    said = capfd.readouterr().out
    for line in ("fits on T4: ", "Where the memory goes", "train_gpt.py:", "Kept from the disk", "model.pt"):
        assert line in said
    assert not Path("model.pt").exists()
