"""timing: how long a step takes.

    timeline       the clocks of the host, of streams and communicators: events in, times out
    attribution    what bounds a stretch of time: products, memory, launches, exposed communication, …
    curves         the curves of kernel families on each card, and hosts: `curves.toml`
    kernels        the seconds of a kernel
    collectives    the seconds of a collective
    clock          the calls of a run, replayed on a timeline
    calibration    corrections of a card's curves from a real run on it
    estimate       the time of a step, from such a clock
    rank_logs      what one rank did, as far as other ranks wait for it
    ranks          the time of a step of several ranks together
    step_time      the data of an estimate; the cost of a run

`timeline`, `attribution`, `curves`, `collectives`, `calibration`, `rank_logs` and `step_time` do not import torch.
"""
