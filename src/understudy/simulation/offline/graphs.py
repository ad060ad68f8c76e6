"""Data sets of PyTorch Geometric that are not on this machine: graphs of the same sizes."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from understudy import _torch
from understudy.simulation.libraries import MissingFileError, when_imported
from understudy.simulation.offline.switch import is_made_up, note_made_up

Function = Callable[..., Any]


class Graphs(NamedTuple):
    """Numbers of graphs, and of the nodes and edges of each; features of a node; classes of nodes, or of graphs."""

    graphs: int
    nodes: int
    edges: int
    features: int
    classes: int
    train_nodes: int = 0


CITATIONS = {
    "cora": Graphs(1, 2708, 10556, 1433, 7, 140),
    "citeseer": Graphs(1, 3327, 9104, 3703, 6, 120),
    "pubmed": Graphs(1, 19717, 88648, 500, 3, 60),
}
"""The data sets of `Planetoid`."""
VALIDATED, TESTED = 500, 1000
"""Numbers of nodes of each citation graph."""
COLLECTIONS = {
    "mutag": Graphs(188, 18, 40, 7, 2),
    "proteins": Graphs(1113, 39, 146, 3, 2),
    "enzymes": Graphs(600, 33, 124, 3, 6),
    "nci1": Graphs(4110, 30, 65, 37, 2),
    "dd": Graphs(1178, 284, 1431, 89, 2),
    "imdb-binary": Graphs(1000, 20, 193, 0, 2),
    "imdb-multi": Graphs(1500, 13, 132, 0, 3),
    "reddit-binary": Graphs(2000, 430, 996, 0, 2),
    "collab": Graphs(5000, 75, 4914, 0, 3),
}
"""The data sets of `TUDataset`, with means of their sizes."""


@when_imported("torch_geometric.datasets.planetoid", "Planetoid.__init__")
@when_imported("torch_geometric.datasets.tu_dataset", "TUDataset.__init__")
def find_missing_graphs(original: Function) -> Function:
    """A data set whose files are not here is named in the error, or made up."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            return original(self, *args, **kwargs)
        except OSError as error:
            given = inspect.signature(original).bind(self, *args, **kwargs).arguments
            name = str(given.get("name"))
            kind = {**CITATIONS, **COLLECTIONS}.get(name.lower())
            if _torch.active_fake_mode() is None or kind is None:
                raise
            if is_made_up():
                return make_graphs(self, kind, given)
            raise MissingFileError(
                f"{type(self).__name__}({name!r}): its files are not in {str(given.get('root'))!r}, and a rehearsal "
                "downloads nothing; put them there, allow the network with --online, or let graphs be made up with "
                "--offline-data"
            ) from error

    return __init__


def make_graphs(self: Any, kind: Graphs, given: dict[str, Any]) -> None:
    """Give a data set the state that it has after its files were read."""
    data: Any = importlib.import_module("torch_geometric.data")
    self.name, self.split = str(given["name"]), given.get("split", "public")
    self.root, self.log, self.force_reload, self.cleaned = given.get("root"), True, False, False
    self.transform, self.pre_transform = given.get("transform"), given.get("pre_transform")
    self.pre_filter = given.get("pre_filter")
    self._indices = None
    graphs = [make_graph(data.Data, kind, number) for number in range(kind.graphs)]
    if self.pre_transform is not None:
        graphs = [self.pre_transform(graph) for graph in graphs]
    self._data, self.slices = self.collate(graphs)
    self._data_list = None if kind.graphs == 1 else graphs  # else it reads where each one begins
    self.sizes = {"num_node_labels": kind.features, "num_node_attributes": 0} | dict.fromkeys(
        ("num_edge_labels", "num_edge_attributes"), 0
    )
    note_made_up(
        self.name,
        f"{type(self).__name__}({self.name!r}): not on this machine; {kind.graphs:,} graphs of {kind.nodes:,} nodes and "
        f"{kind.edges:,} edges were made up",
    )


def make_graph(of: Function, kind: Graphs, number: int) -> Any:
    """One graph. Its labels are numbers of NumPy, so that the number of classes can be read off."""
    np: Any = importlib.import_module("numpy")
    tensor: Any = importlib.import_module("torch").from_numpy
    edges = np.arange(kind.edges)
    ends = np.stack((edges % kind.nodes, (edges * 7 + 1) % kind.nodes))
    features = np.zeros((kind.nodes, kind.features), "float32") if kind.features else None
    fields = {"edge_index": tensor(ends), "x": None if features is None else tensor(features)}
    if kind.graphs > 1:
        return of(y=tensor(np.array([number % kind.classes])), num_nodes=kind.nodes, **fields)
    nodes = np.arange(kind.nodes)
    ends_of_masks = (0, kind.train_nodes, kind.train_nodes + VALIDATED, kind.train_nodes + VALIDATED + TESTED)
    masks = {
        f"{part}_mask": tensor((nodes >= ends_of_masks[i]) & (nodes < ends_of_masks[i + 1]))
        for i, part in enumerate(("train", "val", "test"))
    }
    return of(y=tensor(nodes % kind.classes), **fields, **masks)
