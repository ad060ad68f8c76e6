"""Weights, data and words that are not on this machine: not needed, made up, or named in the error."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from understudy import FakeTensorMode
from understudy.cli import main
from understudy.simulation.absent_weights import AbsentWeights
from understudy.simulation.offline.data_sets import find_data_set, make_data
from understudy.simulation.offline.graphs import CITATIONS, COLLECTIONS, make_graph, make_graphs
from understudy.simulation.offline.open_columns import find_kind
from understudy.simulation.offline.pipelines import find_part
from understudy.simulation.offline.tokenizers import find_text_length, list_inputs
from understudy.simulation.scripts import Script, run_script


def test_the_hub_is_offline_though_it_was_imported_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It reads its switch at import; each request would be tried again for half a minute."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    script = tmp_path / "script.py"
    script.write_text("from huggingface_hub import constants\nprint(constants.is_offline_mode())\n")
    with FakeTensorMode(answers="plausible", allow_non_fake_inputs=True) as mode:
        run_script(Script(str(script)), mode=mode)
    assert capsys.readouterr().out == "True\n"
    assert constants.HF_HUB_OFFLINE is False


@pytest.fixture
def rehearse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a text as a script, beside packages that have the places of real ones: exit code, output, errors, notes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))

    def run(text: str, *options: str, **packages: str) -> tuple[int, str, str, str]:
        roots = {path.partition("__")[0] for path in packages}
        for name in [name for name in sys.modules if name.partition(".")[0] in roots]:
            monkeypatch.delitem(sys.modules, name)
        for path, source in packages.items():
            file = tmp_path / f"{path.replace('__', '/')}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            (file.parent / "__init__.py").touch()
            file.write_text(source)
        Path("train.py").write_text(text)
        code = main(["run", "--device", "t4", "--json", "out.json", *options, "train.py"])
        for name in [name for name in sys.modules if name.partition(".")[0] in roots]:
            del sys.modules[name]
        said = capsys.readouterr()
        notes = json.loads(Path("out.json").read_text())["assumptions"] if Path("out.json").exists() else []
        return code, said.out, said.err, "\n".join(notes)

    return run


# --- weights

STEP = "model(torch.ones(2, 4, device='cuda')).sum().backward()\n"
DOWNLOAD = """import torch
state = torch.hub.load_state_dict_from_url("https://example.org/weights/resnet18.pth")
model = torch.nn.Linear(4, 4).cuda()
print(model.load_state_dict(state))
model.load_state_dict({key.removeprefix("module."): value for key, value in state["model"].items()})
"""


def test_weights_that_would_be_downloaded_are_not_needed(rehearse: Any) -> None:
    code, out, err, notes = rehearse(DOWNLOAD + STEP)
    assert code == 0, err
    assert "<All keys matched successfully>\n" in out
    assert "weights not on this machine, and not needed: resnet18.pth" in notes


def test_a_checkpoint_that_holds_options_is_needed(rehearse: Any) -> None:
    """`fairseq` and its like build the model from what the file holds."""
    code, _, err, _ = rehearse(DOWNLOAD + "torch.nn.Linear(state['cfg'].width, 4)\n")
    assert code == 1
    assert "resnet18.pth is not on this machine, and the program reads 'width' from it" in err
    assert "--online" in err and not hasattr(AbsentWeights(), "width")


@pytest.mark.parametrize("options", [(), ("--offline-data",)])
def test_a_download_that_is_refused_offers_what_is_left(rehearse: Any, options: tuple[str, ...]) -> None:
    _, _, err, _ = rehearse(
        "import urllib.request\nurllib.request.urlopen('http://example.org/a.zip')\n", *options
    )
    assert "train.py:2 requests http://example.org/a.zip" in err and "--online" in err
    assert ("or let data be made up with --offline-data" in err) == (not options)


def test_a_file_of_the_hub_is_named(rehearse: Any) -> None:
    """Programs catch the library's own class of error, to go on without the file."""
    text = """from huggingface_hub import hf_hub_download
from huggingface_hub.errors import LocalEntryNotFoundError
try:
    hf_hub_download("someone/weights", "a.json")
except LocalEntryNotFoundError:
    hf_hub_download("someone/weights", "config.json")
"""
    code, _, err, _ = rehearse(text)
    assert code == 1 and "HF_HUB_OFFLINE" not in err
    assert "train.py:6 requests config.json of 'someone/weights', which is not on this machine" in err
    assert "hf download someone/weights config.json" in err and "--online" in err


