"""Checkpoints: real files loaded inside the mode, files written from fakes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.serialization import skip_data

from understudy import FakeTensor, FakeTensorMode


@pytest.fixture
def mode() -> FakeTensorMode:
    return FakeTensorMode()


def same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def facts(t: torch.Tensor) -> Any:
    return (
        t.shape, t.stride(), t.storage_offset(), t.dtype, t.device, t.is_conj(), t.is_neg(), t.requires_grad,
        isinstance(t, nn.Parameter), t.untyped_storage().nbytes(),
    )  # fmt: skip


REAL: dict[str, Any] = {
    "plain": lambda: torch.randn(3, 4),
    "view": lambda: torch.randn(10, 4)[2:6].t(),
    "half": lambda: torch.randn(3, dtype=torch.bfloat16),
    "uint16": lambda: torch.ones(3, dtype=torch.uint16),
    "float8": lambda: torch.ones(3).to(torch.float8_e5m2),
    "bool": lambda: torch.ones(3, dtype=torch.bool),
    "conj": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "neg": lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
    "grad": lambda: torch.randn(3, requires_grad=True),
    "parameter": lambda: nn.Parameter(torch.randn(3, 4)),
    "scalar": lambda: torch.tensor(1.5),
    "empty": lambda: torch.empty(0, 3),
    "meta": lambda: torch.empty(2, 3, device="meta"),
}


def saved(value: Any, **options: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file, **options)
    file.seek(0)
    return file


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("make", REAL.values(), ids=REAL)
def test_a_real_checkpoint_loads_as_fakes(make: Any, weights_only: bool, mode: FakeTensorMode) -> None:
    real = make()
    file = saved({"x": real})
    with mode:
        fake = torch.load(file, weights_only=weights_only)["x"]
        assert type(fake) is FakeTensor and fake.fake_mode is mode
        assert facts(fake) == facts(real)
        (fake.float() if not fake.is_complex() else fake) + 1
    assert torch.load(saved(real), weights_only=weights_only).__class__ is type(real)


def test_no_data_is_read(mode: FakeTensorMode, tmp_path: Path) -> None:
    path = tmp_path / "big.pt"
    with FakeTensorMode(), skip_data(materialize_fake_tensors=True):
        torch.save({"w": torch.empty(1 << 30, dtype=torch.float32)}, path)  # 4 GiB that are holes in the file
    with mode:
        loaded = torch.load(path)
    assert loaded["w"].shape == (1 << 30,)


@pytest.mark.parametrize("use_mmap", [None, True])
def test_files_and_mmap(use_mmap: bool | None, mode: FakeTensorMode, tmp_path: Path) -> None:
    model = nn.Linear(3, 4)
    path = tmp_path / "model.pt"
    torch.save(model.state_dict(), path)
    with mode:
        state = torch.load(path, mmap=use_mmap)
    assert {name: facts(t)[:5] for name, t in state.items()} == {
        name: facts(t)[:5] for name, t in model.state_dict().items()
    }


def test_shared_storages_stay_shared(mode: FakeTensorMode) -> None:
    base = torch.randn(4, 6)
    file = saved({"base": base, "row": base[1], "flat": base.view(-1), "other": torch.randn(4, 6)})
    with mode:
        loaded = torch.load(file)
    assert same_storage(loaded["base"], loaded["row"]) and same_storage(loaded["base"], loaded["flat"])
    assert not same_storage(loaded["base"], loaded["other"])


def test_two_loads_are_independent(mode: FakeTensorMode) -> None:
    file = saved(torch.randn(3))
    with mode:
        first = torch.load(file)
        file.seek(0)
        second = torch.load(file)
    assert not same_storage(first, second)


def checkpoint_of(device: str) -> io.BytesIO:
    """A checkpoint of a model that was on this device: written from fakes as if they were real."""
    file = io.BytesIO()
    with FakeTensorMode(), skip_data(materialize_fake_tensors=True):
        torch.save({"w": torch.empty(3, 4, device=device), "b": torch.empty(3, device="cpu")}, file)
    file.seek(0)
    return file


def to_second(storage: Any, location: str) -> Any:
    return storage.cuda(1)


MAPPED: dict[str, Any] = {
    "none": (None, ("cuda:0", "cpu")),
    "string": ("cpu", ("cpu", "cpu")),
    "device": (torch.device("cuda:3"), ("cuda:3", "cuda:3")),
    "device without index": ("cuda", ("cuda:0", "cuda:0")),
    "meta": ("meta", ("meta", "meta")),
    "dict": ({"cuda:0": "cuda:7"}, ("cuda:7", "cpu")),
    "stays": (lambda storage, location: storage, ("cpu", "cpu")),
    "moves": (to_second, ("cuda:1", "cuda:1")),
    "chooses": (lambda storage, location: None, ("cuda:0", "cpu")),
}


@pytest.mark.parametrize(("location", "devices"), MAPPED.values(), ids=MAPPED)
def test_map_location(location: Any, devices: Any, mode: FakeTensorMode) -> None:
    with mode:
        loaded = torch.load(checkpoint_of("cuda"), map_location=location)
        assert (str(loaded["w"].device), str(loaded["b"].device)) == devices
        assert (loaded["w"] * 2).device == loaded["w"].device
        loaded["w"].requires_grad_().sum().backward()


@pytest.mark.parametrize(("location", "devices"), MAPPED.values(), ids=MAPPED)
def test_map_location_of_saved_fakes(location: Any, devices: Any, mode: FakeTensorMode) -> None:
    with mode:
        file = saved({"w": torch.empty(3, 4, device="cuda"), "b": torch.empty(3)})
    loaded = torch.load(file, map_location=location)
    assert (str(loaded["w"].device), str(loaded["b"].device)) == devices


def test_fakes_written_as_real_load_for_real(mode: FakeTensorMode) -> None:
    with mode:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3, bias=False))
        model[1].weight = nn.Parameter(model[0].weight.t())
        model.note = torch.empty(3, dtype=torch.uint16)
    file = io.BytesIO()
    with skip_data(materialize_fake_tensors=True):
        torch.save({**model.state_dict(), "note": model.note, "parameter": model[0].weight}, file)
    file.seek(0)
    loaded = torch.load(file)
    assert all(type(t) in (torch.Tensor, nn.Parameter) for t in loaded.values())
    assert same_storage(loaded["0.weight"], loaded["1.weight"])
    assert loaded["1.weight"].stride() == (1, 3)
    assert type(loaded["parameter"]) is nn.Parameter and loaded["parameter"].requires_grad
    assert loaded["note"].dtype is torch.uint16
    real = nn.Linear(3, 4)
    real.load_state_dict({"weight": loaded["0.weight"], "bias": loaded["0.bias"]})


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("real_first", [False, True])
def test_load_state_dict(assign: bool, real_first: bool, mode: FakeTensorMode) -> None:
    """A real checkpoint goes into a fake model, and with assign=True into a real one's structure too."""
    file = saved(nn.Linear(3, 4).state_dict())
    if real_first and assign:
        model = nn.Linear(3, 4, device="meta")
    else:
        with mode:
            model = nn.Linear(3, 4)
    with mode:
        model.load_state_dict(torch.load(file), assign=assign)
        assert type(model.weight) is FakeTensor and isinstance(model.weight, nn.Parameter)
        assert model.weight.requires_grad
        assert model(torch.empty(2, 3)).shape == (2, 4)


