"""Kernels of flash_attn, xformers, Triton and Apex, where these packages are not installed."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from understudy.cli import main
from understudy.simulation.library_kernels import STAND_INS

for package in STAND_INS:
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed, and used as it is", allow_module_level=True)

HEAD = """
import torch
import torch.nn.functional as F
x = torch.nn.Parameter(torch.randn(2, 512, 3, 8, 64, device="cuda", dtype=torch.bfloat16))
optimizer = torch.optim.SGD([x], lr=0.1)
"""
TAIL = """
for _ in range(2):
    attend().float().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
BY_TORCH = """
def attend():
    q, k, v = (part.transpose(1, 2) for part in x.unbind(2))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
"""
BY_FLASH = """
from flash_attn import flash_attn_func
def attend():
    return flash_attn_func(*x.unbind(2), causal=True)
"""
BY_PACKED = """
from flash_attn.flash_attn_interface import flash_attn_varlen_qkvpacked_func
offsets = torch.arange(0, 1025, 512, device="cuda", dtype=torch.int32)
def attend():
    return flash_attn_varlen_qkvpacked_func(x.flatten(0, 1), offsets, 512, causal=True)
"""
BY_XFORMERS = """
import xformers.ops
from xformers.ops import fmha, LowerTriangularMask
def attend():
    assert fmha.LowerTriangularMask is LowerTriangularMask
    return xformers.ops.memory_efficient_attention(*x.unbind(2), attn_bias=LowerTriangularMask())
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rehearse(script: str, code: int = 0) -> dict[str, Any]:
    Path("train.py").write_text(script)
    assert main(["run", "--device", "a100-80g", "--quiet", "--json", "out.json", "train.py"]) == code
    record: dict[str, Any] = json.loads(Path("out.json").read_text())
    return record


@pytest.mark.parametrize(
    "attend", [BY_FLASH, BY_XFORMERS, BY_PACKED], ids=["flash_attn", "xformers", "packed"]
)
def test_attention_takes_the_memory_and_work_of_torchs_own_kernel(attend: str) -> None:
    expected, found = rehearse(HEAD + BY_TORCH + TAIL), rehearse(HEAD + attend + TAIL)
    # Sums of sequences that lie one after the other have 128 rows more for each; 512 bytes for the offsets.
    further = 2 * 128 * 8 * (64 + 1) * 4 + 512 if attend is BY_PACKED else 0
    assert found["peak"]["allocated_bytes"] == expected["peak"]["allocated_bytes"] + further
    assert found["macs"] == expected["macs"] > 0
    assert found["time"]["bound_by"]["attention"] > 0
    package = "xformers" if attend is BY_XFORMERS else "flash_attn"
    assert any(note.startswith(f"{package} is not installed: stand-ins") for note in found["assumptions"])
    assert not [name for name in sys.modules if name.partition(".")[0] in STAND_INS]


KERNEL = """
import torch, triton, triton.language as tl
from triton.language.extra import libdevice

@triton.autotune(configs=[triton.Config({"BLOCK": 128}, num_warps=4)], key=["n"])
@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr, dtype: tl.constexpr = tl.float32):
    tl.store(out, tl.load(x) + tl.load(y))

def add(x, y):
    out = torch.zeros_like(x)
    version = out._version
    add_kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, out, n=x.numel())
    assert out._version == version
    return out

class Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        return add(x, y)

    @staticmethod
    def backward(ctx, grad):
        return grad, None

x = torch.nn.Parameter(torch.randn(1 << 20, device="cuda"))
optimizer = torch.optim.SGD([x], lr=0.1)
assert triton.next_power_of_2(1000) == 1024 and triton.cdiv(5, 2) == 3
for _ in range(2):
    total = Add.apply(x, torch.ones(1 << 20, device="cuda"))
    if total.sum().item() == 0:  # zeros were filled by the kernel: nothing is known of them
        raise SystemExit("the kernel has written nothing")
    total.sum().backward()
    optimizer.step()
