"""copy.copy, copy.deepcopy and pickle of fakes and of modules that hold them."""

from __future__ import annotations

import copy
import io
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from understudy import FakeCopyMode, FakeTensor, FakeTensorMode


@pytest.fixture
def mode() -> FakeTensorMode:
    return FakeTensorMode()


def same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def by_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def by_torch_save(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


def by_torch_save_unsafe(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": by_pickle,
    "torch.save": by_torch_save,
    "torch.save unsafe": by_torch_save_unsafe,
}
each_copy = pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
in_and_out = pytest.mark.parametrize("where", ["inside", "outside"])

KINDS: dict[str, Any] = {
    "plain": lambda: torch.empty(3, 4),
    "transposed": lambda: torch.empty(3, 4).t(),
    "offset": lambda: torch.empty(30)[5:17:3],
    "cuda": lambda: torch.empty(3, device="cuda:1"),
    "meta": lambda: torch.empty(3, device="meta"),
    "half": lambda: torch.empty(3, dtype=torch.bfloat16),
    "uint16": lambda: torch.empty(3, dtype=torch.uint16),
    "float8": lambda: torch.empty(3, dtype=torch.float8_e5m2),
    "conj": lambda: torch.empty(3, dtype=torch.complex64).conj(),
    "neg": lambda: torch.empty(3, dtype=torch.complex64).conj().imag,
    "grad": lambda: torch.empty(3, requires_grad=True),
    "parameter": lambda: nn.Parameter(torch.empty(3, 2)),
    "frozen parameter": lambda: nn.Parameter(torch.empty(3, 2), requires_grad=False),
    "cuda parameter": lambda: nn.Parameter(torch.empty(3, 2, device="cuda")),
    "buffer": lambda: nn.Buffer(torch.empty(3)),
    "scalar": lambda: torch.tensor(3.0),
    "empty": lambda: torch.empty(0, 3),
}


def facts(t: torch.Tensor) -> Any:
    return (
        type(t), t.shape, t.stride(), t.storage_offset(), t.dtype, t.device, t.is_conj(), t.is_neg(), t.requires_grad,
        t.is_leaf, isinstance(t, nn.Parameter), isinstance(t, nn.Buffer), t.untyped_storage().nbytes(),
    )  # fmt: skip


@each_copy
@in_and_out
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_a_copy_has_the_same_metadata(make: Any, copied: Any, where: str, mode: FakeTensorMode) -> None:
    with mode:
        fake = make()
    if where == "inside":
        with mode:
            twin = copied(fake)
            assert twin.fake_mode is mode
            assert (twin == twin).shape == twin.shape  # of every dtype
    else:
        twin = copied(fake)
    if not (copied is copy.deepcopy and (fake.is_conj() or fake.is_neg())):
        assert facts(twin) == facts(fake)
    assert twin is not fake and not same_storage(twin, fake)


@each_copy
@pytest.mark.parametrize(
    "kind", ["plain", "transposed", "offset", "conj", "neg", "grad", "parameter", "buffer", "scalar"]
)
def test_bits_and_counted_writes_of_copies_are_eagers(kind: str, copied: Any, mode: FakeTensorMode) -> None:
    """Eager sets a copy on its storage, which counts as a write, unless it is a parameter; deep copies have no bits."""

    def program() -> Any:
        twin = copied(KINDS[kind]())
        return facts(twin)[1:-1], twin._version

    with mode:
        answer = program()
    assert answer == program()


def by_multiprocessing(value: Any) -> Any:
    return ForkingPickler.loads(ForkingPickler.dumps(value))


@pytest.mark.parametrize("copied", [*COPIES.values(), by_multiprocessing], ids=[*COPIES, "multiprocessing"])
def test_views_of_one_storage_stay_so_as_in_eager(copied: Any, mode: FakeTensorMode) -> None:
    def views() -> dict[str, torch.Tensor]:
        base = torch.zeros(4, 6)
        return {"base": base, "row": base[1], "turned": base.t(), "other": torch.zeros(4)}

    with mode:
        whole = views()
    twins, expected = copied(whole), copied(views())
    for name, twin in twins.items():
        assert same_storage(twin, twins["base"]) is same_storage(expected[name], expected["base"])
        assert twin._version == expected[name]._version or copied is by_multiprocessing
    assert {name: facts(t) for name, t in twins.items()} == {name: facts(t) for name, t in whole.items()}
    assert len({id(twin.fake_mode) for twin in twins.values()}) == 1


@each_copy
def test_the_same_tensor_twice_stays_one(copied: Any, mode: FakeTensorMode) -> None:
    with mode:
        fake = torch.empty(3)
    first, second = copied([fake, fake])
    assert first is second


def test_gradients_are_copied_but_not_saved(mode: FakeTensorMode) -> None:
    with mode:
        leaf, parameter = torch.empty(3, requires_grad=True), nn.Parameter(torch.empty(3))
        leaf.grad, parameter.grad = torch.empty(3), torch.empty(3)
    twin = copy.deepcopy(leaf)
    assert type(twin.grad) is FakeTensor and twin.grad is not leaf.grad
    assert copy.deepcopy(parameter).grad is None, "as in eager: a parameter is copied without its gradient"
    assert by_torch_save(parameter).grad is None, "as in eager: a checkpoint holds no gradients"


def model_in(mode: FakeTensorMode, device: str = "cpu") -> nn.Module:
    with mode, torch.device(device):
        model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False), nn.BatchNorm1d(10))
        model[1].weight = model[0].weight
    return model


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle, by_torch_save_unsafe])
def test_modules(copied: Any, device: str, mode: FakeTensorMode) -> None:
    model = model_in(mode, device)
    twin = copied(model)
    assert [facts(t) for t in twin.parameters()] == [facts(t) for t in model.parameters()]
    assert [facts(t) for t in twin.buffers()] == [facts(t) for t in model.buffers()]
    assert twin[0].weight is twin[1].weight
    modes = {id(t.fake_mode) for t in [*twin.parameters(), *twin.buffers()]}
    assert len(modes) == 1
    if copied is copy.deepcopy:
        assert twin[0].weight.fake_mode is mode
    assert twin(token_ids(twin, device)).shape == (3, 10)


