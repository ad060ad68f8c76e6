"""First values without a dispatch: nobody can tell, except by the clock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from understudy import FakeTensor, FakeTensorMode, rule
from understudy.errors import DataDependentOutputException
from understudy.ops import registry

WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "normal_": lambda t: t.normal_(0.0, 0.02),
    "normal_ by default": lambda t: t.normal_(),
    "uniform_": lambda t: t.uniform_(-1, 1),
    "zero_": lambda t: t.zero_(),
    "fill_": lambda t: t.fill_(3),
    "fill_ with a tensor": lambda t: t.fill_(torch.tensor(3.0)),
}
INITS: dict[str, Callable[[torch.Tensor], Any]] = {
    "normal_": nn.init.normal_,
    "uniform_": nn.init.uniform_,
    "trunc_normal_": nn.init.trunc_normal_,
    "constant_": lambda t: nn.init.constant_(t, 2.0),
    "ones_": nn.init.ones_,
    "zeros_": nn.init.zeros_,
    "xavier_uniform_": nn.init.xavier_uniform_,
    "xavier_normal_": nn.init.xavier_normal_,
    "kaiming_uniform_": nn.init.kaiming_uniform_,
    "kaiming_normal_": nn.init.kaiming_normal_,
}
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(4, 3),
    "linear without bias": lambda: nn.Linear(4, 3, bias=False),
    "convolution": lambda: nn.Conv2d(3, 8, 3),
    "transposed convolution": lambda: nn.ConvTranspose1d(3, 8, 3, bias=False),
    "embedding": lambda: nn.Embedding(10, 4, padding_idx=2),
    "batch norm": lambda: nn.BatchNorm2d(5),
    "layer norm": lambda: nn.LayerNorm(5),
    "attention": lambda: nn.MultiheadAttention(8, 2),
    "recurrent": lambda: nn.LSTM(4, 5),
}


class Heard(TorchDispatchMode):
    """Takes down the operators that reach it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.fixture
def mode() -> Iterator[FakeTensorMode]:
    with FakeTensorMode() as active:
        yield active


# --- what a write leaves behind -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WRITES)
def test_a_write_is_counted(name: str) -> None:
    real = torch.ones(3, 4)
    WRITES[name](real)
    with FakeTensorMode():
        fake = torch.ones(3, 4)
        assert WRITES[name](fake) is fake
    assert fake._version == real._version == 1


@pytest.mark.parametrize("name", INITS)
def test_an_initialiser_counts_as_on_a_real_parameter(name: str) -> None:
    real = nn.Parameter(torch.ones(3, 4))
    INITS[name](real)
    with FakeTensorMode():
        fake = nn.Parameter(torch.ones(3, 4))
        assert INITS[name](fake) is fake
    if name != "trunc_normal_":  # draws again and again, by inverting a distribution
        assert fake._version == real._version
    assert fake.requires_grad and fake.is_leaf


@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_initialised_as_often_as_real_ones(name: str, mode: FakeTensorMode) -> None:
    fake = LAYERS[name]()
    mode.__exit__(None, None, None)
    try:
        real = LAYERS[name]()
    finally:
        mode.__enter__()
    counts = {name: value._version for name, value in fake.state_dict(keep_vars=True).items()}
    assert counts == {name: value._version for name, value in real.state_dict(keep_vars=True).items()}


def test_views_count_together(mode: FakeTensorMode) -> None:
    base = torch.empty(4, 6)
    base.t().zero_()
    base[1].normal_(0.0, 1.0)
    assert base._version == 2


# --- values that are known ------------------------------------------------------------------------------------


def test_a_fill_is_known_where_the_values_were(mode: FakeTensorMode) -> None:
    ones, zeros, count = torch.zeros(2, 2), torch.arange(3.0), torch.tensor(5)
    assert ones.fill_(1).tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert zeros.zero_().tolist() == [0.0, 0.0, 0.0]
    assert count.zero_().item() == 0
    assert count.fill_(7).item() == 7 and isinstance(count.item(), int)
    assert torch.zeros(2, dtype=torch.bool).fill_(2).tolist() == [True, True]