def test_load_state_dict_refuses_wrong_sizes(mode: FakeTensorMode) -> None:
    with mode:
        model = nn.Linear(3, 4)
        with pytest.raises(RuntimeError, match="size mismatch for weight"):
            model.load_state_dict(nn.Linear(4, 4).state_dict())


def test_whole_modules_and_optimizers(mode: FakeTensorMode) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    file = saved({"model": model, "optimizer": optimizer.state_dict()})
    with mode:
        loaded = torch.load(file, weights_only=False)
        twin = loaded["model"]
        assert all(type(t) is FakeTensor for t in [*twin.parameters(), *twin.buffers()])
        resumed = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
        resumed.load_state_dict(loaded["optimizer"])
        twin(torch.empty(4, 3)).sum().backward()
        resumed.step()


@pytest.mark.parametrize("weights_only", [True, False])
def test_single_numbers_keep_their_values(weights_only: bool, mode: FakeTensorMode) -> None:
    """Training goes on from a checkpoint: the optimizer reads its step counters."""
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(5):
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    file = saved(
        {"optimizer": optimizer.state_dict(), "scale": torch.tensor(0.5), "pair": torch.ones(2, 100)}
    )
    with mode:
        loaded = torch.load(file, weights_only=weights_only)
        fake = nn.Linear(3, 3)
        resumed = torch.optim.AdamW(fake.parameters())
        resumed.load_state_dict(loaded["optimizer"])
        fake(torch.empty(4, 3)).sum().backward()
        resumed.step()
        assert resumed.state[fake.weight]["step"].item() == 6
        assert loaded["scale"].item() == 0.5
        with pytest.raises(RuntimeError, match="no data"):
            loaded["pair"].tolist()


def test_saving_inside_the_mode_does_not_change_the_real_ones(mode: FakeTensorMode) -> None:
    real = torch.randn(3)
    with mode:
        file = saved({"real": real})
    assert torch.equal(torch.load(file)["real"], real)


def test_the_old_file_format(mode: FakeTensorMode) -> None:
    with mode:
        fake = torch.empty(3, 4)
    assert torch.load(saved(fake, _use_new_zipfile_serialization=False)).shape == (3, 4)
    base = torch.randn(4, 6)
    file = saved({"base": base, "row": base[1]}, _use_new_zipfile_serialization=False)
    with mode:
        loaded = torch.load(file)
    assert loaded["base"].stride() == (6, 1) and loaded["row"].shape == (6,)


def test_errors_while_loading_leave_nothing_behind(mode: FakeTensorMode) -> None:
    def refuse(storage: Any, location: str) -> Any:
        raise KeyError(location)

    with mode:
        with pytest.raises(KeyError):
            torch.load(checkpoint_of("cuda"), map_location=refuse)
        assert torch.load(checkpoint_of("cuda"))["w"].is_cuda


def test_a_tensor_on_a_storage_that_was_read_from_a_buffer() -> None:
    with FakeTensorMode():
        storage = torch.UntypedStorage.from_buffer(b"12345678", dtype=torch.uint8)
        x = torch.ByteTensor(storage)
        assert type(x) is FakeTensor and x.shape == (8,) and x.device == torch.device("cpu")


def test_where_in_the_file_the_data_of_a_storage_is(mode: FakeTensorMode, tmp_path: Path) -> None:
    state = {"whole": torch.randn(3, 4), "first": torch.randn(8)}
    state["part"] = state["first"][2:5]
    path = tmp_path / "state.pt"
    torch.save(state, path)
    with mode:
        loaded = torch.load(path)
    data = bytearray(path.read_bytes())
    for name, real in state.items():
        storage = loaded[name].untyped_storage()
        count = storage.nbytes() // 4
        found = torch.frombuffer(data, dtype=torch.float32, count=count, offset=storage._checkpoint_offset)
        assert torch.equal(found.as_strided(real.shape, real.stride(), real.storage_offset()), real)