def token_ids(model: nn.Module, device: str) -> torch.Tensor:
    with model[0].weight.fake_mode:  # type: ignore[index,union-attr]
        return torch.empty(3, dtype=torch.long, device=device)


@each_copy
def test_state_dicts(copied: Any, mode: FakeTensorMode) -> None:
    model = model_in(mode)
    state = copied(model.state_dict())
    assert list(state) == list(model.state_dict())
    assert same_storage(state["0.weight"], state["1.weight"]) is (copied is not by_pickle), (
        "plain pickle writes it twice"
    )
    assert all(type(t) is FakeTensor for t in state.values())


@each_copy
def test_optimizer_states(copied: Any, mode: FakeTensorMode) -> None:
    with mode:
        model = nn.Linear(3, 3)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.empty(2, 3)).sum().backward()
        optimizer.step()
        state = copied(optimizer.state_dict())
        optimizer.load_state_dict(state)
        model(torch.empty(2, 3)).sum().backward()
        optimizer.step()
        assert optimizer.state[model.weight]["step"].item() == 2


def test_a_copy_of_a_fake_module_does_not_copy_the_mode(mode: FakeTensorMode) -> None:
    twin = copy.deepcopy(model_in(mode))
    assert all(t.fake_mode is mode for t in twin.parameters())
    assert copy.deepcopy(mode) is mode


def test_layers_are_cloned_by_transformers(mode: FakeTensorMode) -> None:
    with mode:
        model = nn.Transformer(16, 2, 2, 2, 32, batch_first=True)
        out = model(torch.empty(2, 5, 16), torch.empty(2, 3, 16))
    assert out.shape == (2, 3, 16)
    layers = [id(layer.linear1.weight) for layer in model.encoder.layers]
    assert len(set(layers)) == 2