def test_a_fill_of_a_part_leaves_the_rest(mode: FakeTensorMode) -> None:
    row, numbers = torch.arange(4), torch.tensor([1, 2, 3])
    row[1:3].fill_(9)
    numbers[0].zero_()
    assert row.tolist() == [0, 9, 9, 3]
    assert numbers.tolist() == [0, 2, 3]
    row[:2].zero_()
    assert row.tolist() == [0, 0, 9, 3]


def test_a_fill_through_a_view_of_everything(mode: FakeTensorMode) -> None:
    base = torch.arange(4.0)
    base.view(2, 2).fill_(5)
    assert base.tolist() == [5.0] * 4
    negative = torch.zeros(2, dtype=torch.complex64).conj().imag
    assert negative.is_neg()
    negative.fill_(2)
    assert negative.tolist() == [2.0, 2.0]


def test_an_earlier_answer_is_not_spoilt(mode: FakeTensorMode) -> None:
    values = torch.arange(3)
    doubled = values * 2
    values.zero_()
    assert doubled.tolist() == [0, 2, 4]
    again = values + 1
    values.fill_(8)
    assert again.tolist() == [1, 1, 1]


@pytest.mark.parametrize("draw", ["normal_", "uniform_"])
def test_random_values_are_not_known(draw: str, mode: FakeTensorMode) -> None:
    values = torch.zeros(3)
    view = values[:2]
    getattr(values, draw)(0.0, 1.0)
    for tensor in (values, view):
        with pytest.raises(DataDependentOutputException):
            tensor.tolist()


def test_memory_as_it_was_found_stays_unknown(mode: FakeTensorMode) -> None:
    with pytest.raises(DataDependentOutputException):
        torch.empty(3).zero_().tolist()


# --- refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WRITES)
def test_a_leaf_that_requires_its_gradient_is_not_written(name: str) -> None:
    def attempt() -> str:
        leaf = torch.ones(3, requires_grad=True)
        with pytest.raises(RuntimeError) as error:
            WRITES[name](leaf)
        assert leaf._version == 0
        return str(error.value)

    expected = attempt()
    with FakeTensorMode():
        assert attempt() == expected


def test_a_result_takes_the_write_into_its_history(mode: FakeTensorMode) -> None:
    leaf = torch.ones(3, requires_grad=True)
    result = leaf * 2
    result.zero_()
    assert result.grad_fn is not None and "Zero" in type(result.grad_fn).__name__


