"""The command line: answers, wrong input, and what it does not import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import understudy
from understudy.cli import COMMANDS, find_command, main
from understudy.simulation.catalogue import find_card


def test_devices_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == "device name GiB outside capability SMs GB/s fp32 TF bf16 TF link GB/s".split()
    assert (
        "h100     NVIDIA H100 80GB HBM3     79.11     0.67         9.0  132  3,350     67.0      989        900"
        in lines
    )
    assert lines[-1] == "Simulated software: CUDA 13.0, cuDNN 9.20.0, NCCL 2.29.7, driver 580.65.06."
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize("handler", ["strict", "surrogateescape"])
def test_any_locale_and_interrupts(handler: str) -> None:
    """What the locale has no code for is a question mark; an interrupt while torch is imported is no traceback."""
    start = [sys.executable, "-m", "understudy"]
    environment = {**os.environ, "PYTHONIOENCODING": f"ascii:{handler}"}
    ended = subprocess.run([*start, "patches"], capture_output=True, env=environment)
    assert (ended.returncode, ended.stderr) == (0, b"") and b"?" in ended.stdout

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("understudy.cli.devices._list_devices", interrupt)
        patched.setattr("understudy.cli._parse", interrupt)
        assert main(["devices"]) == 130


def test_devices_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    devices = {device["key"]: device for device in record["devices"]}
    assert devices["t4"]["memory"] == find_card("t4").memory
    assert devices["t4"]["capability"] == [7, 5]
    assert devices["v100-16"]["context"] is None
    assert "datasheet" in devices["h100"]["sources"]["bandwidth"]
    assert record["software"]["cuda"] == "13.0"


def test_devices_with_cards_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cards.toml"
    file.write_text("[mine]\nmemory = 10.5\n")
    assert main(["devices", "--cards", str(file)]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == [
        "mine",
        "mine",
        "10.50",
        "~0.50",
        "-",
        "-",
        "-",
        "-",
        "-",
        "-",
    ]


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    assert "devices" in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"understudy {understudy.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["device"], "understudy: argument COMMAND: invalid choice: 'device'"),
        ([], "understudy: the following arguments are required: COMMAND (see understudy --help)"),
        (["devices", "--jsn"], "understudy devices: unknown option --jsn: did you mean --json? (see"),
        (["devices", "h100"], "understudy devices: unexpected argument 'h100'"),
        (
            ["devices", "--cards", "no_such.toml"],
            "understudy devices: no_such.toml: No such file or directory",
        ),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main(arguments)
    except SystemExit as ended:
        code = ended.code
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert captured.err.startswith(message)
    assert captured.err.count("\n") == 1


def test_torch_is_not_imported() -> None:
    code = "import sys, understudy.cli as c; c.main(['devices', '--json']); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = f"{sys.executable} -m understudy.cli devices --json | head -c 10"
    ended = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_the_module_is_the_command() -> None:
    ended = subprocess.run([sys.executable, "-m", "understudy.cli", "devces"], capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr.startswith("understudy: ")


def test_the_console_script_is_declared() -> None:
    project = (Path(__file__).parent.parent.parent / "pyproject.toml").read_text()
    assert 'understudy = "understudy.cli:main"' in project
    assert '"simulation/devices.toml"' in project


def test_the_table_of_commands_is_that_of_the_modules() -> None:
    for name, _, module in COMMANDS:
        command = find_command(name, module)
        assert command.name == name


def test_help_imports_no_command() -> None:
    code = (
        "import sys, understudy.cli as c\n"
        "try: c.main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'understudy.cli.run', 'understudy.cli.fixes', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("name", [name for name, *_ in COMMANDS])
def test_each_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0
    assert f"usage: understudy {name}" in capsys.readouterr().out
