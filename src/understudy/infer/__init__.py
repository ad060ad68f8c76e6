"""infer: the plan of a call, from the cache or from the first source with an answer. Works on specs, not tensors.

engine   infer: the sources, in the order in which they are asked
cache    the dispatch cache
plan     the outcomes of a call, as a cache hit replays them, with its effects: checks of memory, counted writes
kernels  torch's own kernels as sources
crosscheck  answers compared with the real operator, for those who ask for it
shared   plans that captures with different symbols share
"""
