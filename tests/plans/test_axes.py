"""Names, values and constraints."""

from __future__ import annotations

import pytest

from understudy.errors import UnderstudyError
from understudy.plans.axes import find_role, parse_vary
from understudy.plans.constraints import RequirementError, parse_requirement


@pytest.mark.parametrize(
    ("text", "name", "values", "role"),
    [
        ("tp=1,2,4,8", "tp", (1, 2, 4, 8), "tp"),
        ("batch=1..64", "batch", (1, 2, 4, 8, 16, 32, 64), "batch"),
        ("batch=3..20", "batch", (3, 6, 12, 20), "batch"),
        ("--micro-batch-size=2,2,4", "micro_batch_size", (2, 4), "batch"),
        ("ckpt=none,selective,full", "ckpt", ("none", "selective", "full"), "checkpoint"),
        ("amp=on,off", "amp", (True, False), ""),
        ("mixed_precision=no,bf16", "mixed_precision", ("no", "bf16"), ""),
        ("lr=1e-4,0.5", "lr", (1e-4, 0.5), ""),
        ("batch", "batch", (), "batch"),
        ("model.layers=2", "model_layers", (2,), ""),
    ],
)
def test_vary(text: str, name: str, values: tuple[object, ...], role: str) -> None:
    axis = parse_vary(text)
    assert (axis.name, axis.values, axis.role) == (name, values, role)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("=1,2", "--vary: expected NAME=V1,V2 or NAME=LOW..HIGH, got '=1,2'"),
        ("batch=", "--vary batch=: expected non-empty values"),
        ("batch=1,,2", "--vary batch=1,,2: expected non-empty values"),
        ("batch=8..2", "--vary batch=8..2: expected LOW..HIGH with 1 <= LOW <= HIGH, got 8..2"),
        ("tp=none", "--vary tp: expected positive integers, got none"),
        ("batch=0,1", "--vary batch: expected positive integers, got 0"),
    ],
)
def test_wrong_vary(text: str, message: str) -> None:
    with pytest.raises(UnderstudyError) as caught:
        parse_vary(text)
    assert str(caught.value) == message


def test_roles_are_those_of_known_names() -> None:
    assert find_role("per_device_train_batch_size") == "batch"
    assert find_role("gradient-accumulation-steps") == "accumulate"
    assert find_role("tensor_model_parallel_size") == "tp"
    assert find_role("learning_rate") == find_role("layers") == ""


@pytest.mark.parametrize(
    ("text", "values", "expected"),
    [
        ("tp*pp*dp=8", {"tp": 2, "pp": 2, "dp": 2}, True),
        ("tp*pp*dp == 8", {"tp": 2, "pp": 2, "dp": 4}, False),
        ("1 <= batch <= 4", {"batch": 4}, True),
        ('ckpt != "none" or batch < 8', {"ckpt": "none", "batch": 8}, False),
        ("tp in (1, 2) and not amp", {"tp": 2, "amp": False}, True),
        ("batch % dp = 0", {"batch": 6, "dp": 4}, False),
        ("8 / zero > 1", {"zero": 0}, False),
        ("2 ** n >= 1024", {"n": 10}, True),
    ],
)
def test_requirements(text: str, values: dict[str, object], expected: bool) -> None:
    assert parse_requirement(text).holds(values) is expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "__import__('os').system('id') == 0",
            "expected names, numbers, arithmetic and comparisons, got a call",
        ),
        ("tp.real = 1", "expected names, numbers, arithmetic and comparisons, got Attribute"),
        ("[x for x in tp] = 1", "expected names, numbers, arithmetic and comparisons, got ListComp"),
        ("tp*", "expected a comparison such as tp*pp*dp=8"),
        ("tp*pp", "expected a comparison such as tp*pp*dp=8"),
        ("(lambda: 1) = 1", "expected names, numbers, arithmetic and comparisons, got Lambda"),
        ("f'{tp}' = 1", "expected names, numbers, arithmetic and comparisons, got JoinedStr"),
    ],
)
def test_requirements_run_nothing(text: str, message: str) -> None:
    with pytest.raises(RequirementError) as caught:
        parse_requirement(text)
    assert str(caught.value) == f"--require {text}: {message}"


@pytest.mark.parametrize("text", ["9**9**9 > 1", "(2**64)**64**2 > 1", "n*n*n*n*n*n = 1"])
def test_numbers_stay_small(text: str) -> None:
    with pytest.raises(RequirementError, match="is too large"):
        parse_requirement(text).holds({"n": 1 << 40})


def test_words_are_not_computed_with() -> None:
    with pytest.raises(RequirementError, match="expected operands of one kind, got numbers and words"):
        parse_requirement("ckpt * 100000 = 1").holds({"ckpt": "none"})