REFUSED: dict[str, Callable[[Any], Any]] = {
    "negative deviation": lambda call: call("normal_", torch.empty(3), 0.0, -1.0),
    "no interval": lambda call: call("uniform_", torch.empty(3), 1.0, 0.0),
    "normal integers": lambda call: call("normal_", torch.empty(3, dtype=torch.int64), 0.0, 1.0),
    "uniform integers": lambda call: call("uniform_", torch.empty(3, dtype=torch.int64), 0.0, 1.0),
    "overlapping memory": lambda call: call("normal_", torch.empty(1).expand(3), 0.0, 1.0),
    "complex in real": lambda call: call("fill_", torch.empty(3), 1j),
    "a row as the value": lambda call: call("fill_", torch.empty(3), torch.ones(3)),
    "no value": lambda call: call("fill_", torch.empty(3)),
    "too many numbers": lambda call: call("normal_", torch.empty(3), 0.0, 1.0, 2.0),
    "unknown word": lambda call: call("normal_", torch.empty(3), 0.0, 1.0, deviation=1.0),
    "text": lambda call: call("fill_", torch.empty(3), "one"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_are_those_of_the_dispatcher(name: str, mode: FakeTensorMode) -> None:
    def by_method(write: str, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return getattr(tensor, write)(*args, **kwargs)

    def by_dispatch(write: str, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return getattr(torch.Tensor, write)(tensor, *args, **kwargs)

    errors = []
    for call in (by_method, by_dispatch):
        with pytest.raises((RuntimeError, TypeError, ValueError)) as error:
            REFUSED[name](call)
        errors.append((type(error.value), str(error.value).split("\n")[0]))
    assert errors[0] == errors[1]


def test_a_layer_without_elements_warns(mode: FakeTensorMode) -> None:
    with pytest.warns(UserWarning, match="zero-element"):
        nn.Linear(0, 3)


@pytest.mark.parametrize("name", WRITES)
def test_a_tensor_of_inference_mode_stays_there(name: str, mode: FakeTensorMode) -> None:
    with torch.inference_mode():
        inside = torch.ones(3)
        WRITES[name](inside)
    with pytest.raises(RuntimeError, match="inference"):
        WRITES[name](inside)


# --- who listens, hears ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("below", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_other_modes_hear_what_a_real_run_does(name: str, below: bool) -> None:
    with Heard() as real:
        LAYERS[name]()
    heard = Heard()
    with heard if below else FakeTensorMode(), FakeTensorMode() if below else heard:
        LAYERS[name]()
    # A parameter made of a stand-in is detached by an operator, of a real tensor without one.
    assert [op for op in heard.names if op != "aten::detach"] == real.names or below
    assert "aten::detach" in heard.names or below


def test_a_function_mode_hears_the_public_names(mode: FakeTensorMode) -> None:
    class Functions(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(func)
            return func(*args, **(kwargs or {}))

    weight = torch.empty(3, 4)
    with Functions() as functions:
        weight.zero_()
        weight.detach()
        nn.init.kaiming_uniform_(weight)
        nn.Linear(3, 4)
    assert torch.Tensor.zero_ in functions.seen and torch.Tensor.detach in functions.seen
    assert functions.seen.count(nn.init.kaiming_uniform_) == 2


def test_the_profiler_hears(mode: FakeTensorMode) -> None:
    weight = torch.empty(3)
    with torch.profiler.profile() as profile:
        weight.zero_()
        nn.init.normal_(weight)
    assert {"aten::zero_", "aten::normal_"} <= {event.name for event in profile.events()}


def test_a_mode_with_a_dispatch_of_its_own_hears() -> None:
    class Listening(FakeTensorMode):
        heard: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.heard.append(func.name())
            return super().__torch_dispatch__(func, types, args, kwargs)

    with Listening():
        nn.Parameter(torch.empty(3)).data.zero_()
    assert {"aten::detach", "aten::zero_"} <= set(Listening.heard)


def test_a_rule_of_the_user_is_asked(mode: FakeTensorMode) -> None:
    asked: list[str] = []

    @rule("aten::zero_")
    def zero(a: Any) -> Any:
        asked.append("zero_")
        return NotImplemented

    try:
        torch.empty(3, 5, 7).zero_()
    finally:
        registry.user_rule.replace(None, "aten::zero_")
    assert asked == ["zero_"]


@pytest.mark.parametrize("option", ["crosscheck", "cache"])
def test_modes_that_are_to_check_do(option: str) -> None:
    fake_mode = FakeTensorMode(crosscheck=option == "crosscheck")
    if option == "cache":
        fake_mode.cache_enabled = False
    assert not fake_mode.can_skip_dispatch
    with fake_mode:
        assert nn.Linear(3, 4).weight._version == 1


# --- autograd's other ways ------------------------------------------------------------------------------------


def test_a_dual_tensor_loses_its_tangent(mode: FakeTensorMode) -> None:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(3), torch.ones(3))
        tangent = forward_ad.unpack_dual(dual).tangent
        assert tangent is not None
        dual.zero_()
        assert forward_ad.unpack_dual(dual).tangent.tolist() == [0.0, 0.0, 0.0]


def test_inside_transforms(mode: FakeTensorMode) -> None:
    def zeroed(x: torch.Tensor) -> torch.Tensor:
        return torch.empty(3).zero_() + x.clone().fill_(2).sum() + x.detach()

    assert torch.func.vmap(zeroed)(torch.ones(5, 3)).shape == (5, 3)
    assert torch.func.grad(lambda x: (x * x.detach()).sum())(torch.ones(3)).shape == (3,)


# --- detach ---------------------------------------------------------------------------------------------------

DETACHED: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.empty(4, 6),
    "known": lambda: torch.zeros(4, 6),
    "elsewhere": lambda: torch.empty(4, 6, device="cuda"),
    "transposed": lambda: torch.empty(4, 6).t(),
    "part": lambda: torch.empty(4, 6)[1:, 2:],
    "expanded": lambda: torch.empty(1, 3).expand(4, 3),
    "conjugate": lambda: torch.empty(3, dtype=torch.complex64).conj(),
    "leaf": lambda: torch.empty(3, requires_grad=True),
    "result": lambda: torch.empty(3, requires_grad=True) * 2,
    "view of a result": lambda: (torch.empty(3, 4, requires_grad=True) * 2).t(),
    "sparse": lambda: torch.eye(3).to_sparse(),
}


def facts(source: Any, detached: Any) -> Any:
    before = detached._version
    if detached.layout is torch.strided:
        with torch.no_grad():
            source.zero_()
    return {
        "spec": detached._spec,
        "kind": type(detached),
        "mode": detached.fake_mode,
        "known": detached._determined is source._determined,
        "versions": (before, detached._version, source._version),
        "autograd": (
            detached.requires_grad,
            detached.is_leaf,
            detached.grad_fn,
            detached._is_view(),
            detached._base,
        ),
        "shape": (
            detached.shape,
            detached.layout is torch.strided and (detached.stride(), detached.storage_offset()),
        ),
        "bits": (detached.is_conj(), detached.is_neg(), detached.is_inference()),
        "device": detached.device,
    }


@pytest.mark.parametrize("name", DETACHED)
def test_detach_is_what_the_dispatcher_makes_of_it(name: str, mode: FakeTensorMode) -> None:
    first, second = DETACHED[name](), DETACHED[name]()
    ours, theirs = facts(first, first.detach()), facts(second, torch.Tensor.detach(second))
    assert ours == theirs
    assert ours["autograd"][0] is False


def test_a_detached_tensor_shares_its_storage(mode: FakeTensorMode) -> None:
    values = torch.zeros(3)
    detached = values.detach()
    assert detached.untyped_storage()._cdata == values.untyped_storage()._cdata
    detached.fill_(4)
    assert values.tolist() == [4.0, 4.0, 4.0]


def test_a_detached_tensor_refuses_to_be_resized_as_a_real_one_does() -> None:
    def attempt() -> str | None:
        try:
            torch.ones(3).detach().resize_(5)
        except RuntimeError as error:
            return str(error)
        return None

    expected = attempt()
    with FakeTensorMode():
        assert (attempt() is None) == (expected is None)


def test_parameters(mode: FakeTensorMode) -> None:
    parameter = nn.Parameter(torch.ones(2))
    assert isinstance(parameter, nn.Parameter) and isinstance(parameter, FakeTensor)
    assert parameter.requires_grad and parameter.is_leaf and parameter.tolist() == [1.0, 1.0]
    assert not nn.Parameter(torch.ones(2), requires_grad=False).requires_grad


# --- torch is left as it was found ----------------------------------------------------------------------------

PATCHED = [(nn.init, f"_no_grad_{name}_") for name in ("uniform", "normal", "trunc_normal", "fill", "zero")]
PATCHED += [(nn.Linear, "reset_parameters"), (nn.modules.conv._ConvNd, "reset_parameters")]


def test_torch_is_restored() -> None:
    before = [vars(place)[name] for place, name in PATCHED]
    with FakeTensorMode():
        nn.Linear(3, 4)
    assert [vars(place)[name] for place, name in PATCHED] == before


def test_replaced_initialisers_are_asked(mode: FakeTensorMode, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []
    monkeypatch.setattr(nn.init, "kaiming_uniform_", lambda t, **_: seen.append(tuple(t.shape)))
    layer = nn.Linear(3, 4, bias=False)
    assert seen == [(4, 3)] and layer.weight._version == 0


def test_real_layers_of_other_threads_get_their_values(mode: FakeTensorMode) -> None:
    made: list[nn.Linear] = []

    def make() -> None:
        layer = nn.Linear(8, 8)
        nn.init.ones_(layer.bias)
        made.append(layer)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    weight, bias = made[0].weight, made[0].bias
    mode.__exit__(None, None, None)
    try:
        assert type(weight) is nn.Parameter
        assert weight.abs().max() <= 8**-0.5 and weight.std() > 0.05
        assert bias.tolist() == [1.0] * 8
    finally:
        mode.__enter__()
