"""The options that a script offers: it ends where it parses its command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from understudy.fake.mode import FakeTensorMode
from understudy.simulation.scripts import Script, ScriptResult, run_script


def read(folder: Path, text: str, *arguments: str) -> ScriptResult:
    file = folder / "script.py"
    file.write_text(text)
    with FakeTensorMode(answers="plausible", allow_non_fake_inputs=True) as mode:
        return run_script(Script(str(file), arguments), mode=mode, reads_parser=True)


def names(result: ScriptResult) -> list[str]:
    return [str(option["name"]) for option in result.parsers]


def test_the_script_ends_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = read(
        tmp_path,
        """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8, help="of a card")
parser.add_argument("--zero", type=int, choices=(0, 1))
try:
    parser.parse_args()
except Exception:
    pass
print("goes on")
""",
        "--batch",
        "4",
    )
    assert (result.exit_code, result.error, result.was_ended) == (0, "", True)
    assert capsys.readouterr().out == ""
    assert result.parsers == [
        {"flags": ["--batch"], "name": "batch", "kind": "int", "default": 8, "choices": None, "help": "of a card"},
        {"flags": ["--zero"], "name": "zero", "kind": "choice", "default": None, "choices": [0, 1], "help": ""},
    ]  # fmt: skip


def test_a_parser_that_looks_ahead_is_not_the_last(tmp_path: Path) -> None:
    result = read(
        tmp_path,
        """
import argparse
first = argparse.ArgumentParser(add_help=False)
first.add_argument("--config")
first.parse_known_args()
parser = argparse.ArgumentParser(parents=[first])
parser.add_argument("--layers", type=int)
parser.parse_args()
""",
    )
    assert names(result) == ["config", "config", "layers"]


def test_parsers_with_words_of_their_own_are_none(tmp_path: Path) -> None:
    """Libraries have them."""
    result = read(
        tmp_path,
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--own')\nparser.parse_args(['--own', '1'])\n",
        "--batch",
        "4",
    )
    assert names(result) == []
    assert not result.was_ended


def test_the_next_parser_gets_the_words_that_are_left(tmp_path: Path) -> None:
    result = read(
        tmp_path,
        """
import argparse
first = argparse.ArgumentParser()
first.add_argument("--config")
_, left = first.parse_known_args()
parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int)
parser.parse_args(left)
""",
        "--config", "a.yaml", "--batch", "4",
    )  # fmt: skip
    assert names(result) == ["config", "batch"]
    assert result.was_ended


def test_the_options_of_a_command_are_those_that_are_used(tmp_path: Path) -> None:
    result = read(
        tmp_path,
        """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--amp", action="store_true")
commands = parser.add_subparsers()
commands.add_parser("train").add_argument("--batch", type=int)
commands.add_parser("test").add_argument("--split")
parser.parse_args()
""",
        "train",
    )
    assert [(option["name"], option.get("before")) for option in result.parsers] == [
        ("amp", "train"),
        ("batch", None),
    ]


def test_a_parser_of_a_library_is_not_that_of_the_script(tmp_path: Path) -> None:
    """It has options of its own, and hands on the words."""
    (tmp_path / "hydra.py").write_text(
        "import argparse\n"
        "def main():\n"
        "    parser = argparse.ArgumentParser()\n"
        "    parser.add_argument('--multirun')\n"
        "    parser.parse_args()\n"
    )
    result = read(tmp_path, "import hydra\nhydra.main()\n")
    assert names(result) == []
    assert not result.was_ended


def test_options_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    result = read(
        tmp_path,
        """
from dataclasses import dataclass, field
from transformers.hf_argparser import HfArgumentParser

@dataclass
class Arguments:
    per_device_train_batch_size: int = 8
    bf16: bool = False
    learning_rate: float = field(default=1e-4)

HfArgumentParser(Arguments).parse_args_into_dataclasses()
raise ValueError("goes on")
""",
    )
    assert result.was_ended
    kinds = {option["flags"][0]: option["kind"] for option in result.parsers}
    assert kinds == {"--per_device_train_batch_size": "int", "--bf16": "truth", "--learning_rate": "float"}
