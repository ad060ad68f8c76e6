"""Repeated layers: what one layer of a model has recorded, the next ones like it record without being run.

    layers          the one entry, RepeatedLayers: which calls are layers, and when one is not run
    interception    classes that tell of calls of `forward`, and of attributes that are read
    comparison      whether two layers are alike: their arguments, and all that their forward can read
    reachable_code  which functions, classes and state the code of a layer can reach
    object_state    what an object holds, compared before and after a layer runs, and from one layer to the next
    replay          a recorded layer, prepared to be written into the graph again

The rest of capture knows `RepeatedLayers` and nothing else; users have `run_every_layer`.
"""
