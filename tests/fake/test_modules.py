"""torch.nn inside the mode: every module is built, called and trained as on real tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils._python_dispatch import TorchDispatchMode

import understudy
from tests.fake.sides import assert_like_eager, on_each_device, run_fake, with_index
from understudy import DataDependentOutputException, FakeTensor, FakeTensorMode, MixedTensorsError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

Case = tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]


def r(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def classes(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape)


LAYERS: dict[str, Case] = {
    "Linear": (lambda: nn.Linear(4, 3), lambda: (r(2, 4),)),
    "Bilinear": (lambda: nn.Bilinear(4, 3, 5), lambda: (r(2, 4), r(2, 3))),
    "Conv1d": (lambda: nn.Conv1d(2, 4, 3, padding="same", padding_mode="reflect"), lambda: (r(2, 2, 8),)),
    "Conv2d": (lambda: nn.Conv2d(4, 8, 3, stride=2, groups=2), lambda: (r(2, 4, 9, 9),)),
    "Conv2d, circular": (lambda: nn.Conv2d(4, 8, 3, padding=1, padding_mode="circular"), lambda: (r(2, 4, 9, 9),)),
    "Conv3d": (lambda: nn.Conv3d(2, 4, 3, dilation=2), lambda: (r(1, 2, 6, 6, 6),)),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(2, 4, 3, stride=2, output_padding=1), lambda: (r(2, 2, 8),)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(4, 2, 3, groups=2), lambda: (r(2, 4, 5, 5),)),
    "ConvTranspose3d": (lambda: nn.ConvTranspose3d(2, 2, 2), lambda: (r(1, 2, 3, 3, 3),)),
    "Unfold": (lambda: nn.Unfold(2), lambda: (r(1, 2, 4, 4),)),
    "Fold": (lambda: nn.Fold((4, 4), 2), lambda: (r(1, 8, 9),)),
    "MaxPool1d": (lambda: nn.MaxPool1d(2), lambda: (r(2, 2, 8),)),
    "MaxPool2d": (lambda: nn.MaxPool2d(3, 2, 1, ceil_mode=True), lambda: (r(2, 2, 8, 8),)),
    "MaxPool3d": (lambda: nn.MaxPool3d(2), lambda: (r(1, 2, 4, 4, 4),)),
    "AvgPool1d": (lambda: nn.AvgPool1d(2), lambda: (r(2, 2, 8),)),
    "AvgPool2d": (lambda: nn.AvgPool2d(2), lambda: (r(2, 2, 8, 8),)),
    "AvgPool3d": (lambda: nn.AvgPool3d(2), lambda: (r(1, 2, 4, 4, 4),)),
    "LPPool2d": (lambda: nn.LPPool2d(2, 2), lambda: (r(2, 2, 8, 8),)),
    "FractionalMaxPool2d": (lambda: nn.FractionalMaxPool2d(2, output_size=3), lambda: (r(2, 2, 8, 8),)),
    "AdaptiveAvgPool1d": (lambda: nn.AdaptiveAvgPool1d(3), lambda: (r(2, 2, 8),)),
    "AdaptiveAvgPool2d": (lambda: nn.AdaptiveAvgPool2d(3), lambda: (r(2, 2, 8, 8),)),
    "AdaptiveAvgPool3d": (lambda: nn.AdaptiveAvgPool3d(2), lambda: (r(1, 2, 4, 4, 4),)),
    "AdaptiveMaxPool1d": (lambda: nn.AdaptiveMaxPool1d(3), lambda: (r(2, 2, 8),)),
    "AdaptiveMaxPool2d": (lambda: nn.AdaptiveMaxPool2d(3), lambda: (r(2, 2, 8, 8),)),
    "ReflectionPad1d": (lambda: nn.ReflectionPad1d(2), lambda: (r(2, 2, 8),)),
    "ReplicationPad2d": (lambda: nn.ReplicationPad2d(2), lambda: (r(2, 2, 8, 8),)),
    "ZeroPad2d": (lambda: nn.ZeroPad2d((1, 2, 0, 1)), lambda: (r(2, 2, 8, 8),)),
    "CircularPad1d": (lambda: nn.CircularPad1d(2), lambda: (r(2, 2, 8),)),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(4), lambda: (r(3, 4),)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(4), lambda: (r(3, 4, 5, 5),)),
    "BatchNorm2d, no average": (lambda: nn.BatchNorm2d(4, momentum=None), lambda: (r(3, 4, 5, 5),)),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(4, affine=False), lambda: (r(3, 4, 2, 2, 2),)),
    "BatchNorm1d, no statistics": (lambda: nn.BatchNorm1d(4, track_running_stats=False), lambda: (r(3, 4),)),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(4), lambda: (r(3, 4, 5),)),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True), lambda: (r(3, 4, 5, 5),)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), lambda: (r(3, 4, 5),)),
    "LayerNorm": (lambda: nn.LayerNorm([4, 5]), lambda: (r(3, 4, 5),)),
    "RMSNorm": (lambda: nn.RMSNorm(5), lambda: (r(3, 4, 5),)),
    "LocalResponseNorm": (lambda: nn.LocalResponseNorm(2), lambda: (r(3, 4, 5, 5),)),
    "LSTM": (lambda: nn.LSTM(4, 3, 2, bidirectional=True, dropout=0.1), lambda: (r(5, 2, 4),)),
    "LSTM, projected": (lambda: nn.LSTM(4, 6, proj_size=3, batch_first=True), lambda: (r(5, 2, 4),)),
    "LSTM, with state": (lambda: nn.LSTM(4, 3), lambda: (r(5, 2, 4), (r(1, 2, 3), r(1, 2, 3)))),
    "GRU": (lambda: nn.GRU(4, 3, 2, bidirectional=True), lambda: (r(5, 2, 4),)),
    "RNN": (lambda: nn.RNN(4, 3, nonlinearity="relu"), lambda: (r(5, 2, 4),)),
    "LSTMCell": (lambda: nn.LSTMCell(4, 3), lambda: (r(2, 4),)),
    "GRUCell": (lambda: nn.GRUCell(4, 3), lambda: (r(2, 4),)),
    "RNNCell": (lambda: nn.RNNCell(4, 3), lambda: (r(2, 4),)),
    "Embedding": (lambda: nn.Embedding(10, 4, padding_idx=0), lambda: (classes(10, 2, 3),)),
    "Embedding, max_norm": (lambda: nn.Embedding(10, 4, scale_grad_by_freq=True), lambda: (classes(10, 2, 3),)),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(10, 4, mode="mean"), lambda: (classes(10, 2, 3),)),
    "EmbeddingBag, sum": (lambda: nn.EmbeddingBag(10, 4, mode="sum"), lambda: (classes(10, 6), torch.tensor([0, 2, 4]))),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(8, 2, dropout=0.1), lambda: (r(5, 2, 8), r(4, 2, 8), r(4, 2, 8))),
    "MultiheadAttention, kdim": (
        lambda: nn.MultiheadAttention(8, 2, kdim=4, vdim=6, batch_first=True, add_bias_kv=True),
        lambda: (r(2, 5, 8), r(2, 3, 4), r(2, 3, 6)),
    ),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, norm_first=True), lambda: (r(5, 2, 8),)),
    "TransformerDecoderLayer": (lambda: nn.TransformerDecoderLayer(8, 2, 16), lambda: (r(5, 2, 8), r(4, 2, 8))),
    "Transformer": (lambda: nn.Transformer(8, 2, 2, 2, 16), lambda: (r(5, 2, 8), r(4, 2, 8))),
    "Dropout": (lambda: nn.Dropout(0.3), lambda: (r(3, 4),)),
    "Dropout1d": (lambda: nn.Dropout1d(), lambda: (r(3, 4, 5),)),
    "Dropout2d": (lambda: nn.Dropout2d(), lambda: (r(3, 4, 5, 5),)),
    "Dropout3d": (lambda: nn.Dropout3d(), lambda: (r(3, 4, 2, 2, 2),)),
    "AlphaDropout": (lambda: nn.AlphaDropout(), lambda: (r(3, 4),)),
    "FeatureAlphaDropout": (lambda: nn.FeatureAlphaDropout(), lambda: (r(3, 4, 5),)),
    "Upsample": (lambda: nn.Upsample(scale_factor=2, mode="nearest"), lambda: (r(1, 2, 4, 4),)),
    "Upsample, bicubic": (lambda: nn.Upsample(size=(7, 5), mode="bicubic", align_corners=True), lambda: (r(1, 2, 4, 4),)),
    "UpsamplingBilinear2d": (lambda: nn.UpsamplingBilinear2d(scale_factor=2), lambda: (r(1, 2, 4, 4),)),
    "PixelShuffle": (lambda: nn.PixelShuffle(2), lambda: (r(1, 8, 3, 3),)),
    "PixelUnshuffle": (lambda: nn.PixelUnshuffle(2), lambda: (r(1, 2, 4, 4),)),
    "ChannelShuffle": (lambda: nn.ChannelShuffle(2), lambda: (r(1, 4, 3, 3),)),
    "CosineSimilarity": (lambda: nn.CosineSimilarity(), lambda: (r(3, 4), r(3, 4))),
    "PairwiseDistance": (lambda: nn.PairwiseDistance(), lambda: (r(3, 4), r(3, 4))),
    "Flatten": (lambda: nn.Flatten(), lambda: (r(3, 4, 5),)),
    "Unflatten": (lambda: nn.Unflatten(1, (2, 2)), lambda: (r(3, 4, 5),)),
    "PReLU": (lambda: nn.PReLU(4), lambda: (r(3, 4, 5),)),
    "RReLU": (lambda: nn.RReLU(), lambda: (r(3, 4),)),
    "GLU": (lambda: nn.GLU(), lambda: (r(3, 4),)),
    "AdaptiveLogSoftmaxWithLoss": (
        lambda: nn.AdaptiveLogSoftmaxWithLoss(4, 10, [5]), lambda: (r(3, 4), classes(10, 3))),
}  # fmt: skip
DATA_DEPENDENT = {"AdaptiveLogSoftmaxWithLoss": "takes the targets of each cluster with nonzero"}

ACTIVATIONS = """ReLU ReLU6 LeakyReLU ELU SELU CELU GELU SiLU Mish Hardswish Hardsigmoid Hardtanh Hardshrink Softshrink
    Tanhshrink Threshold Softplus Softsign Sigmoid LogSigmoid Tanh Softmin Softmax LogSoftmax Softmax2d""".split()
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "Threshold": (0.1, 20.0),
    "Softmin": (1,),
    "Softmax": (1,),
    "LogSoftmax": (1,),
}
for _name in ACTIVATIONS:
    LAYERS[_name] = (
        lambda name=_name: getattr(nn, name)(*_ARGUMENTS.get(name, ())),
        lambda: (r(2, 3, 4, 4),),
    )

LOSSES: dict[str, Case] = {
    "L1Loss": (nn.L1Loss, lambda: (r(3, 4), r(3, 4))),
    "MSELoss": (nn.MSELoss, lambda: (r(3, 4), r(3, 4))),
    "CrossEntropyLoss": (lambda: nn.CrossEntropyLoss(label_smoothing=0.1), lambda: (r(3, 4), classes(4, 3))),
    "CrossEntropyLoss, 2-D": (
        lambda: nn.CrossEntropyLoss(ignore_index=0),
        lambda: (r(3, 4, 5, 5), classes(4, 3, 5, 5)),
    ),
    "CrossEntropyLoss, shares": (nn.CrossEntropyLoss, lambda: (r(3, 4), r(3, 4).softmax(1))),
    "NLLLoss": (nn.NLLLoss, lambda: (r(3, 4), classes(4, 3))),
    "KLDivLoss": (lambda: nn.KLDivLoss(reduction="batchmean"), lambda: (r(3, 4), r(3, 4))),
    "BCELoss": (nn.BCELoss, lambda: (r(3, 4).sigmoid(), r(3, 4).sigmoid())),
    "BCEWithLogitsLoss": (nn.BCEWithLogitsLoss, lambda: (r(3, 4), r(3, 4))),
    "HuberLoss": (nn.HuberLoss, lambda: (r(3, 4), r(3, 4))),
    "SmoothL1Loss": (nn.SmoothL1Loss, lambda: (r(3, 4), r(3, 4))),
    "SoftMarginLoss": (nn.SoftMarginLoss, lambda: (r(3, 4), classes(2, 3, 4) * 2 - 1)),
    "HingeEmbeddingLoss": (nn.HingeEmbeddingLoss, lambda: (r(3, 4), r(3, 4))),
    "MarginRankingLoss": (nn.MarginRankingLoss, lambda: (r(3), r(3), r(3))),
    "MultiLabelMarginLoss": (nn.MultiLabelMarginLoss, lambda: (r(3, 4), classes(4, 3, 4))),
    "MultiLabelSoftMarginLoss": (nn.MultiLabelSoftMarginLoss, lambda: (r(3, 4), r(3, 4))),
    "MultiMarginLoss": (nn.MultiMarginLoss, lambda: (r(3, 4), classes(4, 3))),
    "CosineEmbeddingLoss": (nn.CosineEmbeddingLoss, lambda: (r(3, 4), r(3, 4), r(3).sign())),
    "TripletMarginLoss": (nn.TripletMarginLoss, lambda: (r(3, 4), r(3, 4), r(3, 4))),
    "PoissonNLLLoss": (nn.PoissonNLLLoss, lambda: (r(3, 4), r(3, 4))),
    "CTCLoss, tensors": (
        nn.CTCLoss,
        lambda: (r(5, 2, 4).log_softmax(2), classes(3, 2, 3) + 1, torch.tensor([5, 5]), torch.tensor([3, 2])),
    ),
}


def moved(values: Any, device: str) -> Any:
    if isinstance(values, tuple):
        return tuple(moved(value, device) for value in values)
    return values.to(device) if isinstance(values, torch.Tensor) else values


def tensors(result: Any) -> list[torch.Tensor]:
    return [part for part in torch.utils._pytree.tree_leaves(result) if isinstance(part, torch.Tensor)]


def training(case: Case, names: bool = False) -> Callable[[str], Any]:
    def program(device: str) -> Any:
        build, inputs = case
        model = build().to(device)
        given = moved(inputs(), device)
        for tensor in tensors(given):
            if tensor.is_floating_point() and tensor.is_leaf:
                tensor.requires_grad_()
        outputs = tensors(model(*given))
        total = sum(out.float().sum() for out in outputs)
        assert isinstance(total, torch.Tensor)
        if total.requires_grad:
            total.backward()
        grads = [t.grad for t in (*tensors(given), *model.parameters()) if t.grad is not None]
        return [out.detach() for out in outputs], grads, list(model.buffers())

    return program


# On the CPU, the strides of eager's results; on CUDA, some kernels choose others, and what matters is that all is there.
OTHER_ON_CUDA = {
    "Dropout": "native_dropout instead of bernoulli and mul",
}


@on_each_device
@pytest.mark.parametrize("name", [*LAYERS, *LOSSES])
def test_built_called_and_trained(name: str, device: str) -> None:
    if name in DATA_DEPENDENT:
        pytest.skip(DATA_DEPENDENT[name])
    assert_like_eager(training({**LAYERS, **LOSSES}[name]), device)


@on_each_device
@pytest.mark.parametrize("name", LAYERS)
def test_evaluated_without_gradients(name: str, device: str) -> None:
    """Composite operators reach the mode whole there."""
    if name in DATA_DEPENDENT:
        pytest.skip(DATA_DEPENDENT[name])
    build, inputs = LAYERS[name]

    def program(device: str) -> Any:
        model = build().to(device).eval()
        given = moved(inputs(), device)
        with torch.no_grad():
            return tensors(model(*given))

    assert_like_eager(program, device)


def test_channels_last() -> None:
    def program(device: str) -> Any:
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 1)
        )
        model = model.to(device, memory_format=torch.channels_last)
        x = torch.randn(2, 3, 8, 8, device=device).to(memory_format=torch.channels_last)
        y = model(x)
        y.sum().backward()
        return y, [p.grad for p in model.parameters()], list(model.parameters())

    result = assert_like_eager(program, "cpu")
    assert result[0].is_contiguous(memory_format=torch.channels_last)
    y, *_ = run_fake(program, "cuda")
    assert y.is_contiguous(memory_format=torch.channels_last)


# --- conversion ----------------------------------------------------------------------------------------------------


def network() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False))
    model[2].weight = model[0].weight
    model.register_buffer("mask", torch.ones(4, dtype=torch.bool))
    return model


CONVERSIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "half": lambda m: m.half(),
    "double": lambda m: m.double(),
    "bfloat16": lambda m: m.bfloat16(),
    "dtype": lambda m: m.to(torch.float16),
    "cuda": lambda m: m.cuda(),
    "cuda(2)": lambda m: m.cuda(2),
    "to cuda": lambda m: m.to("cuda:1"),
    "device and dtype": lambda m: m.to("cuda:1", torch.bfloat16),
    "there and back": lambda m: m.cuda().cpu(),
    "like another tensor": lambda m: m.to(torch.zeros(1, device="cuda:2", dtype=torch.float64)),
    "meta": lambda m: m.to("meta"),
    "to_empty": lambda m: m.to_empty(device="cuda"),
    "meta, then to_empty": lambda m: m.to("meta").to_empty(device="cuda:1"),
    "xpu": lambda m: m.xpu(),
    "requires_grad_": lambda m: m.requires_grad_(False),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_module_conversion(name: str) -> None:
    with FakeTensorMode():
        model = network()
        weight = model[0].weight
        reference = torch.zeros(2)
        expected = {
            "cuda": "cuda:0", "cuda(2)": "cuda:2", "to cuda": "cuda:1", "device and dtype": "cuda:1", "meta": "meta",
            "like another tensor": "cuda:2", "to_empty": "cuda:0", "meta, then to_empty": "cuda:1", "xpu": "xpu:0",
        }.get(name, "cpu")  # fmt: skip
        converted = CONVERSIONS[name](model)
        assert converted is model
        # As in eager, meta and other devices do not take over each other's parameters.
        if "meta" not in name:
            assert model[2].weight is model[0].weight, "tied weights stay tied"
            assert model[0].weight is weight, "parameters stay the objects they were"
        for tensor in (*model.parameters(), *model.buffers()):
            assert str(tensor.device) == expected
        assert all(isinstance(p, nn.Parameter) for p in model.parameters())
        assert model.mask.dtype is torch.bool
        assert model[1].num_batches_tracked.dtype is torch.int64
        assert reference.device.type == "cpu"


@pytest.mark.parametrize("to", ["cuda:1", "meta", torch.float64])
def test_a_real_module_converted_inside_the_mode(to: Any) -> None:
    module = nn.BatchNorm1d(4)
    module.weight.grad = torch.ones(4)
    with FakeTensorMode(allow_non_fake_inputs=True):
        module.to(to)
        out = module(torch.randn(3, 4).to(to))
    for tensor in (module.weight, module.bias, module.weight.grad, module.running_mean, out):
        assert isinstance(tensor, FakeTensor)
        assert to in (str(tensor.device), tensor.dtype)
    assert isinstance(module.weight, nn.Parameter)


def test_a_converted_module_still_trains() -> None:
    with FakeTensorMode():
        model = network().to("cuda", torch.bfloat16)
        model(torch.randn(3, 4, device="cuda", dtype=torch.bfloat16)).sum().backward()
        before = model[0].weight.grad
        model.to("cuda:1")
        assert model[0].weight.grad.device == torch.device("cuda:1")
        assert before.dtype is torch.bfloat16
        model(torch.randn(3, 4, device="cuda:1", dtype=torch.bfloat16)).sum().backward()


@on_each_device
@pytest.mark.parametrize("assign", [True, False])
def test_state_dict(device: str, assign: bool) -> None:
    with FakeTensorMode():
        source, target = network().to(device), network().to(device)
        weight = target[0].weight
        state = source.state_dict()
        assert all(not value.requires_grad for value in state.values())
        missing = target.load_state_dict(state, assign=assign)
        assert not missing.missing_keys
        assert not missing.unexpected_keys
        assert (target[0].weight is weight) is not assign
        assert isinstance(target[0].weight, nn.Parameter)
        assert target[0].weight.requires_grad
        target(torch.randn(3, 4, device=device)).sum().backward()
        with pytest.raises(RuntimeError, match="size mismatch"):
            nn.Linear(3, 3).load_state_dict(nn.Linear(4, 3).state_dict())


def test_a_real_state_dict_into_a_module_of_stand_ins() -> None:
    real = nn.Linear(3, 2)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = nn.Linear(3, 2, device="cuda")
        model.load_state_dict(real.state_dict())
        assert model.weight.device == torch.device("cuda:0")


@on_each_device
def test_deep_copies(device: str) -> None:
    with FakeTensorMode():
        model = network().to(device)
        twin = copy.deepcopy(model)
        assert twin[2].weight is twin[0].weight
        assert twin[0].weight is not model[0].weight
        assert type(twin[0].weight) is FakeTensor
        assert isinstance(twin[0].weight, nn.Parameter)
        twin(torch.randn(3, 4, device=device)).sum().backward()
        assert model[0].weight.grad is None


@on_each_device
def test_functional_call(device: str) -> None:
    with FakeTensorMode():
        model = network().to(device)
        changed = {name: p.detach() * 2 for name, p in model.named_parameters()}
        out = torch.func.functional_call(model, changed, torch.randn(3, 4, device=device))
        assert out.shape == (3, 4)
        stacked, _ = torch.func.stack_module_state([nn.Linear(4, 2, device=device) for _ in range(3)])
        assert stacked["weight"].shape == (3, 2, 4)
        assert stacked["weight"].device == torch.device(with_index(device))


# --- utilities --------------------------------------------------------------------------------------------------------


@on_each_device
def test_parametrizations(device: str) -> None:
    def program(device: str) -> Any:
        layers = [
            parametrizations.weight_norm(nn.Linear(4, 4)).to(device),
            parametrizations.spectral_norm(nn.Linear(4, 4)).to(device),
        ]
        outs = [layer(torch.randn(2, 4, device=device)) for layer in layers]
        sum(out.sum() for out in outs).backward()
        parametrize.remove_parametrizations(layers[0], "weight")
        return outs, [p.grad for layer in layers for p in layer.parameters() if p.grad is not None]

    assert_like_eager(program, device)


@on_each_device
def test_hooks_of_the_older_kind(device: str) -> None:
    def program(device: str) -> Any:
        first = nn.utils.weight_norm(nn.Linear(4, 4)).to(device)
        second = nn.utils.spectral_norm(nn.Conv2d(3, 4, 3)).to(device)
        a, b = first(torch.randn(2, 4, device=device)), second(torch.randn(1, 3, 5, 5, device=device))
        (a.sum() + b.sum()).backward()
        nn.utils.remove_weight_norm(first)
        return a, b, [p.grad for p in second.parameters()]

    assert_like_eager(program, device)


@on_each_device
def test_parameters_as_one_vector(device: str) -> None:
    def program(device: str) -> Any:
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).to(device)
        vector = nn.utils.parameters_to_vector(model.parameters())
        nn.utils.vector_to_parameters(vector * 2, model.parameters())
        return vector.detach(), [p.detach() for p in model.parameters()]

    assert_like_eager(program, device)


def test_pruning() -> None:
    def program(device: str) -> Any:
        layer = nn.Linear(4, 4, device=device)
        prune.custom_from_mask(layer, "weight", torch.ones(4, 4, device=device))
        out = layer(torch.randn(2, 4, device=device))
        return out, layer.weight_mask

    assert_like_eager(program, "cuda")


@on_each_device
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_packed_sequences(kind: Any, device: str) -> None:
    def program(device: str) -> Any:
        rnn = kind(4, 3, bidirectional=True, batch_first=True).to(device)
        x = torch.randn(3, 5, 4, device=device, requires_grad=True)
        packed = nn.utils.rnn.pack_padded_sequence(x, [5, 3, 2], batch_first=True)
        out, _ = rnn(packed)
        padded, lengths = nn.utils.rnn.pad_packed_sequence(out, batch_first=True)
        padded.sum().backward()
        return padded, lengths.tolist(), packed.batch_sizes.tolist(), x.grad

    assert_like_eager(program, device)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("make", ["pack_sequence", "PackedSequence"])
def test_packed_sequences_of_known_values(kind: Any, make: str) -> None:
    def program(device: str) -> Any:
        if make == "pack_sequence":
            packed = nn.utils.rnn.pack_sequence([torch.ones(3, 4), torch.ones(2, 4)])
        else:
            packed = nn.utils.rnn.PackedSequence(torch.randn(5, 4), torch.tensor([2, 2, 1]))
        out, state = kind(4, 3)(packed)
        return nn.utils.rnn.pad_packed_sequence(out), state

    assert_like_eager(program, "cpu")


def test_packed_sequences_of_unknown_lengths_name_the_read() -> None:
    mode = FakeTensorMode()
    sizes = mode.from_tensor(torch.tensor([2, 2, 1]))
    with mode:
        packed = nn.utils.rnn.PackedSequence(torch.randn(5, 4), sizes)
        with pytest.raises(DataDependentOutputException, match="reads a value"):
            nn.GRU(4, 3)(packed)


def test_unsorted_packed_sequences() -> None:
    def program(device: str) -> Any:
        x = torch.randn(3, 5, 4, device=device)
        lengths = torch.tensor([2, 5, 3])
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return packed.data, packed.batch_sizes.tolist(), nn.utils.rnn.pad_packed_sequence(packed)[0]

    assert_like_eager(program, "cuda")


def test_padding_a_list() -> None:
    def program(device: str) -> Any:
        parts = [torch.randn(n, 3, device=device) for n in (4, 2, 3)]
        return nn.utils.rnn.pad_sequence(parts), nn.utils.rnn.pad_sequence(parts, batch_first=True)

    assert_like_eager(program, "cuda:1")


@on_each_device
def test_initialisers(device: str) -> None:
    def program(device: str) -> Any:
        w = torch.empty(4, 4, device=device)
        for fill in (
            nn.init.xavier_uniform_, nn.init.kaiming_normal_, nn.init.trunc_normal_, nn.init.orthogonal_, nn.init.eye_,
            nn.init.zeros_, nn.init.ones_, nn.init.normal_,
        ):  # fmt: skip
            fill(w)
        nn.init.trunc_normal_(w, std=0.02, a=-1, b=1)
        nn.init.sparse_(w, 0.5)
        nn.init.dirac_(torch.empty(2, 2, 3, device=device))
        return w

    assert_like_eager(program, device)


# --- what CUDA does otherwise -----------------------------------------------------------------------------------------


class Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_dropout_on_cuda_is_one_kernel() -> None:
    with FakeTensorMode(), Names() as stream:
        x = torch.randn(3, 4, device="cuda", requires_grad=True)
        y = F.dropout(x, 0.5)
        y.sum().backward()
    assert "native_dropout" in stream.names
    assert "native_dropout_backward" in stream.names
    assert "bernoulli_" not in stream.names


def test_dropout_on_the_cpu_is_what_it_is_there() -> None:
    def run() -> list[str]:
        with Names() as stream:
            x = torch.randn(3, 4, requires_grad=True)
            F.dropout(x, 0.5).sum().backward()
        return stream.names

    real = run()
    with FakeTensorMode():
        assert run() == real
    assert "bernoulli_" in real


ATTENTION = [
    (torch.float16, False, "_scaled_dot_product_flash_attention"),
    (torch.bfloat16, False, "_scaled_dot_product_flash_attention"),
    (torch.float32, False, "_scaled_dot_product_efficient_attention"),
    (torch.bfloat16, True, "_scaled_dot_product_efficient_attention"),
]


@pytest.mark.parametrize(("dtype", "masked", "kernel"), ATTENTION)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_on_cuda(dtype: torch.dtype, masked: bool, kernel: str, dropout: float) -> None:
    with FakeTensorMode(), Names() as stream:
        q, k, v = (
            torch.randn(2, 4, 16, 32, device="cuda:3", dtype=dtype, requires_grad=True) for _ in range(3)
        )
        mask = torch.ones(16, 16, dtype=torch.bool, device="cuda:3").tril() if masked else None
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=not masked)
        out.sum().backward()
        assert kernel in stream.names
        assert kernel + "_backward" in stream.names
        assert (out.shape, out.dtype, out.device) == (q.shape, dtype, q.device)
        for tensor in (q, k, v):
            assert (tensor.grad.shape, tensor.grad.dtype) == (tensor.shape, dtype)


def test_attention_on_cuda_without_gradients() -> None:
    with FakeTensorMode(), torch.no_grad(), Names() as stream:
        q = torch.randn(2, 4, 16, 32, device="cuda", dtype=torch.float16)
        out = F.scaled_dot_product_attention(q, q, q)
        assert out.device == q.device
    assert "_scaled_dot_product_flash_attention" in stream.names


def test_attention_with_grouped_heads() -> None:
    def program(device: str) -> Any:
        q = torch.randn(2, 8, 16, 32, device=device, requires_grad=True)
        k = torch.randn(2, 2, 16, 32, device=device, requires_grad=True)
        out = F.scaled_dot_product_attention(q, k, k, enable_gqa=True)
        out.sum().backward()
        return out, q.grad, k.grad

    assert_like_eager(program, "cpu")
    _, q_grad, k_grad = run_fake(program, "cuda")
    assert (q_grad.shape, k_grad.shape) == ((2, 8, 16, 32), (2, 2, 16, 32))


def test_the_backend_that_was_asked_for() -> None:
    with (
        FakeTensorMode(),
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        Names() as stream,
    ):
        q = torch.randn(2, 4, 16, 32, device="cuda", dtype=torch.float16)
        F.scaled_dot_product_attention(q, q, q)
    assert "_scaled_dot_product_flash_attention" not in stream.names
    assert "bmm" in stream.names or "baddbmm" in stream.names


def test_wide_heads_take_the_plain_way() -> None:
    """Flash attention stops at 256."""
    with FakeTensorMode(), Names() as stream:
        q = torch.randn(1, 1, 8, 512, device="cuda", dtype=torch.float16)
        assert F.scaled_dot_product_attention(q, q, q).shape == q.shape
    assert "_scaled_dot_product_flash_attention" not in stream.names


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_encoder_that_takes_padding_out_of_the_batch(device: str) -> None:
    """Eager makes rows of several lengths of it, which stand-ins can't be; what comes out is a batch again."""
    with FakeTensorMode(), torch.no_grad(), torch.device(device):
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(8)).eval()
        x = torch.randn(3, 5, 8)
        out = encoder(x, src_key_padding_mask=torch.empty(3, 5, dtype=torch.bool))
    assert (out.shape, out.stride(), out.device) == (x.shape, x.stride(), x.device)


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_a_real_tensor_is_not_given_the_data_of_a_stand_in(kind: str) -> None:
    real = nn.Parameter(torch.ones(2, 3)) if kind == "parameter" else torch.ones(2, 3)
    given = torch.zeros(2, 3)
    with FakeTensorMode():
        fake = torch.zeros(2, 3)
        with pytest.raises(MixedTensorsError) as raised:
            real.data = fake
        other = torch.ones(2, 3)
        other.data = fake  # between stand-ins
        real.data = given  # between real ones
    assert "can't assign the data of a stand-in, f32[2, 3]@cpu, to a real tensor" in str(raised.value)
    assert "test_modules.py" in str(raised.value) and "real.data = fake" in str(raised.value)
    assert "module.weight = torch.nn.Parameter(data)" in str(raised.value)
    assert real.sum() == 0 and "data" not in vars(torch.Tensor)


def test_vector_to_parameters_leaves_real_ones_alone() -> None:
    model = nn.Linear(2, 2)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with FakeTensorMode(), pytest.raises(MixedTensorsError, match="can't assign the data of a stand-in"):
        nn.utils.vector_to_parameters(torch.zeros(6), model.parameters())
    assert all(map(torch.equal, before, model.parameters()))


# --- TorchScript ---------------------------------------------------------------------------------------------------------


def makes_tensors(x: torch.Tensor) -> torch.Tensor:
    return x + torch.tensor(1.0) + torch.zeros([3]) + torch.as_tensor(x) + torch.arange(3)


@pytest.mark.parametrize("scope", [FakeTensorMode, lambda: understudy.simulate("t4")])
def test_functions_that_are_replaced_are_still_built_in_to_torchscript(scope: Any) -> None:
    with scope():
        assert torch.jit.script(makes_tensors)(torch.ones(3)).shape == (3,)
        assert torch.func.jacfwd(torch.tanh)(torch.ones(3)).shape == (3, 3)  # whose formulas are compiled
    assert torch.jit.script(makes_tensors)(torch.ones(3)).tolist() == [3.0, 4.0, 5.0]
