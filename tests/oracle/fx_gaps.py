"""What `make_fx` is known not to capture as eager runs it, each with its reason.

`GAPS` is checked in both directions: a failure that is not listed fails the test, and so does a listed gap that no longer
occurs. What torch's own make_fx captures, ours has to: a gap that torch does not have is marked, with what torch does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Gap(NamedTuple):
    reason: str
    modes: Mapping[str, int]
    "By tracing mode: the number of the first sample that shows it. A short sweep may not come so far."
    torch_does: str = ""
    "What torch does, where it does not fail on the same samples."
    only_rounds: bool = False
    "Whether it is a matter of rounding: then it depends on the machine whether it shows, and nothing else is excused."


def everywhere(sample: int = 0) -> dict[str, int]:
    return {"real": sample, "fake": sample, "symbolic": sample}


def for_real(sample: int = 0) -> dict[str, int]:
    return {"real": sample}


def on_stand_ins(sample: int = 0) -> dict[str, int]:
    return {"fake": sample, "symbolic": sample}


_OTHER_PATH = (
    "C++ asks whether a tensor is of a subclass, or any dispatch mode is active, and then computes by other operators: "
    "the recorded ones give the same up to rounding, some with other strides"
)
_WHOLE_SLICE = (
    "a slice that takes all is none in eager, and other strides make another order of summation: rounding"
)
_MARKS_OUT = "eager and a run below a mode differ in whether they bump the version of out= or resize it past the dispatcher"
_BY_VALUES = "decides by values, and a graph has one path only"
_SECTIONS = "the number of sections may be given as a tensor: how many results there are lies in the data"
_CHECKS_WEIGHTS = "checks values on the way: with weights always, for real without them as well"
_CHECKS_WINDOW = "checks that the window adds up to something other than zero"
_INTERPOLATES = (
    "with symbolic sizes the graph has torch's decomposition, which rounds otherwise than the kernel"
)
_LEAST_SQUARES = Gap(
    "drivers gelss and gelsd have residuals only where the matrix has full rank; with symbolic sizes gels is refused, as the "
    "gradient's C++ counts its residuals with plain integers",
    {"fake": 8, "symbolic": 2},
)
_NONZEROS = "stores as many elements as there are other than zero, and a stand-in of a sparse layout has a fixed number"

BOTH = ("function", "backward")
OUTS = ("out", "out_resized")
_DECOMPOSED = (
    "symbolic mode records torch's decomposition, which rounds otherwise than the kernels of some processors"
)


def _of(op: str, variants: tuple[str, ...], gap: Gap) -> dict[tuple[str, str], Gap]:
    return {(op, variant): gap for variant in variants}


def _rounds(modes: Mapping[str, int], reason: str = _OTHER_PATH) -> Gap:
    return Gap(reason, modes, only_rounds=True)


# (operator, variant) → gap
GAPS: dict[tuple[str, str], Gap] = {
    ("allclose", "function"): Gap(_BY_VALUES, everywhere()),
    ("equal", "function"): Gap(_BY_VALUES, everywhere()),
    ("item", "function"): Gap("reads a value, which the graph would hold fixed", for_real()),
    **_of("corrcoef", BOTH, Gap(_CHECKS_WEIGHTS, for_real())),
    **_of("cov", BOTH, Gap(_CHECKS_WEIGHTS, {"real": 0, "fake": 2, "symbolic": 2})),
    **_of("istft", BOTH, Gap(_CHECKS_WINDOW, {"real": 0, "fake": 7})),
    **_of("_foreach_add", ("function", "inplace"), Gap("a number that is given as a tensor is read on the way to C++", for_real(6))),
    **_of("narrow", BOTH, Gap("the start may be given as a tensor, which is read", for_real(1))),
    **_of("nn.functional.gaussian_nll_loss", BOTH, Gap("checks that no variance is negative", everywhere())),
    ("nn.functional.one_hot", "function"): Gap("as wide as the largest class, which is read", for_real()),
    **_of("linalg.lstsq", (*BOTH, *OUTS), _LEAST_SQUARES),
    **_of("linalg.lstsq.grad_oriented", BOTH, _LEAST_SQUARES),
    **_of("masked_select", OUTS, Gap("the size of out= lies in the data", on_stand_ins())),
    **_of("nonzero", OUTS, Gap("the size of out= lies in the data", on_stand_ins())),
    **_of("to_sparse", BOTH, Gap(
        _NONZEROS, on_stand_ins(),
        torch_does="takes the number for that of a tensor of zeros, in fake mode: what follows is wrong if it asks",
    )),
    ("tensor_split", "function"): Gap(_SECTIONS, {"real": 1, "fake": 0}),
    ("tensor_split", "backward"): Gap(
        _SECTIONS, {"real": 1, "fake": 0, "symbolic": 1},
        torch_does="takes the number for 1, with symbolic sizes: wrong for any other",
    ),
    ("kron", "out_resized"): Gap(_MARKS_OUT, everywhere()),
    **_of("linalg.cond", ("function", *OUTS), _rounds(everywhere())),
    **_of("norm.nuc", ("function", *OUTS), _rounds(everywhere())),
    **_of("linalg.matrix_norm", ("function", *OUTS), _rounds(everywhere(24))),
    **_of("linalg.norm", ("function", *OUTS), _rounds(everywhere(44))),
    **_of("nn.functional.interpolate.linear", BOTH, _rounds({"symbolic": 0}, _DECOMPOSED)),
    **_of("nn.functional.interpolate.bilinear", BOTH, _rounds({"symbolic": 0}, _DECOMPOSED)),
    **_of("nn.functional.interpolate.trilinear", BOTH, _rounds({"symbolic": 0}, _DECOMPOSED)),
    **_of("nn.functional.interpolate.bicubic", BOTH, _rounds({"symbolic": 0}, _DECOMPOSED)),
    **_of("nn.functional.upsample_bilinear", BOTH, _rounds({"symbolic": 0}, _DECOMPOSED)),
    ("linalg.svdvals", "function"): _rounds(everywhere()),
    ("linalg.eigvalsh", "function"): _rounds(everywhere()),
    ("ormqr", "backward"): Gap(_OTHER_PATH, everywhere()),
    ("prod", "backward"): Gap(_OTHER_PATH, everywhere(10)),
    ("masked.prod", "backward"): _rounds({"real": 16, "fake": 16, "symbolic": 8}),
    **{
        (f"nn.functional.{name}", variant): _rounds({"symbolic": 0}, _INTERPOLATES)
        for name in ("upsample_bilinear", *(f"interpolate.{kind}" for kind in ("linear", "bilinear", "trilinear", "bicubic")))
        for variant in BOTH
    },
    ("svd", "backward"): _rounds({"symbolic": 44}, _WHOLE_SLICE),
    ("linalg.svd", "backward"): _rounds({"symbolic": 43}, _WHOLE_SLICE),
}  # fmt: skip


def gap_for(op: str, variant: str, mode: str, outcome: str) -> Gap | None:
    gap = GAPS.get((op, variant))
    if gap is None or mode not in gap.modes or (gap.only_rounds and outcome != "rounded"):
        return None
    return gap


def samples_with_gaps(op: str) -> frozenset[int]:
    """The samples by which an operator's gaps are known."""
    return frozenset(sample for (name, _), gap in GAPS.items() if name == op for sample in gap.modes.values())
