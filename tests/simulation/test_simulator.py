"""`understudy.simulate`: torch answers as on a machine with the named cards, and is as before afterwards."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

import understudy
from tests.fake.test_inference_mode import VIEWS, WRITES
from understudy import FakeTensor
from understudy.patching import ENGINE
from understudy.simulation.catalogue import Card, UnknownDeviceError, find_card
from understudy.simulation.events import Listener
from understudy.simulation.machine import ACTIVE, InvalidDeviceError, Machine, SimulationError

GiB, MiB = 1 << 30, 1 << 20
F = torch.nn.functional


@pytest.fixture
def two_cards() -> Iterator[Machine]:
    with understudy.simulate("2xa100-80g") as machine:
        yield machine


def state_of_torch() -> dict[str, Any]:
    """What a simulation changes, as it stands now."""
    places = [patch.place for patch in ENGINE.registered]
    found = {}
    for place in places:
        owner_name, _, name = place.rpartition(".")
        owner: Any = torch
        for part in owner_name.split(".")[1:]:
            owner = getattr(owner, part, None)
        if owner is not None:
            found[place] = (
                vars(owner).get(name, "nothing") if hasattr(owner, "__dict__") else getattr(owner, name, None)
            )
    return found


# --- what torch says of the machine -----------------------------------------------------------------------------------


def test_the_devices(two_cards: Machine) -> None:
    assert torch.cuda.is_available() and torch.cuda.device_count() == 2 and torch.cuda.current_device() == 0
    assert torch.cuda.get_device_name() == torch.cuda.get_device_name("cuda:1") == find_card("a100-80").name
    assert torch.cuda.get_device_capability() == (8, 0)
    properties = torch.cuda.get_device_properties(1)
    assert (properties.total_memory, properties.multi_processor_count) == (two_cards.card.memory, 108)
    assert torch.cuda.is_bf16_supported(including_emulation=False)
    assert torch.cuda.get_arch_list()[-1] == "sm_120"
    assert (
        torch.version.cuda == two_cards.software.cuda
        and torch.backends.cudnn.version() == two_cards.software.cudnn
    )
    assert torch.backends.cuda.is_built() and torch.distributed.is_nccl_available()
    assert str(torch.accelerator.current_accelerator()) == "cuda" and torch.accelerator.device_count() == 2


def test_selected_devices(two_cards: Machine) -> None:
    with torch.cuda.device(1):
        assert torch.empty(1, device="cuda").device == torch.device("cuda:1") == torch.empty(1).cuda().device
        assert torch.cuda.current_device() == torch.accelerator.current_device_index() == 1
    assert torch.empty(1, device="cuda").device == torch.device("cuda:0")
    torch.cuda.set_device("cuda:1")
    assert torch.empty(1, device="cuda").device.index == 1
    torch.accelerator.set_device_index(0)
    assert torch.empty(1, device="cuda").device.index == 0


def test_a_device_that_is_not_there(two_cards: Machine) -> None:
    with pytest.raises(
        InvalidDeviceError, match="cuda:5 was named, and the simulated machine has 2 devices"
    ) as caught:
        torch.empty(1, device="cuda:5")
    assert "test_simulator.py" in str(caught.value) and 'understudy.simulate("6x...")' in str(caught.value)
    with pytest.raises(InvalidDeviceError, match="invalid device ordinal 7"):
        torch.cuda.set_device(7)


def test_visible_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, count in (("", 0), ("-1", 0), ("0", 1), ("1,0", 2), ("0,9,1", 1), ("0,1,2,3", 4)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
        with understudy.simulate("4xt4"):
            assert torch.cuda.device_count() == count, text
            assert torch.cuda.is_available() is (count > 0)
    with understudy.simulate("4xt4"):
        os.environ["CUDA_VISIBLE_DEVICES"] = "2"  # as scripts do in their first lines
        assert torch.cuda.device_count() == 1


def test_initialisation() -> None:
    with understudy.simulate("t4"):
        assert not torch.cuda.is_initialized()
        torch.cuda.init()
        assert torch.cuda.is_initialized()
    assert not torch.cuda.is_initialized()


# --- memory -----------------------------------------------------------------------------------------------------------


def test_memory_figures(two_cards: Machine) -> None:
    x = torch.empty(3 * MiB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() == 3 * MiB and torch.cuda.memory_reserved() == 20 * MiB
    assert torch.cuda.memory_allocated(1) == 0 == torch.cuda.memory_stats(1)["segment.all.current"]
    free, total = torch.cuda.mem_get_info()
    assert total == two_cards.card.memory and free == total - two_cards.card.outside - 20 * MiB
    del x
    assert torch.cuda.max_memory_allocated() == 3 * MiB
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == 0 and torch.cuda.max_memory_reserved() == 20 * MiB
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0
    assert "Allocated memory" in torch.cuda.memory_summary()


def test_out_of_memory_can_be_caught() -> None:
    """As `auto_find_batch_size` does: half the batch, until it fits."""
    batch, model = 1 << 20, None
    with understudy.simulate("t4"):
        model = nn.Linear(1000, 1000).cuda()
        while True:
            try:
                model(torch.empty(batch, 1000, device="cuda")).sum().backward()
                break
            except torch.OutOfMemoryError as error:
                assert "CUDA out of memory" in str(error) and "test_simulator.py" in str(error)
                batch //= 2
        assert 1 << 18 <= batch < 1 << 21
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(0.01)
        with pytest.raises(RuntimeError, match="The allocator may reserve"):
            torch.empty(12 * GiB, dtype=torch.uint8, device="cuda")


def test_settings_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with understudy.simulate("t4"):
        torch.empty(21 * MiB, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_reserved() == 40 * MiB  # pages of 20 MiB
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    with understudy.simulate("t4"):
        torch.cuda.init()
        assert torch.cuda.memory_stats()["max_split_size"] == 64 * MiB
    with understudy.simulate("t4", settings=""):
        torch.empty(1, device="cuda")
        assert torch.cuda.memory_stats()["max_split_size"] == -1


def test_snapshots(two_cards: Machine, tmp_path: Path) -> None:
    torch.cuda.memory._record_memory_history(max_entries=100)
    x = torch.empty(MiB, device="cuda")
    torch.cuda.memory._dump_snapshot(str(tmp_path / "snapshot.pickle"))
    torch.cuda.memory._record_memory_history(enabled=None)
    snapshot = pickle.loads((tmp_path / "snapshot.pickle").read_bytes())
    actions = [entry["action"] for entry in snapshot["device_traces"][0]]
    assert actions[:2] == ["segment_alloc", "alloc"]
    assert any(frame["name"] == "test_snapshots" for frame in snapshot["device_traces"][0][1]["frames"])
    assert snapshot["segments"][0]["allocated_size"] == 4 * MiB
    del x


def test_workspaces_of_streams_that_come_later() -> None:
    """Once the default stream has its workspaces, products are no longer followed; another stream needs one of its own."""
    with understudy.simulate("h100"):
        weight = torch.ones(64, 64, device="cuda", requires_grad=True)
        for _ in range(2):
            (weight @ weight).sum().backward()
        before = torch.cuda.memory_allocated()
        with torch.cuda.stream(torch.cuda.Stream()):
            made = weight.detach() @ weight.detach()
        assert torch.cuda.memory_allocated() == before + made.nbytes + 32 * MiB


@pytest.mark.parametrize(("card", "size"), [("h100", 32 * MiB), ("a100-80", 8_519_680), ("t4", 8_519_680)])
def test_workspaces_of_forward_and_backward(card: str, size: int) -> None:
    with understudy.simulate(card):
        x = torch.empty(4, 4, device="cuda", requires_grad=True)
        y = (x @ x).sum()
        assert size <= torch.cuda.memory_allocated() < size + 4096
        (x @ x).sum()
        y.backward()
        assert 2 * size <= torch.cuda.memory_allocated() < 2 * size + 4096


def test_streams(two_cards: Machine) -> None:
    side = torch.cuda.Stream()
    assert torch.cuda.current_stream() == torch.cuda.default_stream() != side
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() == side
        x = torch.empty(MiB, device="cuda")
    record = two_cards.mode.find_record(x)
    assert record is not None and record.stream == side.stream_id
    y = torch.empty(MiB, device="cuda")  # another stream does not share its segment
    assert torch.cuda.memory_reserved() == 40 * MiB
    x.record_stream(torch.cuda.current_stream())
    del x
    assert torch.cuda.memory_stats()["active_bytes.all.current"] == 8 * MiB
    torch.cuda.synchronize()
    side.wait_stream(torch.cuda.current_stream())
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    end.record()
    assert 0 < start.elapsed_time(end) < 1e5 and any("events" in note for note in two_cards.notes)
    del y


def test_streams_and_events_of_any_accelerator(two_cards: Machine) -> None:
    assert torch.get_device_module() is torch.cuda
    side = torch.Stream(device="cuda")
    assert isinstance(side, torch.cuda.Stream) and side.device == torch.device("cuda:0")
    with side:
        assert torch.accelerator.current_stream() == side
    event = side.record_event()
    assert isinstance(event, torch.Event) and event.query()
    torch.accelerator.current_stream().wait_event(event)
    start, end = torch.Event("cuda", enable_timing=True), torch.Event(enable_timing=True)
    start.record()
    end.record(side)
    assert 1e3 / start.elapsed_time(end) > 0  # programs divide by it


# --- programs -----------------------------------------------------------------------------------------------------------


def test_training_with_amp_and_grad_scaler() -> None:
    with understudy.simulate("t4") as machine:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(0)
        torch.cuda.manual_seed_all(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 10)).to(device)
        optimizer = torch.optim.AdamW(model.parameters())
        scaler = torch.amp.GradScaler("cuda")
        for _ in range(2):
            x, y = torch.randn(8, 64).pin_memory(), torch.randint(0, 10, (8,))
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.float16):
                out = model(x.to(device, non_blocking=True))
                loss = F.cross_entropy(out, y.to(device))
            assert out.dtype is torch.float16 and loss.dtype is torch.float32
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        assert optimizer.state and scaler.get_scale() == 65536.0
        assert any("GradScaler" in note for note in machine.notes)


def test_a_real_module_comes_out_as_stand_ins_and_is_unharmed() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    originals = [*model.parameters(), *model.buffers()]
    with understudy.simulate("t4"):
        assert model.to("cuda") is model
        assert all(type(p) is FakeTensor and p.is_cuda for p in (*model.parameters(), *model.buffers()))
        model(torch.ones(2, 4, device="cuda")).sum().backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
    assert all(a is b for a, b in zip([*model.parameters(), *model.buffers()], originals, strict=True))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_real_tensors_and_numpy(two_cards: Machine) -> None:
    x = torch.from_numpy(np.arange(4))
    assert (x + 1).tolist() == [1, 2, 3, 4]
    assert torch.as_tensor(np.ones((2, 3), dtype=np.float32)).cuda().device == torch.device("cuda:0")
    assert torch.tensor([1.0, 2.0], device="cuda").tolist() == [1.0, 2.0]


def test_real_tensors_are_moved_by_their_methods(two_cards: Machine) -> None:
    with understudy.unset_fake_temporarily():
        real = torch.frombuffer(bytearray(12), dtype=torch.float32)
    assert type(real) is torch.Tensor
    for moved in (real.to("cuda"), real.cuda(), real.to("cuda", torch.float32)):
        assert type(moved) is FakeTensor and moved.device == torch.device("cuda:0") and moved.shape == (3,)
    assert real.to("cpu") is real and real.to(torch.float32) is real
    assert real.cuda(1).device == torch.device("cuda:1")
    losses = torch.func.vmap(
        lambda x, y: F.cross_entropy(x.to("cuda").to(device="cuda").cuda(), y.to(torch.long))
    )
    assert losses(
        torch.ones(4, 5, device="cuda"), torch.zeros(4, dtype=torch.int32, device="cuda")
    ).shape == (4,)


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_sparse_tensors_on_a_card(two_cards: Machine) -> None:
    parts, make = ([[0, 1], [1, 0]],), torch.sparse_coo_tensor
    x = make(*parts, [1.0, 2.0], (2, 2), device="cuda", requires_grad=True)
    assert x.device == torch.device("cuda:0") and x.is_leaf and x.requires_grad
    values = torch.ones(2, device="cuda")
    indices = [torch.tensor(part, device="cuda") for part in parts]
    assert make(*indices, values, (2, 2), device="cuda").device == torch.device("cuda:0")
    product = x.detach() @ torch.ones(2, 5, device="cuda")
    assert (
        product.shape == (2, 5)
        and product.device == torch.device("cuda:0")
        and product.layout is torch.strided
    )


@pytest.mark.parametrize("activities", [("CPU", "CUDA"), ("CUDA",), None])
def test_profilers_see_the_calls_on_the_cpu(
    activities: Any, two_cards: Machine, capfd: pytest.CaptureFixture[str]
) -> None:
    chosen = activities and [getattr(torch.profiler.ProfilerActivity, name) for name in activities]
    with torch.profiler.profile(activities=chosen) as found:
        torch.ones(3, device="cuda") + 1
    assert found.key_averages() is not None
    assert "Failed to record CUDA event" not in capfd.readouterr().err
    assert any("torch.profiler" in note for note in two_cards.notes) == bool(activities)


def test_random_numbers(two_cards: Machine) -> None:
    torch.cuda.manual_seed(5)
    assert torch.cuda.initial_seed() == 5
    state = torch.cuda.get_rng_state()
    torch.cuda.manual_seed_all(6)
    torch.cuda.set_rng_state(state)
    assert torch.cuda.initial_seed() == 5 and len(torch.cuda.get_rng_state_all()) == 2
    generator = torch.Generator("cuda:1").manual_seed(3)
    assert generator.device == torch.device("cuda:1") and generator.initial_seed() == 3
    assert isinstance(generator, torch.Generator) and isinstance(torch.Generator(), torch.Generator)
    assert torch.rand(3, device="cuda:1", generator=generator).device.index == 1


def test_old_tensor_types(two_cards: Machine) -> None:
    x = torch.cuda.FloatTensor(2, 3)
    assert (
        x.shape == (2, 3)
        and isinstance(x, torch.cuda.FloatTensor)
        and not isinstance(x, torch.cuda.HalfTensor)
    )
    assert torch.cuda.LongTensor([1, 2]).tolist() == [1, 2]
    for kind in ("torch.cuda.HalfTensor", torch.cuda.HalfTensor):
        y = torch.ones(2).type(kind)
        assert (y.dtype, y.device.type) == (torch.float16, "cuda")


def test_graphs_are_refused_with_a_word(two_cards: Machine) -> None:
    with pytest.raises(SimulationError, match="CUDA graphs are not simulated") as caught:
        torch.cuda.CUDAGraph()
    assert "without torch.cuda.graph" in str(caught.value)


def test_data_parallel_runs_on_the_first_device(two_cards: Machine) -> None:
    model = nn.DataParallel(nn.Linear(4, 4)).cuda()
    assert model(torch.ones(6, 4)).shape == (6, 4)
    assert any("DataParallel over 2 devices" in note for note in two_cards.notes)


def test_a_process_group_of_one(two_cards: Machine) -> None:
    import torch.distributed as dist

    dist.init_process_group("nccl", rank=0, world_size=1)
    assert dist.get_backend() == "nccl" and dist.get_world_size() == 1
    dist.all_reduce(torch.ones(3, device="cuda"))
    model = nn.parallel.DistributedDataParallel(nn.Linear(1024, 1024, bias=False).cuda(), device_ids=[0])
    for _ in range(2):
        model(torch.ones(2, 1024, device="cuda")).sum().backward()
    # the weight, its gradient, the bucket, and two workspaces
    assert torch.cuda.memory_allocated() == pytest.approx(3 * 4 * MiB + 2 * 8_519_680, abs=20_000)


def test_a_mesh_starts_the_process_group(two_cards: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    try:
        mesh = init_device_mesh("cuda", (1,))
        assert torch.distributed.get_backend() == "nccl" and mesh.get_coordinate() in ([0], (0,))
        assert distribute_tensor(torch.empty(4, 2), mesh, [Shard(0)]).to_local().shape == (4, 2)
    finally:
        torch.distributed.destroy_process_group()


class Partly(torch.nn.Module):
    """One of its layers is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.used(x)


