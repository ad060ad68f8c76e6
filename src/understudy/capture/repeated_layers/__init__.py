"""Repeated layers: the nodes of one layer are replayed for later layers like it, which are not run.

    layers          the entry point, RepeatedLayers: which calls are layers, and when one is replayed
    interception    intercepts calls of `forward`, and reads of attributes
    comparison      whether two layers are alike: their arguments, and everything that their forward can read
    reachable_code  the functions, classes and state that the code of a layer can reach
    object_state    the state of objects, compared before and after a run, and between layers
    replay          the plan of a recorded layer, which writes its nodes again

The rest of capture uses only `RepeatedLayers`; users have `run_every_layer`.
"""
