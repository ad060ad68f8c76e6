"""Releases of torch that this version of the library does not know."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from understudy._torch import NEWEST_RELEASE, OLDEST_RELEASE, check_release

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


@pytest.mark.parametrize("version", ["2.13.0+cpu", "2.13.0a0+git1234", "2.14.1", "2.15.0+cu132"])
def test_known_releases_are_taken_silently(version: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_release(version)


@pytest.mark.parametrize("version", ["2.16.0", "3.0.0a0+git1234"])
def test_a_newer_release_gives_a_warning(version: str) -> None:
    with pytest.warns(UserWarning, match=rf"torch {version.split('+')[0]}.* is newer than 2.15"):
        check_release(version)


@pytest.mark.parametrize("version", ["2.12.1+cu130", "1.13.1"])
def test_an_older_release_is_an_error_that_says_what_to_do(version: str) -> None:
    with pytest.raises(ImportError) as caught:
        check_release(version)
    assert f"understudy needs torch 2.13 or newer, and torch {version} is installed (in " in str(caught.value)
    assert str(caught.value).endswith("pip install 'torch>=2.13'")


def test_the_declared_range_is_the_one_that_is_checked() -> None:
    assert f'"torch>={OLDEST_RELEASE[0]}.{OLDEST_RELEASE[1]}"' in PROJECT.read_text()
    assert OLDEST_RELEASE < NEWEST_RELEASE


def run_with_release(version: str, program: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a new process, in which torch says that it is of another release."""
    start = f"import torch\ntorch.__version__ = torch.torch_version.TorchVersion({version!r})\n"
    return subprocess.run([sys.executable, "-c", start + program], capture_output=True, text=True)


EVERY_NAME = """
import importlib, understudy
modules = ("fake_tensor", "proxy_tensor", "symbolic_shapes", "fake_tensor_prop", "meta_tracer")
for name in (*understudy.__all__, *modules):
    try:
        importlib.import_module("understudy." + name) if name in modules else getattr(understudy, name)
    except ImportError as error:
        print(type(error).__name__, str(error).partition(" (in ")[0])
    else:
        print("there", name)
"""


def test_every_name_that_needs_torch_gives_the_same_error_with_an_older_release() -> None:
    done = run_with_release("2.12.1", EVERY_NAME)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    refused = [line for line in lines if not line.startswith("there")]
    assert set(refused) == {"ImportError understudy needs torch 2.13 or newer, and torch 2.12.1 is installed"}
    # What is left asks nothing of torch: exceptions, settings of dimensions.
    there = {line.removeprefix("there ") for line in lines} & {
        "FakeTensorMode", "make_fx", "capture_step", "symbolic_trace", "FakeTensorProp", "ShapeEnv", "simulate", "rehearse",
        "export", "fake_tensor", "proxy_tensor", "symbolic_shapes", "fake_tensor_prop", "meta_tracer",
    }  # fmt: skip
    assert not there


def test_a_newer_release_warns_once_in_a_process() -> None:
    program = "import understudy\nfor name in understudy.__all__: getattr(understudy, name)\nunderstudy.FakeTensorMode()"
    done = run_with_release("2.16.0", "import warnings\nwarnings.simplefilter('always')\n" + program)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("is newer than 2.15") == 1
