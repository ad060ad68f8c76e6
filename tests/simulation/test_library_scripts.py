"""Scripts as people write them, with the real libraries, run to a verdict; the disk stays as it is."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from understudy import FakeTensorMode
from understudy.cli import main
from understudy.simulation.catalogue import read_toml
from understudy.simulation.offline.columns import make_value
from understudy.simulation.offline.data_sets import TABLE, make_data
from understudy.simulation.offline.models import find_configuration
from understudy.simulation.offline.tokenizers import make_tokenizer

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


def test_masks_are_made_where_a_batch_is_padded() -> None:
    """transformers looks at the values, unless it takes the tensors for those of a tracer."""
    pytest.importorskip("transformers")
    for padding in (0, 5):
        found = rehearse("masks.py", str(padding), "cuda", device="h100")
        joins_masks = "aten.bitwise_and.Tensor" in {row["operator"] for row in found["operators"]}
        assert joins_masks == bool(padding)


@pytest.mark.parametrize(
    ("name", "model"), [("trainer.py", "modeling_llama.py"), ("trainer_mlm.py", "modeling_bert.py")]
)
def test_trainer(name: str, model: str) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    found = rehearse(name, device="h100")
    assert (found["steps"], found["verdict"]) == (2, "fits")
    # The peak is at the user's own line, `trainer.train()`, and the table shows which lines of the model it calls.
    assert Path(found["peak"]["line"].partition(":")[0]).name == name
    assert model in {Path(row["line"].partition(":")[0]).name for row in found["lines"] if row["line"]}


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


# data that is not here, or not the longest


LENGTHS = """import torch

texts = [torch.zeros(length, dtype=torch.int64) for length in (3, 5, 40, 7, 2, 9)]


def collate(part):
    return {"ids": torch.nn.utils.rnn.pad_sequence(part, batch_first=True), "labels": torch.zeros(len(part))}