def test_parameters_that_are_not_used_and_objects_of_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    with understudy.simulate("h100", answers="plausible"):
        torch.distributed.init_process_group("nccl")
        try:
            model = torch.nn.parallel.DistributedDataParallel(Partly().cuda(), find_unused_parameters=True)
            for _ in range(3):
                model.zero_grad()
                model(torch.randn(2, 4, device="cuda")).sum().backward()
            assert [p.grad is None for p in model.parameters()] == [False, False, True, True]
            gathered, shared = [None], [{"rank": 0}]
            torch.distributed.all_gather_object(gathered, {"rank": 0})
            torch.distributed.all_gather(
                [lengths := torch.zeros(2, device="cuda")], torch.tensor([3.0, 4.0], device="cuda")
            )
            assert lengths.tolist() == [3.0, 4.0]
            torch.distributed.broadcast_object_list(shared)
            assert gathered == shared == [{"rank": 0}]
        finally:
            torch.distributed.destroy_process_group()


class Wrapped(torch.Tensor):
    """A subclass of a program, on the device of the tensor inside."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls: Any, inner: torch.Tensor) -> Any:
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Wrapped, lambda tensor: tensor.inner, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, cls, func(*args, **kwargs))


def test_subclasses_of_programs_on_a_card(two_cards: Machine) -> None:
    x = Wrapped(torch.randn(4, 4, device="cuda:1")).requires_grad_()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        product = x @ x
    product.sum().backward()
    assert product.dtype is torch.bfloat16 and x.is_cuda and product.device == torch.device("cuda:1")
    assert type(x.grad) is Wrapped and x.grad.inner.device == x.device


@pytest.mark.parametrize(("dtype", "kernel"), [(torch.float32, "efficient"), (torch.bfloat16, "flash")])
def test_jagged_tensors_on_a_card(dtype: torch.dtype, kernel: str) -> None:
    with understudy.simulate("h100") as machine:
        machine.mode.add_listener(calls := Operators())
        layer = torch.nn.Linear(64, 64).to("cuda", dtype)
        rows = [torch.randn(length, 64, dtype=dtype, device="cuda") for length in (3, 5)]
        x = torch.nested.nested_tensor(rows, layout=torch.jagged)
        heads = layer(x).unflatten(-1, [4, 16]).transpose(1, 2)
        attended = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
        attended.values().sum().backward()
        assert layer.weight.grad is not None and attended.device == torch.device("cuda:0")
    assert f"_{kernel}_attention_forward" in calls.names
    assert "addmm" in calls.names and "linear" not in calls.names  # broken up, as in eager


def test_several_small_things(two_cards: Machine) -> None:
    torch.cuda.nvtx.range_push("a")
    torch.cuda.nvtx.range_pop()
    pinned = torch.ones(3).pin_memory()
    assert pinned.is_pinned()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(5, 2)), 2, pin_memory=True)
    assert [batch.cuda().shape[0] for (batch,) in loader] == [2, 2, 1]
    assert not torch.cuda.is_current_stream_capturing()
    torch.cuda.profiler.start()
    torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStop())


# --- entering and leaving ---------------------------------------------------------------------------------------------------


class Stop(BaseException):
    pass


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt, Stop])
def test_torch_is_as_before(error: type[BaseException] | None) -> None:
    with understudy.simulate("t4"):
        pass  # every patch is resolved
    before, driver = state_of_torch(), getattr(torch._C, "_cuda_getDeviceCount", None)  # CUDA builds have it
    if error is None:
        with understudy.simulate("2xh100"):
            torch.cuda.set_device(1)
            torch.empty(3, device="cuda")
    else:
        with pytest.raises(error), understudy.simulate("2xh100"):
            torch.empty(3, device="cuda")
            raise error
    after = state_of_torch()
    assert {place for place, value in after.items() if before[place] is not value} == set()
    assert ACTIVE.machine is None and not torch.cuda.is_available()
    assert getattr(torch._C, "_cuda_getDeviceCount", None) is driver
    assert type(torch.empty(1)) is torch.Tensor


def test_nested_simulations_are_an_error() -> None:
    outer = understudy.simulate("t4")
    with outer:
        with pytest.raises(SimulationError, match=r"t4 .* is already simulated"), understudy.simulate("h100"):
            pass
        with pytest.raises(SimulationError, match="is already active"), outer:
            pass
        assert torch.cuda.get_device_name() == "Tesla T4"
    with outer:  # one after the other works
        assert torch.cuda.device_count() == 1


def test_as_a_decorator() -> None:
    @understudy.simulate("4090")
    def ask(word: str) -> str:
        """Its docstring."""
        return f"{word} {torch.cuda.get_device_name()}"

    assert ask("a").endswith("4090") and ask("b").startswith("b") and ask.__doc__ == "Its docstring."


def test_cards_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "cards.toml").write_text(
        '[tiny]\nname = "Tiny"\nmemory = 1.0\ncapability = "7.5"\n[other]\nmemory = 2\n'
    )
    with understudy.simulate(f"{tmp_path}/cards.toml:2xtiny"):
        assert torch.cuda.get_device_name() == "Tiny" and torch.cuda.device_count() == 2
    with pytest.raises(ValueError, match="has 2 cards, tiny, other: name one of them"):
        understudy.simulate(tmp_path / "cards.toml")
    with understudy.simulate(Card("mine", "Mine", "cuda", memory=GiB, capability=(9, 0)), count=3):
        assert torch.cuda.device_count() == 3 and torch.cuda.mem_get_info()[1] == GiB
    with pytest.raises(UnknownDeviceError, match="did you mean"):
        understudy.simulate("h101")


def test_the_cpu_has_no_cuda() -> None:
    with understudy.simulate("cpu") as machine:
        assert not torch.cuda.is_available()
        x = torch.empty(10)
        assert type(x) is FakeTensor and machine.memory.host.allocated == 40


def test_threads_see_the_machine(two_cards: Machine) -> None:
    seen: list[Any] = []
    thread = threading.Thread(
        target=lambda: seen.append((torch.cuda.device_count(), torch.cuda.memory_allocated()))
    )
    x = torch.empty(MiB, device="cuda")
    thread.start()
    thread.join()
    assert seen == [(2, 4 * MiB)]
    del x


# --- sharded tensors ----------------------------------------------------------------------------------------------------------


class Operators(Listener):
    def __init__(self) -> None:
        self.names: list[str] = []

    def before_operator(self, func: Any, args: Any, kwargs: Any) -> None:
        self.names.append(func.overloadpacket.__name__)


def test_sharded_tensors_are_cast_and_take_the_cards_kernels() -> None:
    from torch.distributed.tensor import DTensor

    constructor = vars(DTensor)["__new__"]
    with understudy.simulate("h100") as machine:
        torch.distributed.init_process_group("nccl", rank=0, world_size=4)
        mesh = torch.distributed.device_mesh.init_device_mesh("cuda", (4,))
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        machine.mode.add_listener(operators := Operators())
        a = distribute_tensor(torch.randn(64, 512, device="cuda"), mesh, [Shard(0)])
        weight = distribute_tensor(
            torch.randn(512, 512, device="cuda", requires_grad=True), mesh, [Replicate()]
        )
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = a @ weight
        assert y.dtype is y.to_local().dtype is torch.bfloat16
        # the cast operands, the local rows of the result and a workspace: nothing of the global size
        assert torch.cuda.max_memory_allocated() - before == 2 * (16 * 512 + 512 * 512 + 16 * 512) + 32 * MiB
        shape = (2, 8, 128, 64)
        q, k, v = (
            distribute_tensor(torch.randn(shape, device="cuda", dtype=torch.bfloat16), mesh, [Shard(1)])
            for _ in "qkv"
        )
        operators.names.clear()
        assert F.scaled_dot_product_attention(q, k, v).to_local().shape == (2, 2, 128, 64)
        assert operators.names.count("_scaled_dot_product_cudnn_attention") == 1
    assert vars(DTensor)["__new__"] is constructor


KERNELS = [
    ("h100", torch.bfloat16, 64, "_scaled_dot_product_cudnn_attention"),
    ("h100", torch.bfloat16, 60, "_scaled_dot_product_flash_attention"),
    ("h100", torch.float32, 64, "_scaled_dot_product_efficient_attention"),
    ("b200", torch.float16, 128, "_scaled_dot_product_cudnn_attention"),
    ("4090", torch.bfloat16, 64, "_scaled_dot_product_flash_attention"),
    ("4090", torch.bfloat16, 224, "_scaled_dot_product_efficient_attention"),
    ("4090", torch.bfloat16, 256, "_scaled_dot_product_flash_attention"),
    ("a100-80", torch.bfloat16, 256, "_scaled_dot_product_flash_attention"),
    ("t4", torch.float16, 64, "_scaled_dot_product_efficient_attention"),
    ("t4", torch.bfloat16, 64, "bmm"),
    ("v100-16", torch.float32, 63, "_scaled_dot_product_efficient_attention"),
    ("a100-80", torch.float32, 63, "bmm"),
]


@pytest.mark.parametrize(("card", "dtype", "width", "kernel"), KERNELS)
def test_the_card_decides_the_kernel_of_attention(
    card: str, dtype: torch.dtype, width: int, kernel: str
) -> None:
    with understudy.simulate(card) as machine:
        machine.mode.add_listener(operators := Operators())
        q = torch.empty(2, 4, 32, width, dtype=dtype, device="cuda", requires_grad=True)
        F.scaled_dot_product_attention(q, q, q).sum().backward()
        forward = [name for name in operators.names if "attention" in name or name == "bmm"]
        assert forward[0] == kernel


def test_masks_and_causality_decide_as_well() -> None:
    def kernel(card: str, mask: bool = False, keys: int = 32, is_causal: bool = False) -> str:
        with understudy.simulate(card) as machine:
            machine.mode.add_listener(operators := Operators())
            q = torch.empty(2, 4, 32, 64, dtype=torch.float16, device="cuda")
            k = torch.empty(2, 4, keys, 64, dtype=torch.float16, device="cuda")
            bias = torch.ones(32, keys, dtype=torch.bool, device="cuda") if mask else None
            F.scaled_dot_product_attention(q, k, k, bias, is_causal=is_causal)
            return next(name for name in operators.names if "attention" in name).split("_")[4]

    assert kernel("a100-80") == "flash" and kernel("a100-80", mask=True) == "efficient"
    assert kernel("a100-80", keys=16, is_causal=True) == "efficient" and kernel("h100", mask=True) == "cudnn"
    assert kernel("h100", keys=1) == "flash"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
        assert kernel("h100") == "flash"


def test_layout_of_masks_decides_as_well() -> None:
    """Kernels read a mask along its rows, which begin at multiples of 8 elements."""
    with understudy.simulate("a100-80") as machine:
        machine.mode.add_listener(operators := Operators())
        q = torch.empty(2, 4, 32, 64, dtype=torch.float16, device="cuda")

        def names(mask: torch.Tensor) -> list[str]:
            operators.names.clear()
            F.scaled_dot_product_attention(q, q[:, :, : mask.shape[-1]], q[:, :, : mask.shape[-1]], mask)
            return operators.names

        def bias(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.float16, device="cuda")

        assert "constant_pad_nd" not in names(bias(32, 24))
        assert "constant_pad_nd" in names(bias(32, 20))
        assert "bmm" in names(bias(32, 1).expand(32, 32)) and "bmm" in names(bias(32, 32).t())


def test_half_types_are_widened_by_the_kernel_of_softmax() -> None:
    with understudy.simulate("h100") as machine:
        machine.mode.add_listener(operators := Operators())
        x = torch.empty(8, 1024, dtype=torch.float16, device="cuda", requires_grad=True)
        with torch.autocast("cuda", dtype=torch.float16):
            y = x.softmax(-1)
        assert (
            y.dtype is torch.float32 and "_softmax" in operators.names and "_to_copy" not in operators.names
        )
        y.sum().backward()
        assert x.grad is not None and x.grad.dtype is torch.float16
        operators.names.clear()
        x.detach().bfloat16().log_softmax(-1, dtype=torch.float32)
        assert operators.names[-2:] == ["_to_copy", "_log_softmax"]


def test_bias_of_a_batch_in_another_order_is_added_in_place() -> None:
    """The input is copied to make it a matrix; then there is one result, to which the bias is added."""
    with understudy.simulate("h100") as machine:
        x = torch.empty(16, 4, 64, device="cuda").transpose(0, 1).requires_grad_()
        layer = torch.nn.Linear(64, 192, device="cuda")
        machine.mode.add_listener(operators := Operators())
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y = layer(x)
        assert operators.names[-1] == "add_" and "add" not in operators.names
        copied, result = 4 * 64 * 64, 4 * 64 * 192
        assert torch.cuda.max_memory_allocated() - before == copied + result + 32 * MiB
        y.sum().backward()
        assert layer.bias.grad is not None and x.grad is not None


def test_rms_norm_is_one_kernel() -> None:
    """It keeps its input, its weight and a number for each row."""
    with understudy.simulate("h100") as machine:
        machine.mode.add_listener(operators := Operators())
        x = torch.empty(4, 128, 1024, device="cuda", requires_grad=True)
        weight = torch.ones(1024, device="cuda", requires_grad=True)
        before = torch.cuda.memory_allocated()
        y = F.rms_norm(x, (1024,), weight)
        assert torch.cuda.memory_allocated() - before == 4 * 512 * 1024 + 4 * 512
        y.pow(2).sum().backward()
        assert (
            operators.names.count("_fused_rms_norm") == operators.names.count("_fused_rms_norm_backward") == 1
        )
        assert x.grad is not None and weight.grad is not None and weight.grad.shape == (1024,)
        operators.names.clear()
        with pytest.warns(UserWarning, match="dtype"):
            F.rms_norm(x, (1024,), weight.half())  # in steps
        assert "_fused_rms_norm" not in operators.names
        (first,) = torch.autograd.grad(F.rms_norm(x, (1024,), weight).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.pow(2).sum(), weight)
        assert second.shape == weight.shape


FIRST_USE = """
import sys, threading, torch, understudy
sys.setswitchinterval(1e-6)
barrier, seen = threading.Barrier(8), []
def run():
    with understudy.FakeTensorMode():
        barrier.wait()
        x = torch.empty(8, 8, device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            seen.append((x @ x).dtype)
threads = [threading.Thread(target=run) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert seen == [torch.bfloat16] * 8, seen
"""


def test_eight_threads_at_the_first_use_of_a_device() -> None:
    subprocess.run(
        [sys.executable, "-c", FIRST_USE],
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


# --- mixtures of experts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["Mixtral", "Qwen2Moe"])
def test_mixtures_of_experts(family: str, dtype: torch.dtype) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100,
        "num_key_value_heads": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32, "num_local_experts": 4, "num_experts": 4,
    }  # fmt: skip
    config = getattr(transformers, f"{family}Config")(**sizes)
    with understudy.simulate("h100"):
        model = getattr(transformers, f"{family}ForCausalLM")(config).to("cuda", dtype)
        tokens = torch.randint(0, 100, (2, 16), device="cuda")
        model(input_ids=tokens, labels=tokens).loss.backward()
        assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())


# --- interrupts ---------------------------------------------------------------------------------------------------------------


def test_a_simulation_that_an_interrupt_left_is_repaired(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("understudy.simulation.simulator.clear_cast_cache", interrupt)
        with pytest.raises(KeyboardInterrupt), understudy.simulate("h100"):
            pass
    with understudy.simulate("t4") as machine:
        assert ACTIVE.machine is machine
    assert ACTIVE.machine is None


def interrupt() -> None:
    raise KeyboardInterrupt


def test_devices_by_their_number() -> None:
    with understudy.simulate("2xh100"):
        model = torch.nn.Linear(3, 3).to(1)
        assert model.weight.device == torch.device("cuda", 1)
        assert model.to(device=0).weight.device == torch.device("cuda", 0)
        x = torch.ones(2, 3, device=1)
        assert x.device == torch.device("cuda", 1)
        assert x.to(device=0).device == x.to(0, torch.float16).device == torch.device("cuda", 0)
        assert (
            torch.zeros_like(x, device=0).device
            == torch.tensor([1.0], device=0).device
            == torch.device("cuda", 0)
        )
        assert x.new_zeros(3).device == torch.device("cuda", 1)
        with torch.device("cuda:1"):
            assert torch.empty(2).device == torch.device("cuda", 1)
    with torch.device("meta"):
        assert torch.empty(2).is_meta


def test_the_class_of_devices_takes_numbers() -> None:
    before, real = torch.device, torch.device("cuda", 1)
    with understudy.simulate("2xh100"):
        card = torch.device(1)
        assert card == real and type(card) is before
        assert torch.ones(3, device=card).device == real
        with torch.device(1):
            assert torch.zeros(3).device == real
        assert (
            torch.device("cuda", 1)
            == torch.device("cuda:1")
            == torch.device(type="cuda", index=1)
            == torch.device(real)
        )
        # It stands for torch's own class.
        assert isinstance(card, torch.device) and not isinstance("cuda", torch.device)
        assert issubclass(type(card), torch.device)
        assert {int: 1, torch.device: 2}[type(card)] == {type(card): 2}[torch.device] == 2
        assert pickle.loads(pickle.dumps(card)) == card
        with pytest.raises(RuntimeError, match="Expected one of cpu, cuda"):
            torch.device("spam")
    assert torch.device is before
    if (
        not torch.backends.cuda.is_built()
    ):  # a build for CUDA takes numbers for its cards, also where there are none
        with understudy.simulate("cpu"), pytest.raises(RuntimeError, match="accelerator"):
            torch.device(0)


@pytest.mark.parametrize("name", VIEWS)
def test_views_in_inference_mode_are_tracked(name: str) -> None:
    """Composite operators are broken up on a simulated card: the operators inside track views as in eager."""

    def look(x: torch.Tensor) -> tuple[object, ...]:
        with torch.inference_mode():
            view = VIEWS[name](x)
        version = None if view.is_inference() else view._version
        return view.requires_grad, view.is_leaf, view._is_view(), view._base is x, version

    expected = look(torch.randn(2, 6, requires_grad=True))
    with understudy.simulate("h100"):
        assert look(torch.randn(2, 6, device="cuda", requires_grad=True)) == expected


@pytest.mark.parametrize("name", WRITES)
def test_writes_in_inference_mode_are_counted(name: str) -> None:
    def count(x: torch.Tensor) -> int:
        with torch.inference_mode():
            WRITES[name](x)
        return x._version

    expected = count(torch.ones(2, 6))
    assert expected
    with understudy.simulate("h100"), torch.device("cuda"):
        assert count(torch.ones(2, 6)) == expected


def test_memory_of_a_caught_error_is_free_again() -> None:
    """Programs that look for the largest batch catch the error, and try a smaller one: what the frames held is gone."""

    def add() -> None:
        held = torch.empty(8 << 30, dtype=torch.uint8, device="cuda")
        held + torch.empty(8 << 30, dtype=torch.uint8, device="cuda")

    refused = 0
    gc.disable()
    try:
        with understudy.simulate("t4"):
            for _ in range(2):
                try:
                    add()
                except torch.OutOfMemoryError:
                    refused += 1
                assert torch.cuda.memory_allocated() == 0
    finally:
        gc.enable()
    assert refused == 2


@pytest.mark.parametrize(
    "settings",
    [{}, {"shuffle": True, "generator": "cuda"}, {"num_workers": 2}, {"sampler": "weighted"}],
    ids=str,
)
def test_data_loaders_with_a_default_device(settings: dict[str, Any]) -> None:
    """Which examples are taken is drawn for real, on the CPU."""
    with understudy.simulate("t4", answers="plausible"), torch.device("cuda"):
        data = torch.utils.data.TensorDataset(torch.randn(8, 3))
        if "generator" in settings:
            settings = {**settings, "generator": torch.Generator("cuda")}
        if "sampler" in settings:
            settings = {"sampler": torch.utils.data.WeightedRandomSampler([1.0] * 8, 8)}
        batches = [
            (x.device.type, tuple(x.shape)) for (x,) in torch.utils.data.DataLoader(data, 4, **settings)
        ]
    assert batches == [("cuda", (4, 3))] * 2