def test_weights_that_are_here_are_read_and_checked(rehearse: Any, tmp_path: Path) -> None:
    cache = tmp_path / "torch" / "hub" / "checkpoints"
    cache.mkdir(parents=True)
    torch.save({"weight": torch.ones(5, 4)}, cache / "resnet18.pth")
    code, _, err, _ = rehearse(DOWNLOAD + STEP)
    assert code == 1
    assert "size mismatch for weight" in err


def test_an_empty_state_is_an_error_where_nothing_is_absent(rehearse: Any) -> None:
    code, _, err, _ = rehearse("import torch\ntorch.nn.Linear(4, 4).load_state_dict({})\n")
    assert code == 1
    assert 'Missing key(s) in state_dict: "weight", "bias"' in err


def test_a_repository_of_torch_hub_that_is_not_here_is_named(rehearse: Any) -> None:
    text = "import torch\nprint('models', torch.hub.list('someone/models:main'))\n"
    code, _, err, _ = rehearse(text)
    assert code == 1
    assert (
        "torch.hub.list('someone/models:main'): the repository is not in the cache of torch.hub, and a rehearsal downloads "
        "nothing; clone https://github.com/someone/models and pass its folder with source='local', or allow the network "
        "with --online"
    ) in err
    assert rehearse(text, "--offline-data")[1].startswith("models []\n")
    code, _, err, _ = rehearse("import torch\ntorch.hub.load('someone/models', 'small')\n", "--offline-data")
    assert code == 1 and "torch.hub.load('someone/models'): the repository is not in" in err


TIMM = """def load_pretrained(model, pretrained_cfg=None):
    raise OSError("no network")
"""


def test_weights_of_timm_are_not_needed(rehearse: Any) -> None:
    text = "import torch\nfrom timm.models import _builder\nmodel = torch.nn.Linear(4, 4).cuda()\n"
    code, _, err, notes = rehearse(
        text + "_builder.load_pretrained(model)\n" + STEP, timm__models___builder=TIMM, timm__other=""
    )
    assert code == 0, err
    assert "weights not on this machine, and not needed: timm Linear" in notes


# --- words

NLTK = """def find(name):
    raise LookupError(name)
"""
TOKENIZE = """def sent_tokenize(text):
    raise LookupError("punkt")
"""


def test_data_of_nltk_is_made_up(rehearse: Any) -> None:
    text = (
        "import nltk.data, nltk.tokenize\n"
        "print(nltk.data.find('tokenizers/punkt'), nltk.tokenize.sent_tokenize('One two. Three.'))\n"
    )
    packages = {"nltk__data": NLTK, "nltk__tokenize": TOKENIZE}
    code, out, _, notes = rehearse(text, "--offline-data", **packages)
    assert out.startswith("tokenizers/punkt ['One two', 'Three.']\n")
    assert "nltk 'tokenizers/punkt': not on this machine" in notes
    code, _, err, _ = rehearse(text, **packages)
    assert code == 1 and "LookupError: tokenizers/punkt" in err


@pytest.mark.parametrize(
    ("name", "folder", "length"),
    [
        ("google-bert/bert-base-cased", None, 512),
        ("FacebookAI/roberta-base", None, 512),
        ("openai-community/gpt2", None, 1024),
        ("Qwen/Qwen2-0.5B", None, 1024),
        ("CompVis/stable-diffusion-v1-4", "tokenizer", 77),
        ("stabilityai/stable-diffusion-xl-base-1.0", "tokenizer_2", 77),
        ("somebody/their-own-model", None, 1024),
    ],
)
def test_made_up_tokenizers_cut_texts_to_what_the_model_takes(
    name: str, folder: str | None, length: int
) -> None:
    assert find_text_length(name, folder) == length


def test_made_up_tokenizers_give_what_the_model_takes() -> None:
    assert list_inputs("google-bert/bert-base-cased") == ["input_ids", "token_type_ids", "attention_mask"]
    assert list_inputs("distilbert-base-uncased") == ["input_ids", "attention_mask"]


# --- pictures

VISION = """class StandardTransform:
    def __init__(self, transform, target_transform):
        self.transform = transform
"""
DATASETS = """class MNIST:
    def __init__(self, root, train=True, transform=None, target_transform=None, download=False):
        raise RuntimeError("Dataset not found.")
    def __getitem__(self, index): ...
    def __len__(self): ...
"""
PICTURES = """import numpy
from torchvision.datasets import MNIST
train, test = MNIST("data"), MNIST("data", train=False)
print(len(train), len(test), tuple(train.data.shape), train[numpy.int64(7)][1], train[59_999][0].size)
"""