def test_results_of_computations_refuse_as_eager_does(mode: FakeTensorMode) -> None:
    with mode:
        result = torch.empty(3, requires_grad=True) * 2
    with pytest.raises(RuntimeError, match=r"\.detach\(\)"):
        copy.deepcopy(result)


def test_copy_shares_the_storage(mode: FakeTensorMode) -> None:
    with mode:
        fake = nn.Parameter(torch.empty(3))
    fake.note = "kept"
    twin = copy.copy(fake)
    assert twin is not fake and same_storage(twin, fake)
    assert isinstance(twin, nn.Parameter) and twin.requires_grad and twin.note == "kept"


def test_what_is_written_to_a_shallow_copy_is_read_through_the_other(mode: FakeTensorMode) -> None:
    with mode:
        fake = torch.arange(3)
        twin = copy.copy(fake)
        assert (fake + 1).tolist() == [1, 2, 3]
        twin[0] = 7
        assert fake.tolist() == twin.tolist() == [7, 1, 2]
        fake[1] = 8
        assert twin.tolist() == [7, 8, 2]


# Eager can't make shallow copies of unsigned and 8-bit floating-point tensors, and there is no CUDA here.
IN_EAGER = [kind for kind in KINDS if kind not in ("uint16", "float8") and "cuda" not in kind]


@pytest.mark.parametrize("kind", IN_EAGER)
@pytest.mark.parametrize("inference", [False, True], ids=["", "inference mode"])
def test_a_shallow_copy_counts_its_own_writes(kind: str, inference: bool, mode: FakeTensorMode) -> None:
    def program() -> Any:
        x = KINDS[kind]()
        with torch.no_grad():
            x.copy_(x.clone())
            with torch.inference_mode(inference):
                twin = copy.copy(x)
            if not inference:
                twin.copy_(twin.clone())
        return (
            facts(twin)[1:], twin.is_inference() or (x._version, twin._version), twin.is_inference(), twin._is_view(),
            same_storage(x, twin),
        )  # fmt: skip

    with mode:
        answer = program()
    assert answer == program()


def test_attributes_are_copied(mode: FakeTensorMode) -> None:
    with mode:
        fake = torch.empty(3)
    fake.note = ["a"]
    twin = copy.deepcopy(fake)
    assert twin.note == ["a"] and twin.note is not fake.note
    assert by_pickle(fake).note == ["a"]


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@each_copy
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_layouts(layout: torch.layout, copied: Any, mode: FakeTensorMode) -> None:
    fake = mode.from_tensor(torch.eye(3).to_sparse(layout=layout))
    twin = copied(fake)
    assert type(twin) is FakeTensor and twin is not fake
    assert (twin.spec, twin.layout, twin._nnz()) == (fake.spec, layout, 3)


def test_wrapper_subclasses(mode: FakeTensorMode) -> None:
    fake = mode.from_tensor(TwoTensor(torch.ones(2), torch.ones(2)))
    for copied in (copy.deepcopy, by_torch_save_unsafe):
        twin = copied(fake)
        assert type(twin) is TwoTensor and type(twin.a) is FakeTensor and twin.a is not fake.a
    with mode:
        real = copy.deepcopy(TwoTensor(REAL_ONES, REAL_ONES))
    assert type(real.a) is torch.Tensor and torch.equal(real.a, REAL_ONES)


REAL_ONES = torch.ones(2)


def test_modes_keep_their_options() -> None:
    twin = by_pickle(FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False))
    assert type(twin) is FakeTensorMode and twin.allow_non_fake_inputs and not twin.allow_fallback_kernels


# --- values that are known --------------------------------------------------------------------------------------


@each_copy
def test_known_values_are_copied(copied: Any, mode: FakeTensorMode) -> None:
    with mode:
        literal = torch.tensor([1.0, 2.0])
        computed = torch.arange(4) * 2
    twin, other = copied([literal, computed])
    assert twin.tolist() == [1.0, 2.0]
    assert other.tolist() == [0, 2, 4, 6]


