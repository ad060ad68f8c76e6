"""Scripts as people write them, with the real libraries, run to a verdict; the disk stays as it is."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from understudy.cli import main

SCRIPTS = Path(__file__).parent / "scripts"
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip


def rehearse(name: str, *arguments: str, device: str | None = None, code: int = 0) -> dict[str, Any]:
    chosen = [] if device is None else ["--device", device]
    before = {path for path in Path.cwd().rglob("*") if path.name != "out.json"}
    assert main(["run", *chosen, "--quiet", "--json", "out.json", str(SCRIPTS / name), *arguments]) == code
    assert {path for path in Path.cwd().rglob("*") if path.name != "out.json"} == before
    record: dict[str, Any] = json.loads(Path("out.json").read_text())
    return record


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> None:
    """Its state is that of a process, which each script would have to itself."""
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("device", [None, "h100"])
def test_plain_loop_with_accumulation_and_checkpoints(device: str | None) -> None:
    found = rehearse("plain.py", device=device)
    assert found["steps"] == 2
    assert [(write["what"], Path(write["target"]).name) for write in found["writes"]] == [
        ("mkdir", "checkpoints"), ("torch.save", "best.pt"),
    ]  # fmt: skip


def test_mixed_precision_and_checkpointing() -> None:
    assert rehearse("amp.py", device="h100")["steps"] == 2


def test_compiled_functions_and_workers() -> None:
    found = rehearse("compiled.py")
    assert found["steps"] == 2
    assert any("torch.compile" in note for note in found["assumptions"])


@pytest.mark.parametrize("name", ["trainer.py", "trainer_mlm.py"])
def test_trainer(name: str) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    found = rehearse(name, device="h100")
    assert (found["steps"], found["verdict"]) == (2, "fits")
    # The user's own lines, not those of the libraries that they call.
    assert {Path(row["line"].partition(":")[0]).name for row in found["lines"] if row["line"]} == {name}


def test_lightning() -> None:
    pytest.importorskip("lightning")
    assert rehearse("lightning_script.py", device="h100")["steps"] == 2


def test_accelerate() -> None:
    pytest.importorskip("accelerate")
    assert rehearse("accelerate_script.py", device="h100")["steps"] == 2


def test_generate() -> None:
    pytest.importorskip("transformers")
    found = rehearse("generate.py")
    assert found["steps"] == 0


def test_lora_on_a_model_without_weights() -> None:
    pytest.importorskip("peft")
    found = rehearse("lora.py", "tiny", device="h100")
    assert any("weights not read" in note for note in found["assumptions"])
    assert "adapter_model.safetensors" in {Path(write["target"]).name for write in found["writes"]}


def test_a_missing_configuration_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("peft")
    rehearse("lora.py", "meta-llama/not-here", code=1)
    said = capsys.readouterr().err
    assert "its config.json is not here, and a rehearsal downloads nothing" in said
    assert "hf download meta-llama/not-here config.json" in said
