"""The operator registry: one record for each overload, facts registered once."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.modules.linear_cross_entropy  # it defines its operators when it is loaded

from understudy.capture import make_fx as _capture  # noqa: F401  (registers derivatives and batching)
from understudy.fake.fused_attention import define_operators
from understudy.ops import hops, registry
from understudy.ops.registry import OpFacts, Slot, declare, derives, full_name, record_of, rule, user_rule
from understudy.ops.traits.writes import written_values
from understudy.ops.variants import rule_of
from understudy.simulation.library_kernels.launches import define_kernel

aten = torch.ops.aten


@pytest.fixture
def slot() -> Iterator[Slot[Any]]:
    """A slot that a higher package declares, for the time of a test."""
    made: Slot[Any] = declare("fact_of_a_test", Slot())
    yield made
    remove(made)


def remove(slot: Slot[Any]) -> None:
    delattr(OpFacts, slot.attribute)
    registry._slots.remove(slot)
    for record in registry.RECORDS.values():
        vars(record).pop(slot.attribute, None)


def test_a_record_for_each_overload() -> None:
    record = record_of(aten.add_.Tensor)
    assert record is record_of(torch.ops.aten.add_.Tensor) and record is not record_of(aten.add_.Scalar)
    assert (record.name, record.packet) == ("aten::add_.Tensor", "add_")
    assert record.is_pointwise and record.is_mutable and record.may_write and record.is_builtin
    assert not (record.is_random or record.changes_metadata or record.has_out or record.is_composite)
    assert record_of(aten.add.out).has_out and record_of(aten.t_.default).changes_metadata
    assert (
        record_of(aten.item.default).is_data_dependent and record_of(aten.nonzero.default).has_dynamic_shape
    )


def test_what_tags_and_schemas_leave_out() -> None:
    assert record_of(aten.is_nonzero.default).is_data_dependent
    assert record_of(aten.to_sparse.default).has_dynamic_shape
    assert (
        record_of(aten.native_batch_norm.default).may_write
        and not record_of(aten.native_batch_norm.default).is_mutable
    )


def test_names() -> None:
    assert (
        full_name("mm")
        == full_name("aten::mm")
        == full_name("aten::mm.default")
        == full_name(aten.mm.default)
    )
    assert full_name(aten.add.Tensor) == "aten::add.Tensor"


def test_a_fact_is_registered_once(slot: Slot[Any]) -> None:
    records: list[Any] = [record_of(op) for op in (aten.mm.default, aten.add.Tensor, aten.add.Scalar)]
    assert [record.fact_of_a_test for record in records] == [None, None, None]
    slot.register(1, "mm", "add.Tensor")
    assert [record.fact_of_a_test for record in records] == [1, 1, None]
    with pytest.raises(
        ValueError, match="fact_of_a_test of aten::mm is already registered: 1; remove one of the two"
    ):
        slot.register(2, aten.mm.default)
    slot.replace(3, "mm")
    assert records[0].fact_of_a_test == 3
    slot.replace(None, "mm")
    assert records[0].fact_of_a_test is None


def test_no_operator_has_two_rules() -> None:
    with pytest.raises(ValueError, match="rule of aten::mm is already registered"):
        rule("mm")(lambda a, b: a)


def test_a_slot_has_one_name(slot: Slot[Any]) -> None:
    with pytest.raises(ValueError, match="records already have an attribute 'rule'; choose another name"):
        declare("rule", Slot())
    with pytest.raises(ValueError, match="uncached is already derived by"):
        derives(OpFacts.uncached)(lambda record: None)


def test_all_overloads_of_a_name() -> None:
    made: Slot[int] = declare("fact_of_packets", Slot(of_packets=True))
    also_in_place: Slot[int] = declare("fact_of_in_place", Slot(of_packets=True, of_in_place=True))
    try:
        made.register(7, "add")
        also_in_place.register(8, "add")
        found: list[Any] = [record_of(op) for op in (aten.add.Tensor, aten.add.Scalar, aten.add_.Tensor)]
        assert [record.fact_of_packets for record in found] == [7, 7, None]
        assert [record.fact_of_in_place for record in found] == [8, 8, 8]
    finally:
        remove(made)
        remove(also_in_place)


def test_facts_are_attributes() -> None:
    """A fact is looked up once, then read without a call."""
    record = record_of(aten.mm.default)
    assert record.rule is vars(record)["rule"] and record.exact_out is None and "exact_out" in vars(record)


def test_derived_facts_follow_what_they_are_derived_from() -> None:
    """A rule of the user for the functional variant is the one that the out= variant is derived from."""
    before = rule_of(aten.nextafter.out)
    user_rule.replace(lambda a, b: NotImplemented, "nextafter")
    try:
        assert rule_of(aten.nextafter.out) is not before
    finally:
        user_rule.replace(None, "nextafter")


def test_facts_of_an_operator_are_listed() -> None:
    facts = record_of(aten.linear.default).list_facts()
    assert callable(facts["rule"]) and "has_recipe" in facts and "casting" in facts


OF_SOME_RELEASES = {"cholesky": "gone since torch 2.14; linalg_cholesky is there"}


def test_every_registered_name_is_an_operator() -> None:
    """A name that torch does not have would never be found."""
    define_operators()
    define_kernel()
    for slot in registry._slots:
        for name in slot:
            namespace, _, rest = name.partition("::")
            if namespace.startswith("understudy_test"):
                continue  # an operator of another test, gone with it
            if namespace in ("torchaudio", "torchvision") and importlib.util.find_spec(namespace) is None:
                continue
            packet, _, overload = rest.partition(".")
            family = getattr(getattr(torch.ops, namespace), packet, None)
            if family is None and (slot.of_packets or packet in OF_SOME_RELEASES):
                continue  # marked for all variants of a name, of which not all exist; or gone with a release
            assert family is not None, f"{slot.attribute}: {name}"
            if overload:
                assert overload in family.overloads(), f"{slot.attribute}: {name}"


def test_hidden_writes() -> None:
    mean, var, x = object(), object(), object()
    args = [x, None, None, mean, var, True, 0.1, 1e-5]
    assert written_values(aten.native_batch_norm.default, args, {}) == [mean, var]
    args[5] = False
    assert written_values(aten.native_batch_norm.default, args, {}) == []


def test_a_higher_order_operator_has_one_function_for_each_field() -> None:
    record = hops.higher_order(torch.ops.higher_order.cond)
    assert record.takes_functions and None not in (record.run, record.backward)
    with pytest.raises(ValueError, match="run of cond is already registered"):
        hops.run("cond")(lambda *args: None)
    assert hops.higher_order(torch.ops.higher_order.flex_attention).run is not None


def test_a_fact_of_a_name_is_one_of_all_its_overloads() -> None:
    for op in (
        aten._to_sparse.default,
        aten._to_sparse.sparse_dim,
        aten._to_sparse.out,
        aten.to_sparse.sparse_dim,
    ):
        assert record_of(op).has_dynamic_shape
    assert not record_of(aten.to_dense.default).has_dynamic_shape