def test_a_deep_copy_is_independent(mode: FakeTensorMode) -> None:
    with mode:
        fake = torch.zeros(3)
        twin = copy.deepcopy(fake)
        view = copy.deepcopy({"a": fake, "b": fake[1:]})
        twin.add_(1)
        view["b"].fill_(5)
        assert fake.tolist() == [0, 0, 0]
        assert twin.tolist() == [1, 1, 1]
        assert view["a"].tolist() == [0, 5, 5]


def test_a_copy_of_written_literals_reads_what_was_written(mode: FakeTensorMode) -> None:
    with mode:
        fake = torch.tensor([1.0, 2.0])
        fake[0] = 7
        twin = copy.deepcopy(fake)
        fake.normal_()
        assert twin.tolist() == [7.0, 2.0]
        with pytest.raises(RuntimeError):
            copy.deepcopy(fake).tolist()


# --- real tensors inside the mode -----------------------------------------------------------------------------------


REAL: dict[str, Any] = {
    "plain": lambda: torch.randn(3, 4),
    "view": lambda: torch.randn(5, 6)[1:, ::2],
    "conj": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "parameter": lambda: nn.Parameter(torch.randn(3)),
    "grad": lambda: torch.randn(3, requires_grad=True),
    "meta": lambda: torch.empty(3, device="meta"),
    "sparse": lambda: torch.eye(3).to_sparse(),
}


@pytest.mark.parametrize("make", REAL.values(), ids=REAL)
def test_a_deep_copy_of_a_real_tensor_is_real(make: Any, mode: FakeTensorMode) -> None:
    real = make()
    with mode:
        twin = copy.deepcopy(real)
    assert type(twin) is type(real)
    assert twin.requires_grad == real.requires_grad
    if real.device.type != "meta":
        assert torch.equal(twin.detach().to_dense(), real.detach().to_dense())
        assert real.is_sparse or twin.data_ptr() != real.data_ptr()


def test_a_deep_copy_of_a_real_module_is_real(mode: FakeTensorMode) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[0].weight.grad = torch.ones(3, 3)
    with mode:
        twin = copy.deepcopy(model)
    for name, tensor in twin.state_dict().items():
        assert type(tensor) is torch.Tensor and torch.equal(tensor, model.state_dict()[name])
    assert type(twin[0].weight) is nn.Parameter
    assert twin(torch.randn(2, 3)).shape == (2, 3)


def test_fake_copies_of_optimizers_and_modules_together(mode: FakeTensorMode) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with FakeCopyMode(mode):
        fake_model, fake_optimizer = copy.deepcopy((model, optimizer))
    assert fake_optimizer.param_groups[0]["params"][0] is fake_model.weight


def test_a_module_with_stand_ins() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = torch.nn.Embedding(10, 4), torch.nn.Linear(4, 10, bias=False)
            self.head.weight = self.embedding.weight
            self.register_buffer("scale", torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.embedding(x))

    model, mode = Tied().eval(), FakeTensorMode()
    fake = mode.from_module(model)
    assert type(fake) is Tied and not fake.training and model.scale.tolist() == [1.0, 1.0, 1.0]
    assert all(
        type(p.data) is FakeTensor or isinstance(p, FakeTensor) for p in [*fake.parameters(), fake.scale]
    )
    assert fake.head.weight is fake.embedding.weight and fake.head.weight.requires_grad
    assert not any(isinstance(p, FakeTensor) for p in model.parameters())
    with mode:
        assert fake(torch.empty(2, 7, dtype=torch.int64)).shape == (2, 7, 10)


def test_from_module_says_what_it_takes() -> None:
    with pytest.raises(
        TypeError, match=r"from_module: expected an nn\.Module, got a Tensor; for a tensor, use from_tensor"
    ):
        FakeTensorMode().from_module(torch.ones(2))  # type: ignore[type-var]
