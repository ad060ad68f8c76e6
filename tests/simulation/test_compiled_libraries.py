"""Packages whose compiled library was built for another torch: their Python runs, their operators go by shapes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from understudy.cli import main

VISION = """
import torch

torch.ops.load_library(__file__.replace("__init__.py", "_C.so"))
assert torch.ops.torchvision._cuda_version() == -1

@torch.library.register_fake("torchvision::nms")
def nms(dets, scores, iou_threshold):
    return dets.new_empty(torch.library.get_ctx().create_unbacked_symint(), dtype=torch.long)

@torch.library.register_fake("torchvision::roi_align")
def roi_align(input, rois, spatial_scale, pooled_height, pooled_width, sampling_ratio, aligned):
    return input.new_empty(rois.size(0), input.size(1), pooled_height, pooled_width)
"""
AUDIO = """
import torch

torch.ops.load_library(__file__.replace("__init__.py", "lib/_torchaudio.abi3.so"))
assert torch.ops._torchaudio.cuda_version() is None
"""
TRAIN = """
import torch, torchaudio, torchvision

boxes = torch.rand(100, 4, device="cuda")
keep = torch.ops.torchvision.nms(boxes, boxes[:, 0], 0.5)
crops = torch.ops.torchvision.roi_align(torch.rand(1, 8, 32, 32, device="cuda"), boxes[keep], 1.0, 7, 7, 2, True)
assert crops.shape == (100, 8, 7, 7), crops.shape
logits = torch.randn(2, 10, 5, 20, device="cuda")
lengths = torch.tensor([10, 10], device="cuda", dtype=torch.int32)
costs, gradients = torch.ops.torchaudio.rnnt_loss_forward(logits, lengths[:, None], lengths, lengths, 0, -1.0, True)
crops.flatten(1) @ torch.rand(392, 4, device="cuda")
assert costs.shape == (2,) and gradients.shape == logits.shape
assert torch.ops.torchaudio._lfilter_core_loop(logits, logits, costs) is costs
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    before = {*sys.modules}
    for name, text, library in (
        ("torchvision", VISION, "_C.so"),
        ("torchaudio", AUDIO, "lib/_torchaudio.abi3.so"),
    ):
        file = tmp_path / name / library
        file.parent.mkdir(parents=True)
        file.write_bytes(b"not for this torch")
        (tmp_path / name / "__init__.py").write_text(text)
    yield tmp_path
    for name in {*sys.modules} - before:
        if name.partition(".")[0] in ("torchvision", "torchaudio"):
            del sys.modules[name]  # later tests would find these


def rehearse(folder: Path, script: str) -> tuple[int, dict[str, Any]]:
    (folder / "train.py").write_text(script)
    code = main(["run", "--device", "t4", "--json", "out.json", "train.py"])
    return code, json.loads((folder / "out.json").read_text())


def test_operators_go_by_their_shapes(folder: Path) -> None:
    code, report = rehearse(folder, TRAIN)
    assert code == 0
    note = "the compiled library of {} does not load with this torch: its operators only computed shapes"
    assert {note.format("torchvision"), note.format("torchaudio")} <= set(report["assumptions"])
    assert any(answer["read"] == "nms" and answer["answer"] == 100 for answer in report["answers"])


def test_the_stable_library_of_newer_torchvision(folder: Path) -> None:
    """In newer releases the file is named after torch's stable interface."""
    package = folder / "torchvision"
    (package / "_C.so").rename(package / "_C_stable.so")
    (package / "__init__.py").write_text(VISION.replace("_C.so", "_C_stable.so"))
    code, report = rehearse(folder, TRAIN)
    assert code == 0
    assert any(answer["read"] == "nms" for answer in report["answers"])


def test_other_libraries_have_to_load(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "own.so").write_bytes(b"")
    code, _ = rehearse(folder, "import torch, os\ntorch.ops.load_library(os.path.abspath('own.so'))\n")
    assert code == 1
    assert "OSError: Could not load this library" in capsys.readouterr().err


def test_operators_that_the_program_has_defined_stay(folder: Path) -> None:
    own = "import torch\nown = torch.library.Library('torchaudio', 'FRAGMENT')\n"
    declare = "if not hasattr(torch.ops.torchaudio, 'forced_align'): own.define('forced_align(Tensor a) -> Tensor')\n"
    (folder / "own.py").write_text(own + declare + TRAIN)
    command = [sys.executable, "-m", "understudy", "run", "--device", "t4", "own.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
