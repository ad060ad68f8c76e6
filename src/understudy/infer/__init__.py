"""infer: one call in, one plan out. Key, cache, ordered sources; no tensors.

    engine   infer, and which calls may be cached
    cache    the dispatch cache
    plan     the outcomes of a call, as a cache hit replays them
    effects  what happens around a replayed plan: checks of memory, counted writes
    sources  where answers come from, in order
    kernels  torch's own kernels as sources, and as the judge of refusals
    shared   plans that captures with different symbols share
"""
