"""The sandbox: whatever a script does, the files outside stay as they are."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.simulation.hostile_scripts import FILES, NEEDS_NAMESPACES, SCRIPTS
from understudy.simulation.sandbox import landlock
from understudy.simulation.sandbox.namespaces import list_targets
from understudy.simulation.sandbox.private_folders import LOCK, make_private_folder

SOURCE = Path(__file__).parents[2] / "src"
DRIVER = Path(__file__).with_name("sandbox_driver.py")
NOBODY = 65534

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="namespaces and Landlock are of Linux")


def describe(folder: Path, *, has_attributes: bool = True) -> dict[str, Any]:
    """Every file below: its content; with attributes also rights, owner, times and extended attributes."""
    found: dict[str, Any] = {}
    for path in sorted([folder, *folder.rglob("*")]):
        about = path.lstat()
        content = os.readlink(path) if path.is_symlink() else ""
        if path.is_file() and not path.is_symlink():
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        attributes: tuple[Any, ...] = ()
        if has_attributes:
            extended = os.listxattr(path, follow_symlinks=False)
            attributes = (about.st_mode, about.st_uid, about.st_mtime_ns, about.st_nlink, extended)
        found[str(path.relative_to(folder))] = (content, *attributes)
    return found


def make_folders(parent: Path) -> None:
    for script in SCRIPTS:
        for name, content in FILES.items():
            path = parent / script / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def find_interpreter() -> str | None:
    """One that every user may run, and that is recent enough."""
    for path in ("/usr/bin/python3", "/usr/local/bin/python3", sys.executable):
        test = "import sys; sys.exit(sys.version_info < (3, 10))"
        if os.path.exists(path):
            try:
                ended = subprocess.run(
                    [path, "-c", test], user=NOBODY, group=NOBODY, extra_groups=[], cwd="/"
                )
            except OSError:
                continue
            if ended.returncode == 0:
                return path
    return None


class Runs:
    """All scripts, run by one user at one level; the folders from before and after."""

    def __init__(self, level: str, user: int | None) -> None:
        has_attributes = level == "namespaces"
        self.folder = Path(tempfile.mkdtemp(prefix="hostile-"))
        make_folders(self.folder)
        options: dict[str, Any] = {}
        interpreter: str | None = sys.executable
        if user is not None:
            interpreter = find_interpreter()
            if interpreter is None:
                pytest.skip("no Python that another user may run")
            options = {"user": user, "group": user, "extra_groups": []}
            for path in (self.folder, *self.folder.rglob("*")):
                os.chown(path, user, user)
        before = {name: describe(self.folder / name, has_attributes=has_attributes) for name in SCRIPTS}
        system_before = (describe(self.folder, has_attributes=has_attributes).keys(), os.listdir("/etc"))
        ended = subprocess.run(
            [str(interpreter), str(DRIVER), level, str(self.folder)], capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONDONTWRITEBYTECODE": "1"}, cwd="/", **options,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        time.sleep(0.5)  # what is written late is written by now
        self.results = json.loads(ended.stdout.splitlines()[-1])
        self.errors = ended.stderr
        self.has_system_changed = system_before != (
            describe(self.folder, has_attributes=has_attributes).keys(), os.listdir("/etc"),
        )  # fmt: skip
        self.changed = {
            name
            for name in SCRIPTS
            if describe(self.folder / name, has_attributes=has_attributes) != before[name]
        }


@pytest.fixture(scope="module", params=["this user", "nobody"])
def runs(request: pytest.FixtureRequest) -> Iterator[Runs]:
    if request.param == "nobody" and os.geteuid() != 0:
        pytest.skip("only root can become another user")
    runs = Runs("namespaces", NOBODY if request.param == "nobody" else None)
    if any(result["level"] != "namespaces" for result in runs.results.values()):
        pytest.skip(f"this machine has no namespaces: {runs.results['write']['level']}")
    yield runs
    shutil.rmtree(runs.folder)


MAY_FAIL_FOR_NOBODY = frozenset({"system", "change_owner"})


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_script_changes_files(runs: Runs, name: str, request: pytest.FixtureRequest) -> None:
    assert name not in runs.changed
    result = runs.results[name]
    is_other = "nobody" in request.node.name
    assert result["is_done"] or (is_other and name in MAY_FAIL_FOR_NOBODY), runs.errors


def test_nothing_is_left_behind(runs: Runs) -> None:
    assert not runs.has_system_changed


def test_what_was_written_is_listed(runs: Runs) -> None:
    def find(name: str) -> list[list[str]]:
        folder = str(runs.folder / name)
        writes = runs.results[name]["writes"]
        return [[what, path.removeprefix(folder)] for what, path in writes if path.startswith(folder)]

    assert find("by_c") == [["write", "/checkpoint.pt"], ["remove", "/data/a.txt"]]
    assert find("rename") == [["remove", "/checkpoint.pt"], ["write", "/moved"]]
    assert find("symbolic_link") == [["write", "/checkpoint.pt"], ["link", "/latest"]]
    assert find("remove_folder_and_make_it_again") == [["remove", "/data"], ["mkdir", "/data"]]


@pytest.fixture(scope="module")
def landlocked() -> Iterator[Runs]:
    if landlock.find_version() < landlock.LEAST_VERSION:
        pytest.skip("this machine has no Landlock")
    runs = Runs("landlock", None)
    yield runs
    shutil.rmtree(runs.folder)


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name not in NEEDS_NAMESPACES])
def test_landlock_keeps_contents(landlocked: Runs, name: str) -> None:
    assert landlocked.results[name]["level"] == "landlock"
    assert name not in landlocked.changed


def test_landlock_leaves_nothing_behind(landlocked: Runs) -> None:
    assert not landlocked.has_system_changed


# --- the processes around it ------------------------------------------------------------------------------------------


def run_python(code: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", f"from understudy.simulation.sandbox import *\nimport os, signal, sys, time\n{code}"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options,
    )  # fmt: skip


WAITING = """
def wait(sandbox):
    try:
        print("ready", flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        return b"interrupted"
"""


def test_signals_are_forwarded() -> None:
    process = run_python(f"{WAITING}\nresult = run_sandboxed(wait)\nprint(result.data, result.exit_code)")
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate()[0] == "b'interrupted' 0\n"
    process = run_python(f"{WAITING}\nresult = run_sandboxed(wait)\nprint(result.data, result.exit_code)")
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate()[0] == f"None {-signal.SIGTERM}\n"


def test_all_processes_end_with_the_one_outside() -> None:
    reading, writing = os.pipe()
    process = run_python(f"{WAITING}\nrun_sandboxed(wait)", pass_fds=(writing,))
    os.close(writing)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.kill()
    process.wait()
    assert os.read(reading, 1) == b""  # the pipe is closed: nobody has it any more
    os.close(reading)
    process.communicate()


@pytest.mark.parametrize("level", ["namespaces", "landlock"])
def test_processes_that_are_left_behind_end_with_the_run(level: str) -> None:
    """Also those whose parents have ended, and that ignore signals."""
    reading, writing = os.pipe()
    process = run_python(f"""
from understudy.simulation.sandbox import namespaces
def leave(sandbox):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        os.setsid()
        os.fork()
        time.sleep(60)
    return sandbox.level.encode()
def refuse(is_online):
    raise OSError(1, "refused")
if {level == "landlock"}:
    namespaces.enter_namespaces = refuse
print(run_sandboxed(leave).data)
""", pass_fds=(writing,))  # fmt: skip
    os.close(writing)
    said = process.communicate(timeout=50)[0]
    assert os.read(reading, 1) == b""  # the pipe is closed: nobody has it any more
    os.close(reading)
    if level not in said:
        pytest.skip(f"this machine has no {level}")


def test_exit_codes_and_errors() -> None:
    code = "print([(r.data, r.exit_code) for r in map(run_sandboxed, functions)])"
    functions = "[lambda s: sys.exit(7), lambda s: os._exit(5), lambda s: os.kill(os.getpid(), 9), lambda s: b'x' * 9]"
    process = run_python(f"functions = {functions}\n{code}")
    assert process.communicate()[0] == "[(None, 7), (None, 5), (None, -9), (b'xxxxxxxxx', 0)]\n"


def test_many_processes_inside() -> None:
    code = """
def work(sandbox):
    children = [os.fork() for _ in range(1)]
    if children[0] == 0:
        open("rank", "w").write(str(os.getpid()))
        os._exit(0)
    os.waitpid(children[0], 0)
    return open("rank").read().encode()
result = run_sandboxed(work)
print(result.data.decode().isdigit(), os.path.exists("rank"))
"""
    with tempfile.TemporaryDirectory() as folder:
        assert run_python(code, cwd=folder).communicate()[0] == "True False\n"


def test_a_full_layer_and_a_folder_for_it() -> None:
    code = """
def write(sandbox):
    try:
        with open("large", "wb") as file:
            file.write(bytes(1 << 22))
    except OSError as error:
        return str(error).encode()
    return b"written"
for options in (SandboxOptions(size=1 << 20), SandboxOptions(size=1 << 20, scratch=sys.argv[1])):
    result = run_sandboxed(write, options)
    print(result.data.decode(), result.is_full)
print(os.listdir(sys.argv[1]), os.path.exists("large"))
"""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as scratch:
        said = subprocess.run(
            [sys.executable, "-c", f"from understudy.simulation.sandbox import *\nimport os, sys\n{code}", scratch],
            capture_output=True, text=True, cwd=folder,
        )  # fmt: skip
        assert said.stdout.splitlines() == [
            "[Errno 28] No space left on device True",
            "written False",
            "[] False",
        ]


# --- parts -----------------------------------------------------------------------------------------------------------


def test_folders_with_mounts_below_are_overlaid_one_by_one(tmp_path: Path) -> None:
    for name in ("plain", "mounted/inside", "mounted/other"):
        (tmp_path / name).mkdir(parents=True)
    targets = list_targets([str(tmp_path / "mounted" / "inside")])
    found = [target.removeprefix(str(tmp_path)) for target in targets if target.startswith(str(tmp_path))]
    assert found == ["/mounted/inside", "/mounted/other", "/plain"]
    assert not any(target == "/" or str(tmp_path).startswith(target + "/") for target in targets)
    assert "/proc" not in targets and "/dev" not in targets
    scratch = list_targets([], str(tmp_path / "plain"))
    assert str(tmp_path / "mounted") in scratch and str(tmp_path / "plain") not in scratch


def test_folders_of_killed_processes_are_removed(tmp_path: Path) -> None:
    left = tmp_path / "understudy-left"
    (left / "work" / "work").mkdir(parents=True)
    (left / LOCK).touch()
    (left / "work" / "work").chmod(0)
    (tmp_path / "understudy-other").mkdir()
    with make_private_folder(str(tmp_path)) as first:
        assert not left.exists()
        with make_private_folder(str(tmp_path)) as second:
            assert os.path.isdir(first) and first != second
        assert not os.path.exists(second)
    assert os.listdir(tmp_path) == ["understudy-other"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_files_of_another_group_can_not_be_overlaid() -> None:
    """overlayfs would have to give its copy a group that has no number inside; Landlock holds the run then."""
    interpreter = find_interpreter()
    if interpreter is None:
        pytest.skip("no Python that another user may run")
    code = "from understudy.simulation.sandbox import *\nprint(run_sandboxed(lambda sandbox: b'x').sandbox)"

    def run(folder: Path) -> str:
        ended = subprocess.run(
            [interpreter, "-c", code], cwd=folder, env={"PYTHONPATH": str(SOURCE)}, capture_output=True, text=True,
            user=NOBODY, group=NOBODY, extra_groups=[],
        )  # fmt: skip
        return ended.stdout

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "project")
        (folder / "runs").mkdir(parents=True)
        os.chmod(name, 0o755)
        for path in (folder, folder / "runs"):
            os.chown(path, NOBODY, NOBODY)
        assert "level='namespaces'" in run(folder)
        os.chown(folder / "runs", NOBODY, 0)
        assert "level='namespaces'" not in run(folder) and "runs belongs to another user or group" in run(
            folder
        )