def test_pictures_are_as_many_as_in_the_real_data_set(rehearse: Any, tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    folder = tmp_path / "torchvision" / "datasets"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(DATASETS)
    _, out, err, _ = rehearse(
        PICTURES, "--offline-data", torchvision__datasets__vision=VISION, torchvision__other=""
    )
    assert out.startswith("60000 10000 (60000, 28, 28) 7 (28, 28)\n"), err


# --- rows


def test_rows_of_a_split_are_counted() -> None:
    pytest.importorskip("datasets")
    made = make_data("ILSVRC/imagenet-1k", split="train")
    assert made.info.splits["train"].num_examples == len(made) == 512
    assert len(make_data("financial_phrasebank", split="train")) == 2264
    splits = make_data("glue", "sst2")
    assert [len(splits[name]) for name in ("train", "validation")] == [512, 128]
    assert splits["train"].info.splits["validation"].num_examples == 128
    assert len(make_data("glue", "sst2", "validation")) == 512
    assert len(make_data("zeta-alpha-ai/NanoBEIR-en", "queries", "NanoMSMARCO")) == 50


READS_COLUMNS = """import torch
from datasets import load_dataset
splits = load_dataset("somebody/their-own-rows").map(lambda row: {"n": len(row["utterance"])}, remove_columns="title")
print({name: part.column_names for name, part in splits.items()}["test"])
data = load_dataset("somebody/their-own-rows")["train"]
print(data.column_names, data[0]["utterance"][:6], data[:2]["rating"], data["image_id"][:2], data.features["label"].names)
print("absent" in data[0], data[0].get("absent"), data.map(lambda row: {"absent": row.get("absent", 7)})["absent"][1])
print(data.filter(lambda row: len(row["language"]) > 100).num_rows)
data = data.map(lambda rows: {"ids": rows["input_ids"], "n": [len(t) for t in rows["title"]]}, batched=True)
data = data.rename_column("category", "labels").train_test_split(8, stratify_by_column="labels")["train"]
data = data.remove_columns(["missing"]).with_format("torch", columns=["ids", "emotion"])
print(data[0]["ids"].shape, data[0]["emotion"].shape)
for row in load_dataset("somebody/another", split="train", streaming=True).map(lambda row: {"seen": row["dialog"]}):
    print(row["seen"][0]["from"], type(row["photo"]).__name__)
    break
model = torch.nn.Linear(4, 2, device="cuda")
for row in data.select(range(3)):
    model(torch.ones(2, 4, device="cuda")).sum().backward()
"""
COLUMNS_READ = """['text', 'n']
['text'] a long [0.0, 0.1] [0, 1] ['class 0', 'class 1']
False None 7
512
torch.Size([1024]) torch.Size([])
human Image
"""


def test_columns_that_a_program_reads_are_generated_and_named(rehearse: Any) -> None:
    """By any way to read them; what a program can do without is not there."""
    pytest.importorskip("datasets")
    pytest.importorskip("PIL")
    code, out, err, notes = rehearse(READS_COLUMNS, "--offline-data")
    assert (code, out[: len(COLUMNS_READ)]) == (0, COLUMNS_READ), err
    assert "column 'utterance': not in the generated rows; generated as text" in notes
    assert "column 'label': not in the generated rows; generated as class" in notes
    assert "'absent'" not in notes
    assert "a filter of generated rows would have dropped all of them" in notes


def test_rows_that_are_here_have_no_generated_columns(rehearse: Any) -> None:
    pytest.importorskip("datasets")
    text = "from datasets import Dataset\ndata = Dataset.from_list([{'text': 'a'}])\ndata[0]['label']\n"
    code, _, err, _ = rehearse(text, "--offline-data")
    assert code == 1 and "KeyError: 'label'" in err


def test_the_longest_part_of_a_name_decides() -> None:
    assert find_data_set("trl-lib/ultrafeedback-prompt")["columns"].keys() >= {"prompt", "solution"}
    assert find_data_set("trl-lib/ultrafeedback_binarized")["columns"].keys() >= {"chosen", "rejected"}
    assert find_kind("image_id") == "int 1000000" and find_kind("my_image") == "image 512 512"


SOUND = """from datasets import Audio, load_dataset
data = load_dataset("superb", "ks", split="train")
print(data.map(lambda row: {"file": "a"}).features["audio"].sampling_rate)
data = data.cast_column("audio", Audio(sampling_rate=16_000))
print(data[0]["audio"]["sampling_rate"], data[0]["audio"]["array"].squeeze().shape)
print(data.map(lambda row: {"samples": len(row["audio"]["array"])}).select(range(2))["samples"][:])
"""


def test_sound_has_a_rate_and_is_not_encoded_again(rehearse: Any) -> None:
    pytest.importorskip("datasets")
    _, out, err, _ = rehearse(SOUND, "--offline-data")
    assert out.startswith("16000\n16000 (160000,)\n[160000, 160000]\n"), err


LABELS = """import json
from huggingface_hub import hf_hub_download
print(len(json.load(open(hf_hub_download("segments/sidewalk-semantic", "id2label.json", repo_type="dataset")))))
"""


def test_files_of_labels_are_made_up(tmp_path: Path) -> None:
    """In a process of its own: huggingface_hub reads its settings when it is imported."""
    pytest.importorskip("huggingface_hub")
    (tmp_path / "train.py").write_text(LABELS)
    words = [sys.executable, "-m", "understudy", "run", "--offline-data", "train.py"]
    ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert ended.stdout.startswith("150\n"), ended.stderr


# --- parts of pipelines


def test_parts_of_public_pipelines() -> None:
    """Counts of parameters that are known, in millions."""
    assert find_part("CompVis/stable-diffusion-v1-4", "unet") == {
        "sample_size": 64,
        "cross_attention_dim": 768,
    }
    assert find_part("stabilityai/sd-vae-ft-ema", None) == find_part("runwayml/stable-diffusion-v1-5", "vae")
    assert find_part("somebody/pipeline", "unet") is None
    diffusers = pytest.importorskip("diffusers")
    known = {
        ("CompVis/stable-diffusion-v1-4", "unet", "UNet2DConditionModel"): 859.52,
        ("stabilityai/stable-diffusion-2-1", "unet", "UNet2DConditionModel"): 865.91,
        ("stabilityai/stable-diffusion-xl-base-1.0", "unet", "UNet2DConditionModel"): 2567.46,
        ("runwayml/stable-diffusion-v1-5", "vae", "AutoencoderKL"): 83.65,
    }
    for (name, part, cls), millions in known.items():
        with FakeTensorMode():
            model = getattr(diffusers, cls).from_config(find_part(name, part))
        assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=1e-3), name