"""


def test_a_launch_writes_its_tensors_and_allocates_nothing() -> None:
    found = rehearse(KERNEL)
    launches = next(
        row for row in found["operators"] if row["operator"] == "understudy.library_kernel.default"
    )
    assert launches["calls"] == 2 and launches["bytes_moved"] == 2 * 3 * 4 * (1 << 20)
    # the parameter, its gradient, ones and the result
    assert found["peak"]["allocated_bytes"] <= 5 * 4 * (1 << 20) + 4096
    assert any(note.startswith("kernels in Triton are not run") for note in found["assumptions"])


def test_names_without_a_stand_in_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    rehearse("from flash_attn import flash_attn_with_kvcache\nflash_attn_with_kvcache()\n", code=1)
    assert (
        "flash_attn.flash_attn_with_kvcache is not supported without flash_attn, which is not installed. Install flash_attn, "
        "or rehearse without flash_attn.flash_attn_with_kvcache" in capsys.readouterr().err
    )
    rehearse("import flash_attn.models.gpt\n", code=1)
    assert "ModuleNotFoundError: No module named 'flash_attn.models'" in capsys.readouterr().err


def test_without_a_card_there_are_no_stand_ins(capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text("import flash_attn\n")
    assert main(["run", "--quiet", "train.py"]) == 1
    assert "No module named 'flash_attn'" in capsys.readouterr().err


def test_versions_are_answered() -> None:
    rehearse(
        "import importlib.metadata, importlib.util, flash_attn, torch\n"
        "assert importlib.metadata.version('flash_attn') == flash_attn.__version__\n"
        "assert importlib.util.find_spec('flash_attn') is not None\n"
        "torch.ones(2, device='cuda') + 1\n"
    )


def test_sequences_lose_their_padding_and_get_it_back() -> None:
    rehearse(
        "import torch\n"
        "from flash_attn.bert_padding import pad_input, unpad_input\n"
        "from flash_attn.layers.rotary import apply_rotary_emb\n"
        "from flash_attn.losses.cross_entropy import CrossEntropyLoss\n"
        "x = torch.randn(4, 128, 8, 64, device='cuda', requires_grad=True)\n"
        "mask = torch.ones(4, 128, device='cuda', dtype=torch.long)\n"
        "rows, indices, offsets, longest, used = unpad_input(x, mask)\n"
        "assert offsets.shape == (5,) and used.shape == (4,)\n"
        "assert pad_input(rows, indices, 4, 128).shape == x.shape\n"
        "table = torch.randn(128, 32, device='cuda')\n"
        "turned = apply_rotary_emb(x, table, table)\n"
        "assert turned.shape == x.shape and turned.grad_fn is not None\n"
        "logits = turned.flatten(0, 1).flatten(1)\n"
        "targets = torch.zeros(512, device='cuda', dtype=torch.long)\n"
        "loss = CrossEntropyLoss(inplace_backward=True)(logits, targets)\n"
        "loss.backward()\n"
        "assert x.grad.shape == x.shape\n"
    )


BLOCK = """
import torch
import torch.nn.functional as F
weight = torch.nn.Parameter(torch.ones(256, device="cuda", dtype=torch.bfloat16))
bias = torch.nn.Parameter(torch.zeros(256, device="cuda", dtype=torch.bfloat16))
x = torch.nn.Parameter(torch.randn(4096, 256, device="cuda", dtype=torch.bfloat16))
total = torch.zeros(256, 256, device="cuda")
optimizer = torch.optim.SGD([x, weight, bias], lr=0.1)
{norm}
for _ in range(2):
    y = norm(x)
    y.backward(torch.ones_like(y))
    {product}
    optimizer.step()
    optimizer.zero_grad()
"""
BY_APEX = BLOCK.format(
    norm="""
from apex.normalization.fused_layer_norm import FusedLayerNormAffineFunction
import fused_weight_gradient_mlp_cuda as added
norm = lambda x: FusedLayerNormAffineFunction.apply(x, weight, bias, (256,), 1e-5, False)
""",
    product="added.wgrad_gemm_accum_fp32(x.detach(), y.detach(), total)",
)
BY_TORCHS_NORM = BLOCK.format(
    norm="norm = lambda x: F.layer_norm(x, (256,), weight, bias)",
    product="torch.addmm(total, y.detach().t(), x.detach(), out_dtype=torch.float32, out=total)",
)


def test_norms_and_products_of_apex() -> None:
    """What torch's own norm keeps, and partial sums of the gradients of weight and bias."""
    expected, found = rehearse(BY_TORCHS_NORM), rehearse(BY_APEX)
    assert found["peak"]["allocated_bytes"] == expected["peak"]["allocated_bytes"] + 2 * 16 * 256 * 4
    assert found["macs"] == expected["macs"] > 0
    assert any(note.startswith("apex is not installed: stand-ins") for note in found["assumptions"])


def test_softmax_of_apex_has_no_result_backward() -> None:
    found = rehearse(
        "import torch, scaled_upper_triang_masked_softmax_cuda as softmax\n"
        "scores = torch.randn(32, 1024, 1024, device='cuda', dtype=torch.float16)\n"
        "result = softmax.forward(scores.mul_(2), 1.0)\n"
        "assert softmax.backward(scores, result, 1.0) is scores\n"
        "assert [softmax.get_batch_per_block(1024, keys, 4, 8) for keys in (16, 128, 129, 4096)] == [16, 8, 4, 4]\n"
    )
    assert found["peak"]["allocated_bytes"] == 2 * 2 * 32 * 1024 * 1024


def test_what_apex_lacks_here_is_missing() -> None:
    """Programs that try it take their other way; installed packages do not find it at all."""
    rehearse(
        "import importlib.metadata, torch, apex\n"
        "from apex.normalization import FusedRMSNorm, MixedFusedLayerNorm\n"
        "norm = FusedRMSNorm(64, memory_efficient=True).cuda()\n"
        "norm(torch.randn(8, 64, device='cuda', requires_grad=True)).sum().backward()\n"
        "assert norm.weight.grad is not None\n"
        "for line in ('from apex import amp', 'from apex.optimizers import FusedAdam'):\n"
        "    try:\n"
        "        exec(line)\n"
        "    except ImportError:\n"
        "        continue\n"
        "    raise SystemExit(line)\n"
        "assert not [d for d in importlib.metadata.distributions(name='apex')]\n"
    )


EXTENSION = """
import torch
from torch.utils.cpp_extension import load, load_inline
fused = load("fused", sources=["fused.cpp", "fused_kernel.cu"], verbose=True)
inline = load_inline("inline", cpp_sources="", cuda_sources="__global__ void f() {}", functions=["f"])
torch.ones(4, device="cuda").sum()
"""


def test_cuda_extensions_are_not_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(EXTENSION)
    assert main(["run", "--device", "t4", "train.py"]) == 0
    assert (
        "the CUDA extension 'fused' was not built: its functions raise when they are called"
        in capsys.readouterr().out
    )
    Path("train.py").write_text(EXTENSION + "fused.bias_act(torch.ones(4, device='cuda'))\n")
    assert main(["run", "--device", "t4", "train.py"]) == 1
    assert "fused.bias_act is compiled CUDA code, and its allocations are unknown" in capsys.readouterr().err
