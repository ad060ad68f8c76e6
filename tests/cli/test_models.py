"""`understudy model`, `check` and `graph`: figures that real tensors confirm, words that are wrong, harmless names."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from understudy.cli import main, models
from understudy.cli.targets import TargetError, choose_examples, parse_input, parse_target

SOURCE = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.unused = nn.Linear(1, 1)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

class Net(nn.Module):
    def __init__(self, layers=3, width=8):
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 50, bias=False)
    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

class Windows(nn.Module):
    def forward(self, x):
        return x.view(-1, 8, x.shape[-1])

class Fixed(nn.Module):
    def forward(self, x):
        return sum(x[i] for i in range(x.shape[0]))

class Broken(nn.Module):
    def forward(self, x):
        return x @ x.new_zeros(3, 3)

def make():
    return Net(1)

instance = Net(2)

def double(x):
    return x * 2
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "nets_of_test.py"
    path.write_text(SOURCE)
    yield "nets_of_test.py"  # type: ignore[misc]
    sys.modules.pop("nets_of_test", None)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


def test_layers_as_a_table(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "model", f"{file}:Net")
    assert (
        out.splitlines()[0]
        == "input: ids: i64[batch, length] with batch=1, length=128 (guessed from the first layer)"
    )
    lines = {line.split()[0]: line.split("  ") for line in out.splitlines()[3:] if line.strip()}
    assert "0..2 (Block x3)" in out
    assert "f32[1, 128, 32]" in out
    assert [cell.strip() for cell in lines["head"] if cell.strip()] == [
        "head (Linear)",
        "f32[1, 128, 8]",
        "f32[1, 128, 50]",
        "400",
        "51.2K",
        "25.00 KiB",
    ]
    assert "unused (Linear)                   (not called)" in out
    parameters = 50 * 8 * 2 + 3 * (8 * 32 + 32 + 32 * 8 + 8 + 2)
    assert f"parameters: {parameters:,}" in out
    assert "not called: blocks.0.unused, blocks.1.unused, blocks.2.unused" in out


def test_saved_memory_is_what_autograd_saves_of_real_tensors(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    record = json.loads(
        run(capsys, "model", f"{file}:Net(layers=2)", "--train", "--json", "--input", "ids: i64[3, 5]")
    )
    namespace: dict[str, type] = {}
    exec(SOURCE, namespace)
    model = namespace["Net"](layers=2)
    own = {tensor.untyped_storage().data_ptr() for tensor in model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda kept: kept):
        result = model(torch.zeros(3, 5, dtype=torch.int64))
    expected = sum(t.untyped_storage().nbytes() for pointer, t in saved.items() if pointer not in own)
    assert result.shape == (3, 5, 50)
    assert record["model"]["saved_bytes"] == expected
    assert record["model"]["outputs"] == "f32[3, 5, 50]"
    assert record["model"]["macs"] == 3 * 5 * (2 * (2 * 8 * 32) + 8 * 50)
    assert record["model"]["parameters"] == sum(p.numel() for p in model.parameters())


def test_columns_sort_and_depth(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "model", f"{file}:Net", "--columns", "params,calls", "--depth", "1")
    assert out.splitlines()[2].split() == ["layer", "parameters", "calls"]
    assert "blocks" in out and "0..2" not in out
    out = run(capsys, "model", f"{file}:Net", "--sort", "params", "--columns", "params")
    sizes = [int(line.split()[-1].replace(",", "")) for line in out.splitlines()[3:14] if line.split()]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("name", ["make", "instance", "Net(1)", "Net(layers=1, width=16)"])
def test_targets_of_each_kind(name: str, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "Net" in run(capsys, "model", f"{file}:{name}", "--input", "i64[2, 4]")
    assert "f32[2, 4, 50]" in run(capsys, "model", f"nets_of_test:{name}", "--input", "i64[2, 4]")


@pytest.mark.parametrize("kind", ["gpt2", "bert", "vit", "t5"])
def test_configurations_of_transformers(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {
        "gpt2": {"n_layer": 2, "n_embd": 32, "n_head": 2, "architectures": ["GPT2LMHeadModel"]},
        "bert": {
            "num_hidden_layers": 2,
            "hidden_size": 32,
            "num_attention_heads": 2,
            "intermediate_size": 64,
        },
        "vit": {
            "num_hidden_layers": 2,
            "hidden_size": 32,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "image_size": 32,
        },
        "t5": {"num_layers": 3, "d_model": 32, "num_heads": 2, "d_ff": 64, "d_kv": 16},
    }[kind]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **small}))
    out = run(capsys, "model", str(tmp_path), "--depth", "4")
    assert "x2)" in out
    assert "(guessed from the configuration)" in out


def test_check_says_for_which_sizes_it_holds(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "check", f"{file}:Net")
    assert "input   ids: i64[batch, length]\noutput  f32[batch, length, 50]\n" in out
    assert "Valid for every size." in out
    out = run(capsys, "check", f"{file}:Windows", "--input", "x: f32[batch=2, length=12, 5]")
    assert "output  f32[batch*length//8, 8, 5]" in out
    assert "batch*length % 8 == 0    because nets_of_test.py:28: return x.view(-1, 8, x.shape[-1])" in out
    record = json.loads(run(capsys, "check", f"{file}:double", "--input", "f32[n]", "--json"))
    assert record["outputs"] == [{"name": "", "spec": "f32[n]"}]


def test_check_fails_where_a_name_becomes_a_number(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{file}:Fixed", "--input", "x: f32[n=3, 4]"]) == 1
    assert (
        "n = 3    because nets_of_test.py:32: return sum(x[i] for i in range(x.shape[0]))"
        in capsys.readouterr().out
    )


def test_a_model_that_fails_shows_its_own_lines(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{file}:Broken", "--input", "x: f32[n, 4]"]) == 1
    error = capsys.readouterr().err
    assert "return x @ x.new_zeros(3, 3)" in error
    assert "understudy check: the model failed: " in error
    assert "understudy/fake" not in error


def test_graphs(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "graph", f"{file}:Net", "--input", "ids: i64[batch, 7]")
    assert (
        "aten.embedding" in out
        and "f32[batch, 7, 50]@cpu" in out
        and "nets_of_test.py:" in out
        and "blocks.1.up" in out
    )
    limited = run(capsys, "graph", f"{file}:Net", "--limit", "6")
    assert len(limited.splitlines()) == 8 and "more" in limited
    record = json.loads(run(capsys, "graph", f"{file}:double", "--input", "f32[n]", "--format", "json"))
    names = [node["name"] for node in record["nodes"]]
    assert names[-1] == "output"
    assert all(parent in names for node in record["nodes"] for parent in node["inputs"])
    assert (
        run(capsys, "graph", f"{file}:double", "--input", "f32[n]", "--format", "dot", "--output", "g.dot")
        == ""
    )
    dot = (tmp_path / "g.dot").read_text()
    assert dot.startswith("digraph understudy {") and dot.rstrip().endswith("}")
    assert dot.count("[label=") == len(names)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nets.py:Net"], "nets.py: No such file or directory"),
        (
            ["nets_of_test.py"],
            "expected file.py:name, package.module:name or a config.json, got 'nets_of_test.py'",
        ),
        (["nets_of_test.py:Nett"], "nets_of_test.py does not define 'Nett': did you mean Net?"),
        (["nets_of_test.py:Net(os)"], "expected a name, or a call with literals, after the colon"),
        (["nets_of_test.py:"], "expected file.py:name"),
        (["no_such_package:Net"], "no module named 'no_such_package'"),
        (["missing/config.json"], "missing/config.json: No such file or directory"),
        (
            ["nets_of_test.py:Net", "--input", "spam"],
            "expected an input such as \"x: f32[batch, 3, 224]\", got 'spam'",
        ),
        (["nets_of_test.py:Net", "--input", "q7[3]"], "unknown dtype 'q7'"),
        (
            ["nets_of_test.py:Net", "--input", "f32[a+1]"],
            "expected a size as a number, a name, or name=example, got 'a+1'",
        ),
        (["nets_of_test.py:Net", "--input", "f32[a=1, a=2]"], "a has two examples, 1 and 2"),
        (["nets_of_test.py:Net", "--columns", "spam"], "--columns: invalid choice 'spam' (choose from"),
        (["nets_of_test.py:double"], "nets_of_test.py:double is a function"),
        (["nets_of_test.py:Windows"], "no guess for the inputs of nets_of_test.py:Windows(x)"),
    ],
)
def test_wrong_words(
    arguments: list[str], message: str, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["model", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"understudy model: {message}")
    assert captured.err.count("\n") == 1


def test_wrong_words_are_told_before_torch_is_imported(file: str) -> None:
    code = f"import sys, understudy.cli as c; c.main(['check', '{file}:Nett']); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, stderr=subprocess.DEVNULL)


def test_inputs_in_words() -> None:
    spec = parse_input(" x : bf16 [ batch=8, 3, h ] @ cuda:0")
    assert (spec.name, spec.dtype, spec.sizes, spec.device) == (
        "x",
        "bfloat16",
        (("batch", 8), 3, ("h", None)),
        "cuda:0",
    )
    assert str(spec) == "x: bf16[batch, 3, h]"
    assert parse_input("f32[]").sizes == ()
    examples = choose_examples([parse_input("f32[b, 3, h, w]"), parse_input("i64[b, t]")])
    assert len(set(examples.values())) == 4
    with pytest.raises(TargetError):
        parse_target("a.py:x[0]")


def test_names_of_the_program_do_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("hostile_of_test.py").write_text(
        "from torch import nn\nm = nn.Sequential()\nm.add_module('a\\x1b[2J\"];evil', nn.Linear(2, 2))\n"
    )
    out = run(capsys, "model", "hostile_of_test.py:m")
    assert "a\\x1b[2J" in out and "\x1b" not in out
    dot = run(capsys, "graph", "hostile_of_test.py:m", "--format", "dot")
    assert "\x1b" not in dot
    sys.modules.pop("hostile_of_test", None)


def test_a_reader_that_has_gone_is_no_failure_of_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    def run() -> int:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        models._run_guarded("graph", run)
    assert capsys.readouterr().err == ""


def test_a_model_of_a_script_that_trains_when_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("trains.py").write_text(
        "import argparse, torch\n"
        "argparse.ArgumentParser().parse_args()\n"
        "open('log.txt', 'w').write('begun')\n"
        "model = torch.nn.Linear(4, 4)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "while True:\n"
        "    model(torch.ones(2, 4)).sum().backward()\n"
        "    optimizer.step()\n"
    )
    words = sys.argv[:]
    assert main(["model", "trains.py:model"]) == 0
    assert "parameters: 20" in capsys.readouterr().out
    assert not Path("log.txt").exists() and sys.argv == words
    assert main(["model", "trains.py"]) == 2
    assert "expected file.py:name" in capsys.readouterr().err


def test_a_model_that_is_put_on_a_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While the file is imported, and while the model is made."""
    monkeypatch.chdir(tmp_path)
    Path("card.py").write_text(
        "from torch import nn\n"
        "made = nn.Linear(4, 8).cuda()\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.head = nn.Linear(4, 8).cuda()\n"
        "    def forward(self, x):\n"
        "        return self.head(x)\n"
    )
    for name in ("made", "Net"):
        assert main(["model", f"card.py:{name}"]) == 0
        out = capsys.readouterr().out
        assert "f32[1, 4]@cuda:0" in out and "parameters: 40" in out


def test_a_file_without_a_name_says_which_there_are(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    for target in (file, f"{file}:nothing_like_it"):
        assert main(["model", target]) == 2
        assert "choose from Block, Net, Windows" in capsys.readouterr().err