loader = torch.utils.data.DataLoader(texts, batch_size=2, collate_fn=collate)
model = torch.nn.Sequential(torch.nn.Embedding(16, 8), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for batch in loader:
    labels = batch.pop("labels")
    print("batch of", tuple(batch["ids"].shape))
    (model(batch["ids"]).sum(1)[:, 0] - labels).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_the_longest_batch_is_taken(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "lengths.py").write_text(LENGTHS)
    assert main(["run", "lengths.py"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("batch of (2, 5)\nbatch of (2, 40)\n")
    assert main(["run", "--longest", "--steps", "3", "lengths.py"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("batch of (2, 40)\n" * 3)
    assert "--longest: every batch is the longest of 3: [2, 40], [2]" in said


LANGUAGE_MODEL = """from datasets import load_dataset
from transformers import AutoTokenizer, DataCollatorForLanguageModeling, GPT2Config, GPT2LMHeadModel
from transformers import Trainer, TrainingArguments

tokenizer = AutoTokenizer.from_pretrained("gpt2")
tokenizer.pad_token = tokenizer.eos_token
data = load_dataset("wikitext", "wikitext-2-raw-v1")
data = data.map(lambda rows: tokenizer(rows["text"], truncation=True, max_length=96), batched=True, remove_columns=["text"])
model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=128, n_positions=128))
arguments = TrainingArguments("out", per_device_train_batch_size=4, report_to=[], max_steps=10)
collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
Trainer(model=model, args=arguments, train_dataset=data["train"], data_collator=collator).train()
"""


def test_data_that_is_not_here_is_made_up(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "train.py").write_text(LANGUAGE_MODEL)
    assert main(["run", "--quiet", "--device", "t4", "--offline-data", "--json", "out.json", "train.py"]) == 0
    record = json.loads(Path("out.json").read_text())
    notes = "\n".join(record["assumptions"])
    assert "the tokenizer of 'gpt2': not on this machine" in notes
    assert (
        "load_dataset('wikitext'): not on this machine; 512 rows were generated, with the columns text"
        in notes
    )
    assert record["steps"] == 2
    # Texts are longer than the 96 tokens to which they are cut: the logits of 4 of them are at the peak.
    assert record["categories"]["activations"] >= 4 * 95 * 128 * 4


def test_data_that_is_not_here_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "train.py").write_text("from datasets import load_dataset\nload_dataset('imdb')\n")
    assert main(["run", "--quiet", "train.py"]) == 1
    error = capsys.readouterr().err
    assert (
        "load_dataset('imdb'): the data set is not on this machine, and a rehearsal downloads nothing"
        in error
    )
    assert "--online" in error and "generate rows with --offline-data" in error


@pytest.mark.parametrize(
    ("name", "columns", "classes"),
    [
        ("cifar10", ["img", "label"], 10),
        ("stanfordnlp/imdb", ["text", "label", "label_text"], 2),
        ("tatsu-lab/alpaca", ["instruction", "input", "output", "text"], None),
    ],
)
def test_kinds_of_data(name: str, columns: list[str], classes: int | None) -> None:
    datasets = pytest.importorskip("datasets")
    made = make_data(name, split="train")
    assert made.column_names == columns
    if classes is not None:
        assert made.features["label"].num_classes == classes
    assert isinstance(make_data(name, is_streamed=True), datasets.IterableDatasetDict)


def test_every_data_set_of_the_table_can_be_made() -> None:
    """Fifty data sets: each column has a kind that is known, and its own splits."""
    rows = read_toml(TABLE)["data_set"]
    assert len(rows) >= 50
    for row in rows:
        assert {column: make_value(kind, 3) for column, kind in row["columns"].items()}
    made = make_data("glue", "mnli")
    assert list(made) == [
        "train",
        "validation_matched",
        "validation_mismatched",
        "test_matched",
        "test_mismatched",
    ]
    assert made["train"].features["label"].names == ["entailment", "neutral", "contradiction"]
    assert make_data("conll2003", split="train").features["ner_tags"].feature.names[1] == "B-PER"


MORE_ROWS = """from datasets import load_dataset
data = load_dataset("imdb", split="train").select(range(10_000))
assert len(data) == 10_000, len(data)
import evaluate
print("score", evaluate.load("accuracy").compute(predictions=[0], references=[0])["accuracy"])
"""


def test_scripts_may_select_more_rows_than_were_made_up(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("datasets")
    (folder / "train.py").write_text(
        MORE_ROWS if importlib.util.find_spec("evaluate") else MORE_ROWS.split("import evaluate")[0]
    )
    assert main(["run", "--quiet", "--offline-data", "train.py"]) == 0, capsys.readouterr().err


def test_public_models_have_the_parameters_that_they_are_known_for() -> None:
    """Counts that the models' authors state, in millions."""
    transformers = pytest.importorskip("transformers")
    known = {
        "openai-community/gpt2": 124.4, "gpt2-xl": 1557.6, "google-bert/bert-base-cased": 108.3,
        "Qwen/Qwen2-0.5B-Instruct": 494.0, "meta-llama/Llama-3.2-1B": 1235.8, "mistralai/Mistral-7B-v0.1": 7241.7,
        "EleutherAI/pythia-160m": 162.3, "facebook/opt-125m": 125.2, "google-t5/t5-small": 60.5, "google/gemma-2b": 2506.2,
        "HuggingFaceTB/SmolLM2-135M": 134.5, "Qwen/Qwen3-0.6B": 596.0, "google-t5/t5-base": 222.9,
        "xlnet/xlnet-base-cased": 116.7, "Qwen/Qwen2.5-14B-Instruct": 14770.0, "tiiuae/falcon-7b": 6921.7,
        "microsoft/Phi-3-mini-4k-instruct": 3821.1, "EleutherAI/gpt-neo-1.3B": 1315.6, "meta-llama/Llama-2-70b-hf": 68976.6,
        "facebook/nllb-200-distilled-600M": 615.1, "sentence-transformers/LaBSE": 470.9, "facebook/dinov2-base": 86.6,
    }  # fmt: skip
    auto = {
        "bert": transformers.AutoModel, "t5": transformers.AutoModelForSeq2SeqLM, "dinov2": transformers.AutoModel,
        "m2m_100": transformers.AutoModelForSeq2SeqLM,
    }  # fmt: skip
    for name, millions in known.items():
        fields = find_configuration(name)
        assert fields is not None, name
        model_type = fields.pop("model_type")
        config = transformers.AutoConfig.for_model(model_type, **fields)
        with FakeTensorMode():
            model = auto.get(model_type, transformers.AutoModelForCausalLM).from_config(config)
        count = sum(parameter.numel() for parameter in model.parameters()) / 1e6
        assert count == pytest.approx(millions, rel=2e-3), name
    assert find_configuration("somebody/their-own-model") is None


def test_made_up_tokenizers_are_as_large_as_the_vocabulary(tmp_path: Path) -> None:
    """Programs resize embeddings to `len(tokenizer)`: a smaller one would make the model smaller, too."""
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "vocab_size": 400}')
    sizes = {"gpt2": 50257, "Qwen/Qwen2-0.5B": 151936, str(tmp_path): 400, "somebody/their-own-model": 32000}
    assert {name: len(make_tokenizer(name)) for name in sizes} == sizes
    assert max(make_tokenizer("gpt2")("a long time ago in a land of rivers")["input_ids"]) < 100


# quantised weights

QLORA = """import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

config = BitsAndBytesConfig(BITS)
model = AutoModelForCausalLM.from_pretrained("tiny", quantization_config=config, device_map={"": 0})
print(type(model.model.layers[0].mlp.up_proj).__name__, tuple(model.model.layers[0].mlp.up_proj.weight.shape))
model = get_peft_model(prepare_model_for_kbit_training(model), LoraConfig(r=8, target_modules="all-linear"))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
for step in range(3):
    ids = torch.randint(0, 128, (2, 32), device="cuda")
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
"""
FOUR_BITS = 'load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True'


@pytest.mark.parametrize(
    ("bits", "layer"), [(FOUR_BITS, "Linear4bit (4096, 1)"), ("load_in_8bit=True", "Linear8bitLt (128, 64)")]
)
def test_qlora(bits: str, layer: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("bitsandbytes")
    (folder / "qlora.py").write_text(QLORA.replace("BITS", bits))
    assert main(["run", "--device", "t4", "--json", "out.json", "qlora.py"]) == 0
    assert layer in capsys.readouterr().out
    record = json.loads(Path("out.json").read_text())
    assert record["steps"] == 2
    assert any("14 linear layers quantised by bitsandbytes" in note for note in record["assumptions"])


def test_quantisation_without_its_library_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "bitsandbytes" else find(name, *rest)
    )
    (folder / "tiny" / "config.json").write_text(
        json.dumps({**LLAMA, "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}})
    )
    script = "from transformers import AutoModelForCausalLM\nAutoModelForCausalLM.from_pretrained('tiny')\n"
    (folder / "quantised.py").write_text(script)
    assert main(["run", "--quiet", "quantised.py"]) == 1
    assert "its weights are quantised by bitsandbytes, which is not installed" in capsys.readouterr().err
    (folder / "tiny" / "config.json").write_text(
        json.dumps({**LLAMA, "quantization_config": {"quant_method": "gptq", "bits": 4}})
    )
    assert main(["run", "--quiet", "quantised.py"]) == 1
    assert (
        "weights quantised by 'gptq' are not rehearsed; bitsandbytes (4 and 8 bits) is"
        in capsys.readouterr().err
    )


LOADS = """
import sys
from transformers import AutoModelForCausalLM
model, info = AutoModelForCausalLM.from_pretrained("tiny", output_loading_info=True, **eval(sys.argv[1]))
assert [info["missing_keys"], info["unexpected_keys"], len(info["mismatched_keys"])] == eval(sys.argv[2])
"""


def save_weights(changes: dict[str, Any]) -> None:
    """Beside the configuration, as `save_pretrained` does."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**{**LLAMA, "vocab_size": 64}))  # type: ignore[arg-type]
    tensors = {key: tensor for key, tensor in model.state_dict().items() if key != "lm_head.weight"}
    tensors["model.embed_tokens.weight"] = torch.empty(128, 64)
    save_file({**tensors, **changes}, "tiny/model.safetensors", {"format": "pt"})
    Path("load.py").write_text(LOADS)


def test_weights_are_compared_with_the_configuration() -> None:
    pytest.importorskip("transformers")
    import torch

    save_weights({"model.other": torch.empty(3)})
    found = rehearse(
        str(Path("load.py").absolute()), "{}", "[[], ['model.other'], 0]"
    )  # the head is the embedding
    assert any("tensors missing in the weights: 0, unexpected: 1" in note for note in found["assumptions"])


def test_weights_of_other_shapes_are_refused(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    import torch

    save_weights({"model.norm.weight": torch.empty(32)})
    rehearse(str(Path("load.py").absolute()), "{}", "[]", code=1)
    refused = "size mismatch for model.norm.weight: its weights have (32,), its configuration makes (64,)"
    assert refused in capfd.readouterr().err
    rehearse(str(Path("load.py").absolute()), "{'ignore_mismatched_sizes': True}", "[[], [], 1]")


# programs without an optimizer

BY_HAND = """import itertools, torch
model = torch.nn.Linear(4, 1)
for step in itertools.count(1):
    print("step", step)
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    for parameter in model.parameters():
        parameter.data.add_(parameter.grad, alpha=-0.1)
    model.zero_grad()
    print("updated", step)
    if loss.item() < 0:
        break
"""


def test_updates_by_hand_end_after_so_many_backward_passes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "train.py").write_text(BY_HAND)
    assert main(["run", "--steps", "3", "--json", "out.json", "train.py"]) == 0
    said = capsys.readouterr().out
    assert "updated 3\nstep 4\n" in said and "updated 4" not in said
    assert json.loads(Path("out.json").read_text())["steps"] == 3


def test_made_up_objects_in_pictures() -> None:
    """Detection data sets have boxes and categories by name, in the form of current releases of `datasets`."""
    pytest.importorskip("datasets")
    made = make_data("cppe-5", split="train")
    assert made.features["objects"]["category"].feature.names[:2] == ["Coverall", "Face_Shield"]
    objects = made[0]["objects"]
    assert {len(objects[key]) for key in ("id", "area", "bbox", "category")} == {7}
    assert all(x + w <= 640 and y + h <= 480 for x, y, w, h in objects["bbox"])


def test_data_sets_of_pictures_have_their_own_columns() -> None:
    """A column that the public data set does not have can be joined to itself, which is an error."""
    pytest.importorskip("datasets")
    names = ("lambdalabs/naruto-blip-captions", "fusing/fill50k", "huggan/flowers-102-categories")
    assert [make_data(name, split="train").column_names for name in names] == [
        ["image", "text"], ["image", "conditioning_image", "text"], ["image"]
    ]  # fmt: skip


DTYPES = """import sys, torch, transformers
transformers.__version__ = sys.argv[1]
model = transformers.AutoModelForCausalLM.from_pretrained("tiny", **eval(sys.argv[2]))
assert model.dtype == model.config.dtype == getattr(torch, sys.argv[3]), model.dtype
"""


@pytest.mark.parametrize(
    "release, options, dtype",
    [
        ("5.0.0", "{}", "bfloat16"),
        ("5.0.0", "{'torch_dtype': None}", "bfloat16"),
        ("4.57.1", "{}", "float32"),
        ("4.57.1", "{'torch_dtype': 'auto'}", "bfloat16"),
        ("4.57.1", "{'dtype': 'float16', 'torch_dtype': None}", "float16"),
    ],
)
def test_the_dtype_of_weights_is_that_of_the_release(
    release: str, options: str, dtype: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(transformers, "__version__", transformers.__version__)
    (folder / "tiny" / "config.json").write_text(json.dumps({**LLAMA, "torch_dtype": "bfloat16"}))
    (folder / "load.py").write_text(DTYPES)
    assert main(["run", "--quiet", "load.py", release, options, dtype]) == 0
