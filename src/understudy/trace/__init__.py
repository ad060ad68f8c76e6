"""trace: graphs of programs that run on stand-ins.

    prop             FakeTensorProp: a graph, node by node
    prop_targets     what is known of a node's target before it is called
    prop_values      what is written into a node
    prop_state       the module's own tensors, borrowed for a run
    prop_subgraphs   graphs inside of graphs
    prop_edits       what an edit of a graph reaches
    prop_errors      errors that name the node
"""
