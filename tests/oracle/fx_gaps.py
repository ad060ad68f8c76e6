"""What `make_fx` is known not to capture as eager runs it, each with its reason.

`GAPS` is checked in both directions: a failure that is not listed fails the test, and so does a listed gap that no longer
occurs. What torch's own make_fx captures, ours has to: a gap that torch does not have is marked, with what torch does.
"""

from __future__ import annotations

from typing import NamedTuple


class Gap(NamedTuple):
    reason: str
    modes: tuple[str, ...] = ("real", "fake", "symbolic")
    sample: int = 0
    "The number of the first sample that shows it: a short sweep may not come so far."
    torch_does: str = ""
    "What torch does, where it does not fail on the same samples."


REAL = ("real",)
STAND_INS = ("fake", "symbolic")

_OTHER_PATH = (
    "C++ asks whether a tensor is of a subclass, or any dispatch mode is active, and then computes by other operators: "
    "the recorded ones give the same up to rounding"
)
_MARKS_OUT = "C++ writes to out= past the dispatcher in eager, by an operator that resizes or bumps the version below a mode"
_UNFILLED = "C++ leaves a resized out= without values in eager, below a mode it fills it"
_BY_VALUES = "decides by values, and a graph has one path only"
_READS = "reads a value, which the graph would hold fixed"
_OUT_SIZE = "the size of out= lies in the data"


def _both(op: str, gap: Gap) -> dict[tuple[str, str], Gap]:
    return {(op, "function"): gap, (op, "backward"): gap}


# (operator, variant) → gap
GAPS: dict[tuple[str, str], Gap] = {
    ("allclose", "function"): Gap(_BY_VALUES),
    ("equal", "function"): Gap(_BY_VALUES),
    ("item", "function"): Gap(_READS, REAL),
    **_both("corrcoef", Gap("checks values of weights on the way", REAL)),
    **_both("cov", Gap("checks values of weights on the way", REAL)),
    ("istft", "function"): Gap("checks that the window adds up to something other than zero", REAL),
    ("istft", "backward"): Gap(
        "checks that the window adds up to something other than zero; with symbolic sizes torch's Python version is "
        "recorded, whose gradient has other strides",
        ("real", "symbolic"),
    ),
    **_both("narrow", Gap("the start may be given as a tensor, which is read", REAL, sample=1)),
    **_both("nn.functional.gaussian_nll_loss", Gap("checks that no variance is negative")),
    ("nn.functional.one_hot", "function"): Gap("as wide as the largest class, which is read"),
    **_both(
        "nn.functional.ctc_loss",
        Gap("the longest target, a value, sets the size of a saved tensor", STAND_INS, sample=1),
    ),
    **{
        ("linalg.lstsq", variant): Gap("residuals exist only where the matrix has full rank", STAND_INS)
        for variant in ("function", "backward", "out", "out_resized")
    },
    **_both(
        "linalg.lstsq.grad_oriented", Gap("residuals exist only where the matrix has full rank", STAND_INS)
    ),
    **{
        (op, variant): Gap(_OUT_SIZE, STAND_INS)
        for op in ("masked_select", "nonzero")
        for variant in ("out", "out_resized")
    },
    **_both(
        "to_sparse",
        Gap(
            "stores as many elements as there are other than zero, and a stand-in of a sparse layout has a fixed number",
            STAND_INS,
            torch_does="takes the number for that of a tensor of zeros, in fake mode: what follows is wrong if it asks",
        ),
    ),
    **_both(
        "tensor_split",
        Gap(
            "the number of sections may be given as a tensor: how many results there are lies in the data",
            sample=1,
            torch_does="takes the number for 1, with symbolic sizes: wrong for any other",
        ),
    ),
    ("kron", "out_resized"): Gap(_MARKS_OUT),
    **{
        (op, variant): Gap(_MARKS_OUT if variant == "out" else _UNFILLED)
        for op in ("linalg.matrix_rank", "linalg.matrix_rank.hermitian")
        for variant in ("out", "out_resized")
    },
    **{
        (op, variant): Gap(_OTHER_PATH)
        for op in ("linalg.cond", "norm.nuc")
        for variant in ("function", "out", "out_resized")
    },
    ("linalg.svdvals", "function"): Gap(_OTHER_PATH),
    ("linalg.eigvalsh", "function"): Gap(_OTHER_PATH),
    ("ormqr", "backward"): Gap(_OTHER_PATH),
    ("prod", "backward"): Gap(_OTHER_PATH, sample=1),
}


def gap_for(op: str, variant: str, mode: str) -> Gap | None:
    gap = GAPS.get((op, variant))
    return gap if gap is not None and mode in gap.modes else None
