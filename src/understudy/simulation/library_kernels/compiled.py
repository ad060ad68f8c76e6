"""The operators of torchvision and torchaudio, where their compiled library does not load: it was built for CUDA, or for
another torch.

torchvision registers in Python what its operators return, and their gradients; only the schemas are in the library.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from understudy.ops.registry import rule
from understudy.patching import REHEARSAL, patch_call
from understudy.simulation.run_notes import add_note
from understudy.spec import TensorSpec

POOLED = "float spatial_scale, SymInt pooled_height, SymInt pooled_width"
SIZES = "SymInt batch_size, SymInt channels, SymInt height, SymInt width"
DEFORMED = (
    "Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, "
    "SymInt stride_h, SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, "
    "SymInt groups, SymInt offset_groups, bool use_mask"
)
VISION = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "box_iou_rotated(Tensor boxes1, Tensor boxes2) -> Tensor",
    f"roi_align(Tensor input, Tensor rois, {POOLED}, int sampling_ratio, bool aligned) -> Tensor",
    f"_roi_align_backward(Tensor grad, Tensor rois, {POOLED}, {SIZES}, int sampling_ratio, bool aligned) -> Tensor",
    "qroi_align(Tensor input, Tensor rois, float input_scale, int input_zero_point, float rois_scale, "
    f"int rois_zero_point, {POOLED}, int sampling_ratio, bool aligned) -> Tensor",
    f"ps_roi_align(Tensor input, Tensor rois, {POOLED}, int sampling_ratio) -> (Tensor, Tensor)",
    f"_ps_roi_align_backward(Tensor grad, Tensor rois, Tensor channel_mapping, {POOLED}, int sampling_ratio, {SIZES}) "
    "-> Tensor",
    f"roi_pool(Tensor input, Tensor rois, {POOLED}) -> (Tensor, Tensor)",
    f"_roi_pool_backward(Tensor grad, Tensor rois, Tensor argmax, {POOLED}, {SIZES}) -> Tensor",
    f"ps_roi_pool(Tensor input, Tensor rois, {POOLED}) -> (Tensor, Tensor)",
    f"_ps_roi_pool_backward(Tensor grad, Tensor rois, Tensor channel_mapping, {POOLED}, {SIZES}) -> Tensor",
    f"deform_conv2d({DEFORMED}) -> Tensor",
    f"_deform_conv2d_backward(Tensor grad, {DEFORMED}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


AUDIO = (
    "forced_align(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank) "
    "-> (Tensor, Tensor)",
    "rnnt_loss_forward(Tensor logits, Tensor targets, Tensor logit_lengths, Tensor target_lengths, int blank, "
    "float clamp, bool fused_log_softmax) -> (Tensor, Tensor)",
    "_lfilter_core_loop(Tensor signal, Tensor a_coeffs, Tensor(a!) output) -> Tensor(a!)",
    "_overdrive_core_loop(Tensor waveform, Tensor temp, Tensor(a!) last_in, Tensor(b!) last_out, Tensor(c!) output) "
    "-> (Tensor(a!), Tensor(b!), Tensor(c!))",
)


@dataclass(frozen=True)
class CompiledLibrary:
    package: str
    schemas: Mapping[str, tuple[str, ...]]
    """By namespace."""
    questions: Mapping[str, object]
    """Operators that return how it was built, and their answers: as in its build for CPUs."""


TORCHVISION = CompiledLibrary(
    "torchvision", {"torchvision": (*VISION, "_cuda_version() -> int")}, {"torchvision::_cuda_version": -1}
)
TORCHAUDIO = CompiledLibrary(
    "torchaudio",
    {
        "torchaudio": AUDIO,
        "_torchaudio": (
            "cuda_version() -> int?",
            "is_align_available() -> bool",
            "is_rir_available() -> bool",
        ),
    },
    {
        "_torchaudio::cuda_version": None,
        "_torchaudio::is_align_available": True,
        "_torchaudio::is_rir_available": False,
    },
)
LIBRARIES = {
    "_C": TORCHVISION,
    "_C_stable": TORCHVISION,
    "_torchaudio": TORCHAUDIO,
    "libtorchaudio": TORCHAUDIO,
}
"""By the name of the file, which differs by release."""


@rule("torchaudio::rnnt_loss_forward")
def rnnt_loss_forward(
    logits: TensorSpec, targets: TensorSpec, logit_lengths: TensorSpec, target_lengths: TensorSpec, blank: int,
    clamp: float, fused_log_softmax: bool,
) -> tuple[TensorSpec, TensorSpec]:  # fmt: skip
    """A loss for each sequence, and the gradient of the logits."""
    return logits.like((logits.shape[0],)), logits.like(logits.shape)


@rule("torchaudio::forced_align")
def forced_align(
    log_probs: TensorSpec,
    targets: TensorSpec,
    input_lengths: TensorSpec,
    target_lengths: TensorSpec,
    blank: int,
) -> tuple[TensorSpec, TensorSpec]:
    """A token for each frame, and its score."""
    return targets.like(log_probs.shape[:2]), log_probs.like(log_probs.shape[:2])


@functools.cache
def define_operators(package: str) -> list[torch.library.Library]:
    """Once in a process; operators go with their library. Those that the program has defined itself stay."""
    found = next(library for library in LIBRARIES.values() if library.package == package)
    libraries = []
    for namespace, schemas in found.schemas.items():
        library = torch.library.Library(namespace, "FRAGMENT")
        for schema in schemas:
            operator = schema.partition("(")[0]
            if hasattr(getattr(torch.ops, namespace), operator):
                continue
            library.define(schema)
            name = f"{namespace}::{operator}"
            if name in found.questions:
                library.impl(name, partial(_give, found.questions[name]), "CompositeExplicitAutograd")
        libraries.append(library)
    return libraries


def _give(answer: object) -> object:
    return answer


@patch_call("torch._ops._Ops.load_library", during=REHEARSAL)
def do_without_library(original: Callable[..., object], self: object, path: Any) -> object:
    """A rehearsal runs no kernel, so that schemas are sufficient."""
    try:
        return original(self, path)
    except OSError:
        file = Path(path)
        library = LIBRARIES.get(file.name.partition(".")[0])
        if library is None or library.package not in file.parts:
            raise
        define_operators(library.package)
        add_note(
            f"the compiled library of {library.package} does not load with this torch: its operators only computed shapes"
        )
        return None
