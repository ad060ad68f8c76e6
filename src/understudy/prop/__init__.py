"""prop: FakeTensorProp, fake values for every node of a graph.

propagation  FakeTensorProp; repropagation after an edit; symbols of an earlier run
targets      facts about targets; subgraphs of higher-order operators
"""
