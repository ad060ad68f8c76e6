"""Conversion of real tensors: metadata, aliasing and autograd structure come along; nothing is kept alive."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from understudy import (
    FakeCopyMode,
    FakeTensor,
    FakeTensorConverter,
    FakeTensorMode,
    MixedTensorsError,
    ShapeEnv,
    UnsupportedFakeTensorException,
    dims,
)
from understudy._torch import unwrap
from understudy.fake.convert import SWEEP_FIRST_AT


@pytest.fixture
def mode() -> FakeTensorMode:
    return FakeTensorMode()


def assert_same_metadata(fake: torch.Tensor, real: torch.Tensor) -> None:
    assert type(fake) is FakeTensor
    assert fake.shape == real.shape
    assert fake.dtype is real.dtype
    assert fake.device == real.device
    assert fake.layout is real.layout
    assert fake.requires_grad == real.requires_grad
    assert fake.is_leaf == real.is_leaf
    assert fake.is_conj() == real.is_conj()
    assert fake.is_neg() == real.is_neg()
    assert fake.is_inference() == real.is_inference()
    if real.layout is torch.strided:
        assert fake.stride() == real.stride()
        assert fake.storage_offset() == real.storage_offset()
        assert fake.untyped_storage().nbytes() == real.untyped_storage().nbytes()


LAYOUTS = {
    "contiguous": lambda: torch.randn(3, 4),
    "scalar": lambda: torch.tensor(3.0),
    "empty": lambda: torch.empty(0, 4),
    "transposed": lambda: torch.randn(3, 4).t(),
    "sliced": lambda: torch.randn(6, 8)[1:5:2, 3:],
    "expanded": lambda: torch.randn(1, 4).expand(3, 4),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "overlapping": lambda: torch.randn(20).as_strided((4, 5), (2, 1), 3),
    "larger storage": lambda: torch.randn(100)[:4],
    "half": lambda: torch.randn(3, dtype=torch.bfloat16),
    "complex": lambda: torch.randn(3, dtype=torch.complex64),
    "conj": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "neg": lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
    "bool": lambda: torch.ones(3, dtype=torch.bool),
    "uint16": lambda: torch.ones(3, dtype=torch.uint16),
    "float8": lambda: torch.ones(3).to(torch.float8_e4m3fn),
    "meta": lambda: torch.empty(3, 4, device="meta"),
    "meta view": lambda: torch.empty(3, 4, device="meta")[1:],
    "requires grad": lambda: torch.randn(3, requires_grad=True),
    "result": lambda: torch.randn(3, requires_grad=True) * 2,
    "view of leaf": lambda: torch.randn(4, 4, requires_grad=True)[1:].t(),
    "real view of complex leaf": lambda: torch.view_as_real(
        torch.randn(3, dtype=torch.complex64, requires_grad=True)
    ),
    "conj of leaf": lambda: torch.randn(3, dtype=torch.complex64, requires_grad=True).conj(),
    "neg of leaf": lambda: torch.randn(3, dtype=torch.complex64, requires_grad=True).conj().imag,
    "complex view of real leaf": lambda: torch.view_as_complex(torch.randn(3, 2, requires_grad=True)),
    "view of result": lambda: (torch.randn(4, 4, requires_grad=True) * 2)[1:],
}


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
def test_metadata_comes_along(make: Any, mode: FakeTensorMode) -> None:
    real = make()
    assert_same_metadata(mode.from_tensor(real), real)


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
def test_conversion_inside_the_mode_is_the_same(make: Any, mode: FakeTensorMode) -> None:
    real = make()
    with mode:
        fake = mode.from_tensor(real)
    assert_same_metadata(fake, real)
    assert mode.from_tensor(real) is fake


def test_inference_tensors_stay_inference_tensors(mode: FakeTensorMode) -> None:
    with torch.inference_mode():
        real = torch.randn(3, 4)
    assert_same_metadata(mode.from_tensor(real), real)
    with torch.inference_mode():
        inside = mode.from_tensor(torch.randn(2))
        assert inside.is_inference()
    normal = torch.randn(2)
    with torch.inference_mode():
        assert not mode.from_tensor(normal).is_inference()


def test_a_fake_of_the_mode_is_itself(mode: FakeTensorMode) -> None:
    fake = mode.from_tensor(torch.randn(3))
    assert mode.from_tensor(fake) is fake


def test_a_fake_of_another_mode_is_converted_like_a_real_tensor(mode: FakeTensorMode) -> None:
    other = FakeTensorMode()
    real = torch.randn(4, 6, requires_grad=True)
    theirs = other.from_tensor(real)
    ours, row = mode.from_tensor(theirs), mode.from_tensor(theirs.detach().t()[1:])
    assert ours is not theirs and ours is mode.from_tensor(theirs)
    assert (ours.fake_mode, theirs.fake_mode) == (mode, other)
    assert (ours.shape, ours.stride(), ours.requires_grad) == ((4, 6), (6, 1), True)
    assert (row.shape, row.stride(), row.storage_offset()) == ((5, 4), (1, 6), 1)
    assert row.untyped_storage()._cdata == ours.untyped_storage()._cdata


def test_a_fake_of_another_mode_keeps_its_symbols_if_the_environment_is_the_same() -> None:
    env = ShapeEnv()
    first, second = FakeTensorMode(shape_env=env), FakeTensorMode(shape_env=env)
    theirs = first.from_tensor(torch.randn(10), source="x", symbolic_context=dims("n"))
    ours = second.from_tensor(theirs)
    assert ours.fake_mode is second and ours.spec is theirs.spec
    with pytest.raises(MixedTensorsError, match="another FakeTensorMode and ShapeEnv"):
        FakeTensorMode(shape_env=ShapeEnv()).from_tensor(theirs)
    with pytest.raises(MixedTensorsError, match="another FakeTensorMode and ShapeEnv"):
        FakeTensorMode().from_tensor(theirs)


def test_the_same_meta_tensor_gives_the_same_fake_on_a_device(mode: FakeTensorMode) -> None:
    meta = torch.empty(2, 3, device="meta")
    converter = mode.fake_tensor_converter
    fake = converter.from_meta_and_device(mode, meta, "cuda")
    assert (
        fake.device == torch.device("cuda", 0)
        and converter.from_meta_and_device(mode, meta, "cuda:0") is fake
    )
    assert converter.from_meta_and_device(mode, meta, "cpu") is not fake
    assert mode.from_tensor(meta).device.type == "meta"
    made = FakeTensor(mode, meta, "cuda", requires_grad=True)
    assert made is not fake and made.requires_grad and made.spec is fake.spec


# --- views ----------------------------------------------------------------------------------------------------


def leaf_view() -> torch.Tensor:
    view = torch.randn(8).view(2, 4)
    view.requires_grad_()
    return view


def view_without_grad() -> torch.Tensor:
    with torch.no_grad():
        return torch.randn(4, 2, requires_grad=True).t()


VIEWS: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.randn(8).view(2, 4),
    "part": lambda: torch.randn(5, 6)[1:, ::2],
    "expanded": lambda: torch.randn(4, 1).expand(4, 5),
    "diagonal": lambda: torch.randn(4, 4).diagonal(),
    "windows": lambda: torch.randn(10).unfold(0, 3, 2),
    "of a leaf": lambda: torch.randn(4, 4, requires_grad=True).t()[1:],
    "of a result": lambda: torch.randn(4, requires_grad=True).neg()[:],
    "that is a leaf": leaf_view,
    "of a view that is a leaf": lambda: leaf_view().view(2, 2, 2),
    "without gradient": view_without_grad,
    "conjugate": lambda: torch.randn(4, dtype=torch.complex64).conj(),
    "real part": lambda: torch.randn(4, dtype=torch.complex64, requires_grad=True).real,
    "negative": lambda: torch.randn(4, dtype=torch.complex64).conj().imag,
    "as complex": lambda: torch.view_as_complex(torch.randn(4, 2)),
}


@pytest.mark.parametrize("make", VIEWS.values(), ids=VIEWS)
def test_a_view_is_a_view_of_the_fake_of_its_base(mode: FakeTensorMode, make: Callable[[], Any]) -> None:
    real = make()
    fake = mode.from_tensor(real)
    assert_same_metadata(fake, real)
    assert real._is_view() and fake._is_view()
    assert (fake.requires_grad, fake.is_leaf) == (real.requires_grad, real.is_leaf)
    base = mode.from_tensor(real._base)
    assert fake._base is base and base.untyped_storage()._cdata == fake.untyped_storage()._cdata
    before = base._version
    with torch.no_grad(), mode:
        fake.copy_(torch.empty_like(fake)) if 0 not in fake.stride() else base.zero_()
    assert fake._version == base._version == before + 1


def test_a_view_of_a_tensor_with_symbolic_sizes_is_on_its_storage() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    real = torch.ones(4, 6)
    base: Any = mode.from_tensor(real, source="base", symbolic_context=("n", "static"))
    view = mode.from_tensor(real[1:], static_shapes=True)
    assert (view.shape, view.stride(), view.storage_offset()) == ((3, 6), (6, 1), 6)
    assert view.untyped_storage()._cdata == base.untyped_storage()._cdata


def test_a_converter_of_its_own_stays_on_its_own(mode: FakeTensorMode) -> None:
    real, converter = torch.randn(2, 3), FakeTensorConverter()
    storage = converter.from_real_tensor(mode, real).untyped_storage()
    view = converter.from_real_tensor(mode, real[0])
    assert view.untyped_storage()._cdata == storage._cdata
    assert mode.from_tensor(real).untyped_storage()._cdata != storage._cdata


def test_gradients_go_through_a_view(mode: FakeTensorMode) -> None:
    leaf = torch.randn(4, 6, requires_grad=True)
    fake, view = mode.from_tensor(leaf), mode.from_tensor(leaf.t()[1:])
    view.sum().backward()
    assert fake.grad is not None and fake.grad.shape == (4, 6)


# --- memory ---------------------------------------------------------------------------------------------------


def test_the_same_tensor_gives_the_same_fake(mode: FakeTensorMode) -> None:
    real = torch.randn(3)
    fake = mode.from_tensor(real)
    assert mode.from_tensor(real) is fake
    assert mode.fake_tensor_converter.from_real_tensor(mode, real) is fake
    assert FakeTensor.from_tensor(real, mode) is fake
    assert mode.from_tensor(real.clone()) is not fake
    assert FakeTensorMode().from_tensor(real) is not fake


def test_the_memo_does_not_keep_the_fake_alive(mode: FakeTensorMode) -> None:
    real = torch.randn(3)
    fake = mode.from_tensor(real)
    gone = weakref.ref(fake)
    assert len(mode.fake_tensor_converter.tensor_memo) == 1
    del fake
    assert gone() is None
    assert len(mode.fake_tensor_converter.tensor_memo) == 0


def test_the_memo_does_not_keep_the_real_tensor_alive(mode: FakeTensorMode) -> None:
    real = torch.randn(3)
    fake = mode.from_tensor(real)
    gone = weakref.ref(real)
    del real
    assert gone() is None
    assert len(mode.fake_tensor_converter.tensor_memo) == 0
    assert fake.shape == (3,)


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
def test_nothing_stays_in_memory(make: Any, mode: FakeTensorMode) -> None:
    real = make()
    fake = mode.from_tensor(real)
    references = weakref.ref(real), weakref.ref(fake)
    del real, fake
    assert [reference() for reference in references] == [None, None]
    assert mode.fake_tensor_converter.tensor_memo == {}


def test_fakes_do_not_keep_a_mode_alive_in_a_cycle() -> None:
    mode = FakeTensorMode()
    real = torch.randn(3, requires_grad=True)
    fake = mode.from_tensor(real)
    with mode:
        loss = (fake * torch.ones(3)).sum()
        loss.backward()
    gone = weakref.ref(mode)
    del mode, fake, loss
    assert gone() is None


def test_the_memo_stays_small_over_many_tensors(mode: FakeTensorMode) -> None:
    for _ in range(2 * SWEEP_FIRST_AT):
        mode.from_tensor(torch.randn(2))
    assert len(mode.fake_tensor_converter.tensor_memo) == 0
    assert mode.fake_tensor_converter.remembered_storages <= SWEEP_FIRST_AT


def test_an_address_used_again_is_another_tensor(mode: FakeTensorMode) -> None:
    fakes = []
    for size in range(1, 50):
        real = torch.randn(size)
        fakes.append(mode.from_tensor(real))
        del real
    assert [fake.shape[0] for fake in fakes] == list(range(1, 50))


# --- aliasing -------------------------------------------------------------------------------------------------


def same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def test_views_stay_views_of_one_storage(mode: FakeTensorMode) -> None:
    base = torch.randn(4, 6)
    row, flat = base[1], base.view(-1)
    fake_row, fake_base, fake_flat = map(mode.from_tensor, (row, base, flat))
    assert same_storage(fake_row, fake_base) and same_storage(fake_base, fake_flat)
    version = fake_base._version
    fake_base.add_(1)
    assert fake_base._version == version + 1
    assert not same_storage(fake_base, mode.from_tensor(torch.randn(4, 6)))


def test_views_of_another_dtype_share_the_storage(mode: FakeTensorMode) -> None:
    base = torch.randn(4, dtype=torch.complex64)
    others = [
        base.view(torch.int32),
        torch.view_as_real(base),
        base.imag,
        base.conj(),
        base.view(torch.uint8),
    ]
    fakes = [mode.from_tensor(t) for t in others]
    for fake, real in zip(fakes, others, strict=True):
        assert_same_metadata(fake, real)
        assert same_storage(fake, fakes[0])
    assert_same_metadata(mode.from_tensor(base), base)


def test_a_storage_survives_its_first_view(mode: FakeTensorMode) -> None:
    base = torch.randn(4, 6)
    first = mode.from_tensor(base)
    second = mode.from_tensor(base[1])
    del first
    assert same_storage(second, mode.from_tensor(base))


def test_a_view_of_a_leaf_is_a_view_of_its_fake(mode: FakeTensorMode) -> None:
    leaf = torch.randn(4, 4, requires_grad=True)
    view = leaf[1:]
    fake_view = mode.from_tensor(view)
    fake_leaf = mode.from_tensor(leaf)
    assert fake_view._is_view() and fake_view._base is fake_leaf
    fake_view.sum().backward()
    assert fake_leaf.grad is not None and fake_leaf.grad.shape == (4, 4)


def test_a_result_is_no_leaf_and_runs_backward(mode: FakeTensorMode) -> None:
    real = torch.randn(3, requires_grad=True) * 2
    fake = mode.from_tensor(real)
    assert fake.grad_fn is not None and not fake.is_leaf
    (fake * 3).sum().backward()


# --- parameters, buffers, gradients ------------------------------------------------------------------------------


def test_parameters_stay_parameters(mode: FakeTensorMode) -> None:
    parameter = nn.Parameter(torch.randn(3))
    fake = mode.from_tensor(parameter)
    assert type(fake) is FakeTensor and isinstance(fake, nn.Parameter)
    assert fake.requires_grad and fake.is_leaf
    frozen = mode.from_tensor(nn.Parameter(torch.randn(3), requires_grad=False))
    assert isinstance(frozen, nn.Parameter) and not frozen.requires_grad
    assert not isinstance(mode.from_tensor(torch.randn(3)), nn.Parameter)


def test_buffers_can_be_set_again(mode: FakeTensorMode) -> None:
    module = nn.Module()
    module.scale = mode.from_tensor(nn.Buffer(torch.randn(3), persistent=False))
    module.scale = module.scale.to("cpu")
    assert not module.state_dict()


def test_buffers_stay_buffers(mode: FakeTensorMode) -> None:
    fake = mode.from_tensor(nn.Buffer(torch.randn(3)))
    assert isinstance(fake, nn.Buffer)


def test_gradients_come_along(mode: FakeTensorMode) -> None:
    parameter = nn.Parameter(torch.randn(3))
    parameter.grad = torch.randn(3)
    fake = mode.from_tensor(parameter)
    assert type(fake.grad) is FakeTensor and fake.grad.shape == (3,)
    assert mode.from_tensor(parameter.grad) is fake.grad


# --- other kinds of tensors -----------------------------------------------------------------------------------------


def test_wrapper_subclasses_wrap_fakes(mode: FakeTensorMode) -> None:
    real = TwoTensor(torch.randn(3, 4), torch.randn(3, 4))
    fake = mode.from_tensor(real)
    assert type(fake) is TwoTensor
    assert type(fake.a) is FakeTensor and type(fake.b) is FakeTensor
    assert mode.from_tensor(real) is fake
    with mode:
        twice = fake * 2 + fake
    assert type(twice) is TwoTensor and type(twice.a) is FakeTensor and twice.shape == (3, 4)


def test_nested_wrapper_subclasses(mode: FakeTensorMode) -> None:
    def pair() -> TwoTensor:
        return TwoTensor(torch.randn(2), torch.randn(2))

    fake = mode.from_tensor(TwoTensor(pair(), pair()))
    assert type(fake.a) is TwoTensor and type(fake.a.b) is FakeTensor


def test_wrapper_subclass_parameters(mode: FakeTensorMode) -> None:
    real = nn.Parameter(TwoTensor(torch.randn(3), torch.randn(3)))
    fake = mode.from_tensor(real)
    assert isinstance(fake, nn.Parameter) and fake.requires_grad and fake.is_leaf
    (fake * 2).sum().backward()
    assert type(fake.grad) is TwoTensor


def quantised() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.quint8)


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.randn(2), torch.randn(3)])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (quantised, "quantised"),
        (nested, "nested"),
        (lambda: torch.randn(3).to_mkldnn(), "MKL-DNN"),
    ],
    ids=["quantised", "nested", "mkldnn"],
)
def test_what_cant_be_represented_is_refused_with_the_reason(
    make: Any, reason: str, mode: FakeTensorMode
) -> None:
    with pytest.raises(UnsupportedFakeTensorException, match=reason) as caught:
        mode.from_tensor(make())
    assert "test_convert.py" in caught.value.context.line
    assert mode.fake_tensor_converter.tensor_memo == {}


def wrappers_of(tensor: Any) -> list[Any]:
    """What the wrappers of torch.func say of a tensor, from outside to inside, and what is in them."""
    seen: list[Any] = []
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        is_batch = functorch.is_batchedtensor(tensor)
        seen.append((tensor.shape, functorch.maybe_get_level(tensor), tensor.requires_grad,
                     functorch.maybe_get_bdim(tensor) if is_batch else None))  # fmt: skip
        tensor = functorch.get_unwrapped(tensor)
    return [*seen, (tensor.shape, tensor.stride(), tensor.dtype)]


TRANSFORMS: dict[str, Any] = {
    "vmap": lambda inside: torch.vmap(inside, in_dims=1)(torch.randn(4, 3)),
    "vmap of vmap": lambda inside: torch.vmap(torch.vmap(inside), in_dims=2)(torch.randn(4, 3, 2)),
    "grad": lambda inside: torch.func.grad(lambda x: inside(x).sum())(torch.randn(3, 2)),
    "vmap of grad": lambda inside: torch.vmap(torch.func.grad(lambda x: inside(x).sum()))(torch.randn(5, 3)),
    "grad of vmap": lambda inside: torch.func.grad(lambda x: torch.vmap(inside)(x).sum())(torch.randn(5, 3)),
}


@pytest.mark.parametrize("run", TRANSFORMS.values(), ids=TRANSFORMS)
def test_wrappers_of_transforms_convert(run: Any, mode: FakeTensorMode) -> None:
    seen: list[Any] = []

    def inside(x: torch.Tensor) -> torch.Tensor:
        fake = mode.from_tensor(x)
        seen.append((wrappers_of(fake), wrappers_of(x)))
        innermost: Any = fake
        while (inner := unwrap(innermost)) is not None:
            innermost = inner
        assert isinstance(innermost, FakeTensor)
        with mode:
            assert (fake * 2).shape == x.shape
        return x

    run(inside)
    assert seen and all(fake == real for fake, real in seen)


def test_jagged_tensors_convert(mode: FakeTensorMode) -> None:
    real = torch.nested.nested_tensor([torch.randn(2, 5), torch.randn(3, 5)], layout=torch.jagged)
    fake = mode.from_tensor(real)
    assert type(fake.values()) is FakeTensor and fake.values().shape == (5, 5)


# --- constructor and converter -----------------------------------------------------------------------------------------


def test_the_constructor_takes_metadata_and_device(mode: FakeTensorMode) -> None:
    fake = FakeTensor(mode, torch.empty(3, 4, device="meta").t(), torch.device("cuda:1"))
    assert type(fake) is FakeTensor and fake.fake_mode is mode
    assert (fake.shape, fake.stride(), fake.device) == ((4, 3), (1, 4), torch.device("cuda:1"))
    assert FakeTensor(mode, torch.empty(2, device="meta"), "cpu").device == torch.device("cpu")
    assert FakeTensor(mode, torch.empty(2, device="meta"), "cuda").device == torch.device("cuda:0")


def test_the_constructor_takes_a_constant(mode: FakeTensorMode) -> None:
    fake = FakeTensor(mode, torch.empty((), device="meta"), "cpu", constant=torch.tensor(4.0))
    assert fake.item() == 4.0


def test_from_meta_and_device(mode: FakeTensorMode) -> None:
    converter = mode.fake_tensor_converter
    assert isinstance(converter, FakeTensorConverter)
    meta = torch.empty(3, device="meta", requires_grad=True)
    fake = converter.from_meta_and_device(mode, meta, torch.device("cuda:0"))
    assert fake.device == torch.device("cuda:0") and fake.requires_grad


def test_make_constant_keeps_the_value(mode: FakeTensorMode) -> None:
    real = torch.tensor(3)
    fake = mode.fake_tensor_converter.from_real_tensor(mode, real, make_constant=True)
    real.fill_(7)
    assert fake.item() == 3
    assert fake.constant is not None and fake.constant.item() == 3
    assert mode.from_tensor(torch.tensor(3)).constant is None


# --- modules ----------------------------------------------------------------------------------------------------------


def tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False), nn.BatchNorm1d(10))
    model[1].weight = model[0].weight
    return model


def test_fake_copies_of_modules(mode: FakeTensorMode) -> None:
    model = tied()
    with FakeCopyMode(mode):
        fake = copy.deepcopy(model)
    for real_tensor, fake_tensor in zip(
        [*model.parameters(), *model.buffers()], [*fake.parameters(), *fake.buffers()], strict=True
    ):
        assert_same_metadata(fake_tensor, real_tensor)
        assert fake_tensor.fake_mode is mode
        assert isinstance(fake_tensor, nn.Parameter) == isinstance(real_tensor, nn.Parameter)
    assert fake[1].weight is fake[0].weight
    with mode:
        assert fake(torch.zeros(3, dtype=torch.long)).shape == (3, 10)


def test_fake_copies_inside_the_mode(mode: FakeTensorMode) -> None:
    with mode, FakeCopyMode(mode):
        fake = copy.deepcopy(tied())
    assert fake[1].weight is fake[0].weight


def test_fake_copies_of_wrapper_parameters(mode: FakeTensorMode) -> None:
    model = nn.Linear(3, 3)
    model.weight = nn.Parameter(TwoTensor(torch.randn(3, 3), torch.randn(3, 3)))
    with FakeCopyMode(mode):
        fake = copy.deepcopy(model)
    assert type(fake.weight) is TwoTensor and type(fake.weight.a) is FakeTensor
    assert isinstance(fake.weight, nn.Parameter)