FAILING_DOWNLOAD = """from urllib.error import URLError
def load_data(path=None, num_words=None):
    raise Exception("URL fetch failure on https://data/mnist.npz: None -- a rehearsal is offline")
def fetch_openml(name, return_X_y=False):
    raise URLError("a rehearsal is offline")
"""
ARRAYS = """from keras.src.datasets.mnist import load_data
from keras.src.datasets.imdb import load_data as load_texts
from sklearn.datasets import fetch_openml
(x, y), (_, labels) = load_data()
(texts, _), _ = load_texts(num_words=50)
print(x.shape, x.dtype, y.max(), len(labels), len(texts), max(texts[0]), fetch_openml("mnist_784", return_X_y=True)[0].shape)
"""
LIBRARIES: dict[str, str] = {
    "keras__src__datasets__mnist": FAILING_DOWNLOAD,
    "keras__src__datasets__imdb": FAILING_DOWNLOAD,
    "sklearn__datasets": FAILING_DOWNLOAD,
}


def test_arrays_that_libraries_download_are_made_up(rehearse: Any) -> None:
    _, out, err, _ = rehearse(ARRAYS, "--offline-data", **LIBRARIES)
    assert out.startswith("(60000, 28, 28) uint8 9 10000 25000 49 (70000, 784)\n"), err


def test_arrays_that_libraries_download_are_named(rehearse: Any) -> None:
    code, _, err, _ = rehearse(ARRAYS, **LIBRARIES)
    assert code == 1
    assert (
        "keras.datasets.mnist: the data set is not on this machine, and a rehearsal downloads nothing" in err
    )
    assert "--online" in err and "--offline-data" in err


def test_graphs_have_the_sizes_of_the_public_ones() -> None:
    data = pytest.importorskip("torch_geometric.datasets")
    cora = data.Planetoid.__new__(data.Planetoid)
    make_graphs(cora, CITATIONS["cora"], {"name": "Cora"})
    assert (cora.num_features, cora.num_classes, cora[0].num_edges) == (1433, 7, 10556)
    assert int(cora[0].train_mask.sum()) == 140
    mutag = data.TUDataset.__new__(data.TUDataset)
    make_graphs(mutag, COLLECTIONS["mutag"], {"name": "MUTAG"})
    assert (len(mutag), mutag.num_classes, mutag[187].num_nodes) == (188, 2, 18)


