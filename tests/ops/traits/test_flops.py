"""MACs against counts by hand, and against a published table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import understudy
from tests.report.programs import GPT
from understudy.ops.traits.flops import work_of
from understudy.spec import TensorSpec
from understudy.spec.call import Call
from understudy.spec.sparse import count_bytes, count_values, parts_of, spec_of_sparse

torchvision_operators = torch.library.Library("torchvision", "FRAGMENT")
aten = torch.ops.aten
CPU = torch.device("cpu")


def macs_of(program: Callable[[], Any]) -> int:
    found = understudy.rehearse(program)
    assert not found.coverage.unknown
    return found.macs


def spec(*shape: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
    return TensorSpec(shape, dtype=dtype, device=CPU)


# --- whole models


@pytest.mark.parametrize("sdpa", [False, True])
def test_gpt(sdpa: bool) -> None:
    """batch 4, length 128, width 256, 8 heads, 4 layers, vocabulary 1000: 1,875.9M."""
    batch, length, width, layers, vocabulary = 4, 128, 256, 4, 1000
    rows = batch * length
    linear = layers * rows * (3 * width * width + width * width + 2 * 4 * width * width)
    attention = layers * 2 * batch * length * length * width
    head = rows * width * vocabulary
    assert linear + attention + head == 1_875_902_464

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if sdpa:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return (q @ k.transpose(-2, -1)).softmax(-1) @ v

    def program() -> None:
        x = torch.randn(batch, length, width)
        for _ in range(layers):
            q, k, v = (
                torch.nn.Linear(width, 3 * width)(x).view(batch, length, 3, 8, 32).permute(2, 0, 3, 1, 4)
            )
            y = attend(q, k, v).transpose(1, 2).reshape(batch, length, width)
            x = x + torch.nn.Linear(width, width)(y)
            x = x + torch.nn.Linear(4 * width, width)(F.gelu(torch.nn.Linear(width, 4 * width)(x)))
        torch.nn.Linear(width, vocabulary, bias=False)(x)

    assert macs_of(program) == linear + attention + head


def test_backward_of_products_is_twice_the_forward() -> None:
    def program(is_training: bool) -> None:
        logits = GPT()(torch.zeros(2, 32, dtype=torch.int64))
        if is_training:
            logits.sum().backward()

    assert macs_of(lambda: program(True)) == 3 * macs_of(lambda: program(False))


@pytest.fixture
def transformers() -> Any:
    """Which imports torchvision, where it is installed; without its C++ part, it has to find the names of its operators."""
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            torchvision_operators.define(f"{name}(Tensor a, Tensor b, float c) -> Tensor")
    return pytest.importorskip("transformers")


def test_llama(transformers: Any) -> None:
    width, middle, layers, heads, groups, vocabulary, batch, length = 64, 176, 3, 8, 2, 500, 2, 24
    config = transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=middle, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=groups,
    )  # fmt: skip
    rows, head = batch * length, width // heads
    projections = rows * (2 * width * width + 2 * width * groups * head)
    attention = 2 * batch * heads * length * length * head
    feed_forward = 3 * rows * width * middle
    expected = layers * (projections + attention + feed_forward) + rows * width * vocabulary

    def program() -> None:
        model = transformers.LlamaForCausalLM(config)
        with torch.no_grad():
            model(torch.zeros(batch, length, dtype=torch.int64))

    assert macs_of(program) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixtral(transformers: Any, dtype: torch.dtype) -> None:
    """Each token goes to two of four experts: grouped products over twice as many rows as there are tokens."""
    width, middle, layers, heads, groups, vocabulary, batch, length = 64, 128, 2, 4, 2, 300, 2, 16
    experts, chosen = 4, 2
    config = transformers.MixtralConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=middle, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=groups, num_local_experts=experts, num_experts_per_tok=chosen,
    )  # fmt: skip
    rows, head = batch * length, width // heads
    projections = rows * (2 * width * width + 2 * width * groups * head)
    attention = 2 * batch * heads * length * length * head
    router = rows * width * experts
    feed_forward = 3 * chosen * rows * width * middle
    expected = layers * (projections + attention + router + feed_forward) + rows * width * vocabulary

    def program() -> None:
        model = transformers.MixtralForCausalLM(config).to(dtype)
        with torch.no_grad():
            model(torch.zeros(batch, length, dtype=torch.int64))

    assert macs_of(program) == expected


# --- operators


@pytest.mark.parametrize(
    ("op", "args", "made", "expected"),
    [
        (aten.mm.default, (spec(3, 4), spec(4, 5)), spec(3, 5), 3 * 4 * 5),
        (aten.addmm.default, (spec(5), spec(3, 4), spec(4, 5)), spec(3, 5), 3 * 4 * 5),
        (aten.baddbmm.default, (spec(2, 3, 5), spec(2, 3, 4), spec(2, 4, 5)), spec(2, 3, 5), 2 * 3 * 4 * 5),
        (aten.addmm_.default, (spec(3, 5), spec(3, 4), spec(4, 5)), spec(3, 5), 3 * 4 * 5),
        (aten._grouped_mm.default, (spec(6, 4), spec(3, 4, 5), spec(3)), spec(6, 5), 6 * 4 * 5),
        (aten._grouped_mm.default, (spec(4, 6), spec(6, 5), spec(3)), spec(3, 4, 5), 4 * 6 * 5),
        (aten._grouped_mm.default, (spec(3, 2, 4), spec(3, 4, 5)), spec(3, 2, 5), 3 * 2 * 4 * 5),
        (aten._trilinear.default, (spec(7, 3), spec(5, 3, 4), spec(7, 4), [1, 3], [0], [1, 2], [2, 3]), spec(7, 5), 7 * 5 * 12),
        (aten.mm.default, (spec(3, 4, dtype=torch.complex64), spec(4, 5, dtype=torch.complex64)),
         spec(3, 5, dtype=torch.complex64), 4 * 3 * 4 * 5),
        (aten.convolution.default, (spec(2, 6, 8, 8), spec(9, 2, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 3),
         spec(2, 9, 8, 8), 2 * 9 * 64 * 2 * 9),
        (aten.convolution.default, (spec(2, 6, 8, 8), spec(6, 3, 2, 2), None, [2, 2], [0, 0], [1, 1], True, [0, 0], 1),
         spec(2, 3, 16, 16), 2 * 6 * 64 * 3 * 4),
        (aten._scaled_dot_product_flash_attention_backward.default, (spec(2, 8, 10, 4), spec(2, 8, 10, 4), spec(2, 2, 10, 4),
         spec(2, 2, 10, 4)), spec(2, 8, 10, 4), 5 * 2 * 8 * 10 * 10 * 4),
    ],
)  # fmt: skip
def test_formulas(op: Any, args: tuple[Any, ...], made: TensorSpec, expected: int) -> None:
    assert work_of(Call.of(op, args, {}), (made,)).macs == expected


def test_recurrent_layers() -> None:
    """Four gates of 20 from 10 features and from 20 of the state, for each of 3 x 7 rows."""

    def program() -> None:
        with torch.no_grad():
            torch.nn.LSTM(10, 20)(torch.randn(7, 3, 10))

    assert macs_of(program) == 7 * 3 * 4 * 20 * (10 + 20)


def test_kinds_of_work() -> None:
    def kind(op: Any, *args: Any, made: TensorSpec | None = None) -> str:
        return work_of(Call.of(op, args, {}), () if made is None else (made,)).kind

    x = spec(4, 6)
    assert kind(aten.add.Tensor, x, x, made=x) == kind(aten.add_.Tensor, x, x, made=x) == "elementwise"
    assert kind(aten.sum.dim_IntList, x, [1], made=spec(4)) == "elementwise"
    assert kind(aten.view.default, x, [24], made=spec(24)) == kind(aten.t_.default, x, made=x) == "views"
    assert kind(aten.clone.default, x, made=x) == kind(aten.embedding.default, x, x, made=x) == "moves"
    assert (
        kind(aten._foreach_add_.List, [x, x], [x, x])
        == kind(aten._fused_adamw_.default, [x], [x])
        == "elementwise"
    )
    assert kind(aten.linalg_qr.default, x, made=x) == "unknown"


def test_what_moves_nothing() -> None:
    x = spec(4, 6)
    for op, args in (
        (aten._unsafe_view.default, (x, [24])), (aten.empty_like.default, (x,)),
        (aten.new_empty_strided.default, (x, [24], [1])),
    ):  # fmt: skip
        assert work_of(Call.of(op, args, {}), (spec(24),)).bytes_moved == 0
    assert work_of(Call.of(aten.zeros_like.default, (x,), {}), (x,)).bytes_moved > 0


def test_fused_optimizers_count_their_elements() -> None:
    x = spec(1000)
    work = work_of(Call.of(aten._fused_adamw_.default, ([x, x], [x, x], [x, x], [x, x], [], []), {}), ())
    assert work.operations == 12 * 2000


# --- a published table

PUBLISHED = {
    "convnext_tiny_hnf": (288, 7.39), "darknet21": (256, 3.93), "deit3_base_patch16_224": (224, 17.58),
    "dla60x": (224, 3.54), "ecaresnet50t": (256, 5.64), "gernet_l": (256, 4.57), "resnet50": (224, 4.11),
    "resnext101_64x4d": (224, 15.52), "mobilevitv2_200": (384, 16.24), "regnetv_064": (288, 10.55),
    "resnet152": (160, 5.9), "resnet18d": (224, 2.06), "seresnet152": (224, 11.57), "tf_efficientnetv2_b2": (260, 1.72),
    "inception_v3": (299, 5.73), "resnet34": (224, 3.67), "resnext50_32x4d": (224, 4.26), "twins_svt_small": (224, 2.94),
    "vit_pe_core_base_patch16_224": (224, 17.82), "regnetz_d8": (256, 3.97),
}  # fmt: skip
"""Image size and GMACs of the benchmark tables of timm. Their convention: products, and beside them 5 for each element of a
layer norm and 2 for each element of an affine batch norm."""


def count_norms(found: understudy.Rehearsal) -> int:
    rows = {row.operator: row.operations for row in found.operators}
    return sum(count for name, count in rows.items() if "layer_norm" in name or "batch_norm" in name)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_vision_models(transformers: Any, name: str) -> None:
    timm = pytest.importorskip("timm")
    size, gmacs = PUBLISHED[name]

    def program() -> None:
        with torch.no_grad():
            timm.create_model(name).eval()(torch.randn(1, 3, size, size))

    found = understudy.rehearse(program)
    assert (found.macs + count_norms(found)) / 1e9 == pytest.approx(gmacs, rel=0.01)


# --- sparse tensors


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("layout", ["coo", "csr", "csc"])
def test_products_of_sparse_matrices_count_what_is_stored(layout: str) -> None:
    """Each of the 3 stored numbers times a row of 5."""

    def program() -> torch.Tensor:
        dense = torch.zeros(4, 6)
        dense[[0, 1, 3], [2, 0, 5]] = 1.0
        return torch.mm(getattr(dense, f"to_sparse_{layout}")(), torch.ones(6, 5))

    assert understudy.rehearse(program).macs == 3 * 5


DENSE = torch.tensor([[0.0, 1, 0, 2], [3, 0, 0, 0], [0, 0, 4, 5], [0, 0, 0, 6]])
SPARSE: dict[str, Callable[[], torch.Tensor]] = {
    "coo": DENSE.to_sparse,
    "csr": DENSE.to_sparse_csr,
    "csc": DENSE.to_sparse_csc,
    "bsr": lambda: DENSE.to_sparse_bsr((2, 1)),
    "bsc": lambda: DENSE.to_sparse_bsc((1, 2)),
    "batch": lambda: torch.stack([DENSE, DENSE]).to_sparse_csr(),
    "dense part of coo": lambda: torch.stack([DENSE, DENSE], 2).to_sparse(2),
    "dense part of csr": lambda: torch.stack([DENSE, DENSE], 2).to_sparse_csr(dense_dim=1),
}


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("kind", SPARSE)
def test_bytes_of_sparse_tensors(kind: str) -> None:
    real = SPARSE[kind]()
    found, parts = spec_of_sparse(real, CPU), parts_of(real)
    assert count_values(found) == parts[-1].numel()
    assert count_bytes(found) == sum(part.numel() * part.itemsize for part in parts)
