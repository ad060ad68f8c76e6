"""What is known not to be as in a real run, each with its reason.

`GAPS` is checked in both directions: a failure that is not listed fails the test, and so does a listed gap that
no longer occurs.
"""

from __future__ import annotations

from typing import NamedTuple


class Gap(NamedTuple):
    reason: str
    sample: int = 0
    "The number of the first sample that shows it: a short sweep may not come so far."


_OTHER_PATH = (
    "C++ asks whether a tensor is of a subclass, or any dispatch mode is active, and then computes by other operators: "
    "real tensors below a mode that does nothing give what stand-ins give"
)
_READ_PAST_DISPATCH = "C++ reads the places to split at, given as a tensor, from memory, past every dispatch"

# (operator, dtype, variant) → gap; "*" stands for all dtypes.
GAPS: dict[tuple[str, str, str], Gap] = {
    **{
        ("tensor_split", "*", variant): Gap(_READ_PAST_DISPATCH)
        for variant in ("function", "method", "noncontiguous", "permuted", "backward")
    },
    ("prod", "*", "backward"): Gap(_OTHER_PATH, sample=8),
    ("masked.prod", "*", "backward"): Gap(_OTHER_PATH, sample=47),
    ("ormqr", "*", "backward"): Gap(_OTHER_PATH),
    ("kron", "float32", "out_resized"): Gap(_OTHER_PATH),
    ("linalg.matrix_rank", "float32", "out"): Gap(_OTHER_PATH),
    ("linalg.matrix_rank.hermitian", "float32", "out"): Gap(_OTHER_PATH),
}

# Operators for which "the answer lies in the data" is the right answer of a mode without a shape environment.
DATA_DEPENDENT: dict[str, str] = {
    "_foreach_add": "reads a 0-dim tensor that is given for a number",
    "_foreach_mul": "reads a 0-dim tensor that is given for a number",
    "__getitem__": "a boolean index selects as many elements as it has True",
    "allclose": "answers with a Python bool about values",
    "argwhere": "as many rows as there are elements other than zero",
    "bincount": "as long as the largest value",
    "combinations": "selects by a mask",
    "corrcoef": "cov looks at values for its checks",
    "cov": "looks at values for its checks",
    "equal": "answers with a Python bool about values",
    "index_fill": "the gradient needs the number of distinct indices",
    "index_put": "a boolean index selects as many elements as it has True",
    "istft": "checks that the window adds up to something other than zero",
    "masked.median": "of integers, looks whether all are masked in",
    "item": "a value is what it asks for",
    "linalg.lstsq": "residuals exist only where the matrix has full rank",
    "linalg.lstsq.grad_oriented": "residuals exist only where the matrix has full rank",
    "linalg.svd": "the gradient of complex factors checks that the loss does not depend on their phase",
    "masked_select": "as many elements as the mask has True",
    "narrow": "the start may be given as a tensor",
    "nn.functional.ctc_loss": "the longest target, a value, sets the size of a saved tensor",
    "nn.functional.gaussian_nll_loss": "checks that no variance is negative",
    "nn.functional.one_hot": "as wide as the largest class",
    "nonzero": "as many rows as there are elements other than zero",
    "pca_lowrank": "the gradient of complex factors checks that the loss does not depend on their phase",
    "repeat_interleave": "as long as the repeats, values, sum up to",
    "svd": "the gradient of complex factors checks that the loss does not depend on their phase",
    "svd_lowrank": "the gradient of complex factors checks that the loss does not depend on their phase",
    "tensor_split": "the places to split at may be given as a tensor",
    "to_sparse": "stores as many elements as there are other than zero",
    "unique": "as many elements as there are distinct ones",
    "unique_consecutive": "as many elements as there are runs",
}

# Operators of which a real run refuses some values (or storages that are too short), which stand-ins do not have.
REFUSED_BY_VALUES: dict[str, str] = {
    "gather": "an index is out of bounds",
    "masked_fill": "a complex value with an imaginary part is given for a real tensor",
    "multinomial": "a weight is negative, infinite or NaN, or all of them are zero",
    "scatter": "an index is out of bounds",
    "scatter_add": "an index is out of bounds",
}


def gap_for(op: str, dtype: str, variant: str) -> Gap | None:
    return GAPS.get((op, dtype, variant)) or GAPS.get((op, "*", variant))
