"""The page and the trace of a rehearsed cluster: what is in them, for a program on a mesh of 2 x 2 ranks."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from understudy.cli import main
from understudy.report.cluster_page import make_cluster_page
from understudy.report.cluster_rehearsal import ClusterMesh, ClusterRehearsal

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not hasattr(os, "fork"),
    reason="ranks are forked processes of torch.distributed",
)

PROGRAM = """
import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("pp", "</script>"))
torch.cuda.set_device(int(os.environ["LOCAL_RANK"])); stage = mesh.get_local_rank("pp")
model = nn.Linear(1000, 1000 * (1 + stage)).cuda(); optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(2):
    model(torch.randn(8, 1000, device="cuda")).sum().backward(); dist.all_reduce(model.weight.grad, group=mesh.get_group(1))
    optimizer.step(); optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    (folder / "script.py").write_text(PROGRAM)
    before = Path.cwd()
    os.chdir(folder)
    try:
        words = [
            "run",
            "--quiet",
            "--device",
            "h100",
            "--nproc-per-node",
            "4",
            "--html",
            "run.html",
            "--trace",
            "trace.json",
        ]
        assert main([*words, "--json", "run.json", "script.py"]) == 0
    finally:
        os.chdir(before)
    return folder


def read_page(text: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_the_page_has_a_cell_for_each_rank_and_a_report_for_each_kind(run: Path) -> None:
    data = read_page((run / "run.html").read_text())
    assert data["dimensions"] == [["pp", 2], ["</script>", 2]] and data["verdict"] == "fits"
    assert data["places"] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert data["row_of"] == {"0": 0, "1": 1, "2": 2, "3": 3} and data["worst"] in (2, 3)
    assert [row["page"] for row in data["rows"]] == [0, 0, 1, 1] and len(data["pages"]) == 2
    assert json.loads(data["pages"][1])["headline"].startswith("fits on H100")
    stages = data["tables"][0]
    assert stages["title"] == "By pp" and stages["rows"][1][3] >= stages["rows"][0][3]
    communication = data["rows"][0]["tables"][0]
    assert communication["title"] == "Communication of rank 0"
    assert [row[1:4] for row in communication["rows"]] == [["all_reduce", "</script> (2)", "float32"]]
    parameters = data["categories"].index("parameters")
    assert [row["categories"][parameters] for row in data["rows"]] == [4004000, 4004000, 8008000, 8008000]


def test_a_rank_that_was_not_run_shows_the_one_that_was(run: Path) -> None:
    cluster = ClusterRehearsal.from_json((run / "run.json").read_text())
    cluster.rows[3:] = []
    cluster.rows[2].stands_for.append(3)
    cluster.mesh = None
    data = read_page(make_cluster_page(cluster))
    assert data["row_of"]["3"] == 2 and data["dimensions"] == [["node", 1], ["card", 4]]


def test_the_trace_has_a_process_for_each_rank_and_arrows_between_them(run: Path) -> None:
    events = json.loads((run / "trace.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {rank: f"rank {rank}: fits" for rank in range(4)}
    starts = {event["id"]: event["pid"] for event in events if event["ph"] == "s"}
    ends = {event["id"]: event["pid"] for event in events if event["ph"] == "f"}
    assert starts.keys() == ends.keys() and starts
    assert all({starts[number], ends[number]} in ({0, 1}, {2, 3}) for number in starts)


def test_places_in_a_mesh_of_any_order() -> None:
    mesh = ClusterMesh(["a", "b"], [2, 3], [0, 2, 4, 1, 3, 5])
    assert [mesh.place_of(rank) for rank in range(6)] == [[0, 0], [1, 0], [0, 1], [1, 1], [0, 2], [1, 2]]


def test_two_clusters_are_compared(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = run / "run.json", tmp_path / "after.json"
    data = json.loads(before.read_text())
    data["rows"][3]["peak"]["reserved_bytes"] += 300 << 20
    data["communication"][0]["bytes"] *= 2
    after.write_text(json.dumps(data))
    assert main(["diff", str(before), str(before)]) == 0
    assert main(["diff", str(before), str(after)]) == 3
    shown = capsys.readouterr().out
    assert re.search(r"Reserved memory\n.*\n +0-[12] .* \+0 B\n(?: +2 .*\n)? +3 .* \+300.00 MiB", shown), (
        shown
    )
    assert re.search(r"all_reduce, </script> \(2\) .* \+3.8[12] MiB", shown), shown
    (tmp_path / "one.json").write_text("{}")
    assert main(["diff", str(before), str(tmp_path / "one.json")]) == 2
    assert "one is of several ranks, the other of one card" in capsys.readouterr().err
