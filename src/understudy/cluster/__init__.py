"""cluster: a program on several cards, every rank of it rehearsed as a process of its own.

    layout         nodes and ranks, which of them are run, the environment that a launcher gives each
    launchers      the command lines of torchrun, accelerate and deepspeed, and what they start
    broker         in the parent: exchanges of values between ranks, a shared store, who computes and who waits
    peers          in a rank: the other end of the broker
    ranks          forked processes, from start to end
    classes        on many ranks: which are run, and for which others
    communication  logs of collectives as rows: calls, bytes, bytes on the wire, lines
    nccl           memory of communicators, outside of the allocator
    faults         deadlocks, mismatches and divergence, with the lines of the ranks

A rank is forked from a parent that has imported torch. Collectives on stand-ins need no other rank: each rank logs them, and
the logs are compared afterwards. What has values (integers, objects, barriers, stores) is exchanged through the broker.
`layout`, `launchers` and `nccl` do not import torch.
"""
