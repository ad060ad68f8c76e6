"""infer: one call in, one plan out. Key, cache, ordered sources; no tensors.

    engine   infer: the sources, in the order in which they are asked
    cache    the dispatch cache
    plan     the outcomes of a call, as a cache hit replays them, with its effects: checks of memory, counted writes
    kernels  torch's own kernels as sources, and as the judge of refusals
    shared   plans that captures with different symbols share
"""
