"""prop: FakeTensorProp, fake values for every node of a graph.

    propagation  FakeTensorProp; what an edit of a graph reaches; symbols of an earlier run
    targets      what is known of a target before it is called; graphs inside graphs
"""
