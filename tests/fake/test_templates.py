"""Stand-ins with symbolic sizes are made from templates, and share nothing but their sizes."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from understudy import FakeTensorMode, ShapeEnv, _torch

REAL = torch.randn(4, 6)


def stand_in(mode: FakeTensorMode) -> torch.Tensor:
    return mode.from_tensor(REAL, source="x", symbolic_context=("rows", "columns"))


@pytest.fixture
def mode() -> FakeTensorMode:
    return FakeTensorMode(shape_env=ShapeEnv())


@pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
def test_each_has_a_storage_and_a_version_of_its_own(mode: FakeTensorMode, device: str) -> None:
    with mode:
        x = stand_in(mode).to(device)
        fakes = [x + 1 for _ in range(4)]
        assert len({_torch.storage_id(fake) for fake in fakes}) == 4
        fakes[1].mul_(2)
        assert [fake._version for fake in fakes] == [0, 1, 0, 0]
        assert all(fake.device.type == device for fake in fakes)


def test_what_is_saved_for_backward_is_not_spoiled_by_others(mode: FakeTensorMode) -> None:
    with mode:
        x = stand_in(mode).requires_grad_()
        saved = x.exp()
        (x.detach() + 1).add_(1)
        saved.sum().backward()
        assert x.grad is not None and x.grad.shape == x.shape


def test_views_count_writes_with_their_base(mode: FakeTensorMode) -> None:
    with mode:
        base = stand_in(mode) + 1
        view, other = base.t(), (base + 1).t()
        view.add_(1)
        assert (base._version, view._version, other._version) == (1, 1, 0)
        assert _torch.storage_id(view) == _torch.storage_id(base)
        assert view._base is base


def test_a_template_keeps_no_storage_alive(mode: FakeTensorMode) -> None:
    with mode:
        fake = stand_in(mode) + 1
        reference = _torch.weak_storage(fake.untyped_storage())
        del fake
        gc.collect()
        assert _torch.is_expired(reference)


def test_inference_mode(mode: FakeTensorMode) -> None:
    with mode:
        x = stand_in(mode)
        for _ in range(2):
            with torch.inference_mode():
                assert (x * 3).is_inference() and not x.t().is_inference()
            outside = x * 3
            assert not outside.is_inference() and outside._version == 0
            assert outside.requires_grad_().exp().requires_grad


def test_asking_ahead_takes_no_guards() -> None:
    env = ShapeEnv(specialize_zero_one=False)
    mode = FakeTensorMode(shape_env=env)
    with mode:
        x = stand_in(mode)
        turned = [x.t() for _ in range(5)]  # contiguous if there is but one row, or one column
        assert not env.guards
        assert not turned[-1].is_contiguous() and env.guards


def test_threads_do_not_mix_storages(mode: FakeTensorMode) -> None:
    made: list[list[torch.Tensor]] = []

    def work() -> None:
        with mode:
            made.append([x + 1 for _ in range(200)])

    x = stand_in(mode)
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    fakes = [fake for part in made for fake in part]
    assert len({_torch.storage_id(fake) for fake in fakes}) == len(fakes) == 800


def test_slices_to_the_end_are_seen_as_such(mode: FakeTensorMode) -> None:
    """The end of `x[:]` is the largest number there is, and no size is beyond it."""
    with mode:
        x = stand_in(mode)
        assert x[:, None]._base is x and x[:] is not None
        assert not mode.shape_env.guards  # type: ignore[union-attr]
