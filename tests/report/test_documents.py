"""JSON documents: what is refused, and the schemas that are shipped."""

from __future__ import annotations

import json
from types import ModuleType

import pytest

from understudy.plans import answer
from understudy.plans.answer import TrainingPlan
from understudy.report import cluster_rehearsal, rehearsal
from understudy.report.cluster_rehearsal import ClusterRehearsal
from understudy.report.documents import Document, read_record
from understudy.report.rehearsal import Peak, Rehearsal


@pytest.mark.parametrize("module", [rehearsal, cluster_rehearsal, answer], ids=lambda module: module.__name__)
def test_the_shipped_schema_is_that_of_the_dataclasses(module: ModuleType) -> None:
    assert json.loads(module.SCHEMA_FILE.read_text()) == module._make_whole_schema()


@pytest.mark.parametrize(
    ("kind", "text", "error"),
    [
        (
            Rehearsal,
            '{"schema_version": 9}',
            "expected a rehearsal of schema_version 2, got schema_version 9",
        ),
        (Rehearsal, "{}", "expected a rehearsal of schema_version 2, got no schema_version"),
        (Rehearsal, "[1]", "expected a rehearsal, got JSON of another form"),
        (
            TrainingPlan,
            '{"kind": "cluster", "schema_version": 1}',
            "expected a plan of schema_version 1, got kind 'cluster', schema_version 1",
        ),
        (
            ClusterRehearsal,
            '{"schema_version": 2}',
            "expected a cluster rehearsal of schema_version 1, got no kind, schema_version 2",
        ),
        (ClusterRehearsal, '{"kind": "cluster", "schema_version": 1}', "verdict: missing field"),
    ],
)
def test_another_document_is_refused(kind: type[Document], text: str, error: str) -> None:
    with pytest.raises(ValueError) as caught:
        kind.from_json(text)
    assert str(caught.value) == error


@pytest.mark.parametrize(
    ("data", "error"),
    [
        ({"allocated_bytes": 1 << 81}, f"allocated_bytes: {1 << 81} is out of range"),
        ({"allocated_bytes": True}, "allocated_bytes: expected integer, got bool"),
        ({"line": 3}, "line: expected string, got int"),
        ({"contributors": [{"count": 1.5}]}, "contributors[0].count: expected integer, got float"),
        ({"contributors": [7]}, "contributors[0]: expected an object, got int"),
        ({"colour": 1}, "colour: unknown field"),
        ({"contributors": [{"count": 1}]}, "contributors[0].category: missing field"),
        ([], "Peak: expected an object, got list"),
    ],
)
def test_each_value_is_checked(data: object, error: str) -> None:
    with pytest.raises(ValueError) as caught:
        read_record(Peak, data)
    assert str(caught.value) == error