def test_a_made_up_graph_has_nodes_edges_and_classes() -> None:
    """The same without the library."""
    made = make_graph(dict, CITATIONS["pubmed"], 0)
    assert made["x"].shape == (19717, 500) and made["edge_index"].shape == (2, 88648)
    assert made["edge_index"].max() < 19717 and made["y"].max() == 2
    assert [int(made[f"{part}_mask"].sum()) for part in ("train", "val", "test")] == [60, 500, 1000]
    assert make_graph(dict, COLLECTIONS["imdb-binary"], 3)["x"] is None


# --- pictures with other targets than a label

ANNOTATED = """
class VOCDetection:
    def __init__(self, root, year="2012", image_set="train", download=False, transforms=None):
        raise RuntimeError("Dataset not found.")
    def __getitem__(self, index): ...
    def __len__(self): ...

class VOCSegmentation(VOCDetection):
    pass

class CocoDetection:
    def __init__(self, root, annFile, transform=None, target_transform=None, transforms=None):
        raise FileNotFoundError(annFile)
    def _load_target(self, id):
        return self.coco.imgToAnns[id]
    def __getitem__(self, index): ...
    def __len__(self): ...
"""
COCO = """class COCO:
    def createIndex(self):
        self.imgToAnns = {}
        for annotation in self.dataset["annotations"]:
            self.imgToAnns.setdefault(annotation["image_id"], []).append(annotation)
"""
TARGETS = """
from torchvision.datasets import CocoDetection, VOCDetection, VOCSegmentation
boxes, masks = VOCDetection("data"), VOCSegmentation("data", image_set="val", transforms=lambda *pair: pair)
picture, target = boxes[3]
box = target["annotation"]["object"][1]["bndbox"]
print(len(boxes), picture.size, int(box["xmin"]) < int(box["xmax"]) <= picture.size[0])
picture, mask = masks[3]
print(len(masks), mask.size == picture.size, mask.mode)
objects = CocoDetection("data", "instances.json")
picture, found = objects[5]
print(len(objects), len(found), found[0]["image_id"], all(x + w <= 640 for x, _, w, _ in [o["bbox"] for o in found]))
"""


def test_pictures_have_the_targets_of_their_data_set(rehearse: Any, tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    folder = tmp_path / "torchvision" / "datasets"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(ANNOTATED)
    _, out, err, _ = rehearse(
        TARGETS,
        "--offline-data",
        torchvision__datasets__vision=VISION,
        torchvision__other="",
        pycocotools__coco=COCO,
    )
    assert out.startswith("5717 (500, 375) True\n1449 True L\n512 7 5 True\n"), err


# --- tiktoken

TIKTOKEN = """
class Encoding:
    def __init__(self, name, *, pat_str, mergeable_ranks, special_tokens):
        self.n_vocab = len(mergeable_ranks) + len(special_tokens)
        self.eot_token = special_tokens["<|endoftext|>"]
    def encode_to_numpy(self, text): return self.encode(text)

def get_encoding(name):
    raise OSError("no network")

encoding_for_model = get_encoding
"""


def test_a_made_up_encoding_has_all_methods_of_tiktoken(rehearse: Any, tmp_path: Path) -> None:
    (tmp_path / "tiktoken").mkdir()
    (tmp_path / "tiktoken" / "__init__.py").write_text(TIKTOKEN)
    text = """import tiktoken
made = tiktoken.get_encoding("gpt2")
print(isinstance(made, tiktoken.Encoding), made.n_vocab, made.eot_token, len(made.encode_to_numpy("three short words")))
"""
    _, out, err, _ = rehearse(text, "--offline-data", tiktoken__other="")
    assert out.startswith("True 50257 50256 3\n"), err


# --- other downloads


def test_the_error_of_a_download_names_the_file_the_line_and_three_ways_out(rehearse: Any) -> None:
    code, _, err, _ = rehearse(
        'import urllib.request\nurllib.request.urlopen("https://example.org/data.zip")\n'
    )
    assert code == 1
    assert (
        "a rehearsal is offline, and train.py:2 requests https://example.org/data.zip: save it where the program looks "
        "for it first, allow the network with --online, or let data be made up with --offline-data" in err
    )


def test_tensorboardx_finds_tensors(rehearse: Any) -> None:
    package = "def make_np(x):\n    assert type(x).__module__ == 'numpy', type(x)\n    return x\n"
    text = "import torch\nfrom tensorboardX import x2num\nprint(x2num.make_np(torch.ones(3, requires_grad=True)).shape)\n"
    _, out, err, _ = rehearse(text, tensorboardX__x2num=package)
    assert out.startswith("(3,)\n"), err
