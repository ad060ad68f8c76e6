"""Repeated layers: what one layer of a model has recorded, the next ones like it record without being run.

    layers          the entry: which calls are layers, what is recorded of one, when the next one is written down
    comparison      whether two layers are alike: their arguments, and all that their forward can read
    reachable_code  which functions, classes and state the code of a layer can reach
    object_state    what an object holds, compared before and after a layer runs, and from one layer to the next
    replay          a recorded layer, prepared to be written into the graph again
"""
