"""meta: MetaTracer and symbolic_trace, a torch-level trace in which every value knows its metadata.

    tracer      MetaTracer, symbolic_trace
    proxies     the values that a traced program handles
    inputs      the signature, the examples, the concrete arguments
    arguments   from values to the arguments of nodes, and from nodes to values; sizes as nodes
    structures  dicts, dataclasses, caches with values in them
    derivation  what a call gives: the same call on fakes, or a manual override
    functions   calls of torch functions; regions of autocast and no_grad; functions given to torch.vmap, as graphs
    modules     where a called module is in the root, and what programs assign to modules; names that code can spell
    patches     what is replaced while a program is traced
    errors      MetaTraceError
"""
