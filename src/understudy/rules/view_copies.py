"""The copying twins of views (`permute_copy` of `permute`, …): a new contiguous tensor of the view's shape."""

from __future__ import annotations

from typing import Any

from understudy.rules import splits, view_composites, views
from understudy.rules.registry import Rule, rule
from understudy.spec import TensorSpec, View

COPIES: dict[str, Rule] = {
    "_conj_copy": views.conj,
    "_neg_view_copy": views.neg_view,
    "_reshape_alias_copy": views.reshape_alias,
    "_reshape_copy": view_composites.reshape,
    "alias_copy": views.alias,
    "as_strided_copy": views.as_strided,
    "detach_copy": views.alias,
    "diagonal_copy": views.diagonal,
    "expand_copy": views.expand,
    "narrow_copy": views.narrow,
    "permute_copy": views.permute,
    "select_copy.int": views.select,
    "slice_copy.Tensor": views.slice_,
    "split_copy.Tensor": splits.split,
    "split_with_sizes_copy": splits.split_with_sizes,
    "squeeze_copy": views.squeeze,
    "squeeze_copy.dim": views.squeeze_dim,
    "squeeze_copy.dims": views.squeeze_dims,
    "t_copy": views.t,
    "transpose_copy.int": views.transpose,
    "unbind_copy.int": splits.unbind,
    "unfold_copy": views.unfold,
    "unsqueeze_copy": views.unsqueeze,
    "view_as_complex_copy": views.view_as_complex,
    "view_as_real_copy": views.view_as_real,
    "view_copy": view_composites.reshape,
    "view_copy.dtype": views.view_dtype,
}


def _copy_of(view_rule: Rule) -> Rule:
    def view_copy(spec: TensorSpec, *args: Any, **kwargs: Any) -> TensorSpec | list[TensorSpec]:
        answer = view_rule(_resolved(spec), *args, **kwargs)
        if isinstance(answer, list):
            return [_fresh(view) for view in answer]
        return _fresh(answer)

    return view_copy


def _resolved(spec: TensorSpec) -> TensorSpec:
    """Copying operators apply a lazy conjugation or negation first, views refuse some of them."""
    return spec.viewed(spec.shape, spec.stride, conj=False, neg=False) if spec.conj or spec.neg else spec


def _fresh(view: View) -> TensorSpec:
    return view.spec.like()


for _name, _view_rule in COPIES.items():
    rule(_name)(_copy_of(_view_rule))
