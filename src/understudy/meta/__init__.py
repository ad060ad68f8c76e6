"""meta: MetaTracer and symbolic_trace, a torch-level trace in which every value knows its metadata.

    tracer      MetaTracer, symbolic_trace
    proxies     the values that a traced program handles
    inputs      signature, examples, concrete arguments
    arguments   from values to the arguments of nodes, and from nodes to values; sizes as nodes
    structures  dicts, dataclasses, caches with values in them
    derivation  the metadata of a call's result: by the same call on fakes, or by a manual override
    functions   calls of torch functions; regions of autocast and no_grad; functions of torch.vmap as subgraphs
    modules     the paths of called modules, assignments to modules, safe names
    patches     functions that are replaced while a program is traced
    errors      MetaTraceError
"""
