"""The pytest plugin, in pytest runs of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest_plugins = ("pytester",)

TESTS = """
    import pytest
    import torch

    def step(width):
        model = torch.nn.Linear(width, width, device="cuda")
        model(torch.randn(64, width, device="cuda")).sum().backward()

    @pytest.mark.rehearse(device="t4")
    def test_fits():
        step(1024)
        assert torch.cuda.is_available()

    @pytest.mark.rehearse(device="t4", budget="20MiB")
    def test_over_budget():
        step(2048)

    @pytest.mark.rehearse("t4")
    def test_does_not_fit():
        step(60_000)

    @pytest.mark.rehearse(device="t4")
    def test_own_assertion():
        assert torch.cuda.get_device_name().startswith("H100")

    @pytest.mark.rehearse(device="h10")
    def test_wrong_device():
        step(8)

    def test_fixture(rehearse):
        result = rehearse(step, 1024, device="h100", budget="1GiB")
        assert result.device.key == "h100"
        assert result.peak.reserved_bytes >= 1024 * 1024 * 4

    @pytest.mark.rehearse(device="t4", budget="20MiB")
    def test_fixture_with_a_marker(rehearse):
        rehearse(step, 2048)

    @pytest.mark.parametrize("width", [16, 32])
    @pytest.mark.rehearse(device="t4")
    def test_parameters(width, tmp_path):
        step(width)
        assert tmp_path.exists()

    @pytest.mark.rehearse(device="t4", budget="1GiB")
    def test_nothing_on_the_card():
        torch.ones(3).sum()

    def test_without():
        assert not torch.cuda.is_available()
"""


def test_marker_and_fixture(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(TESTS)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "--strict-markers", "-rN")
    result.assert_outcomes(passed=5, failed=6)
    result.stdout.fnmatch_lines(
        [
            "*bytes over the budget of 20MiB: fits on T4:*",
            "at the peak, by line:",
            "*MiB  test_marker_and_fixture.py:*",
        ]
    )
    result.stdout.fnmatch_lines(["does not fit on T4:*"])
    result.stdout.fnmatch_lines(["*unknown device 'h10': did you mean h100*"])
    result.stdout.fnmatch_lines(["*assert False*"])
    result.stdout.fnmatch_lines(["no verdict on T4: nothing ran on it"])


def test_failures_show_nothing_of_ours(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest, torch

        @pytest.mark.rehearse(device="t4", budget="much")
        def test_wrong_budget(): pass

        @pytest.mark.rehearse(device="t4")
        def test_wrong_shapes():
            torch.ones(3, device="cuda") @ torch.ones(4, device="cuda")
        """
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        [
            "rehearse: expected a size such as 40GiB or 512MiB, got 'much'*",
            "*torch.ones(3, device=*",
            "E*differ in size",
        ]
    )
    result.stdout.no_fnmatch_line("*src/understudy/*")
    result.stdout.no_fnmatch_line("*During handling*")


def test_a_wrong_marker_says_what_it_takes(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import pytest\n@pytest.mark.rehearse(card='t4')\ndef test_it(): pass\n")
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.stdout.fnmatch_lines(["*the marker rehearse accepts device, budget, strict, options, got card*"])
    assert result.ret != 0


def test_it_is_loaded_without_torch() -> None:
    code = "import sys, understudy.pytest_plugin; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
