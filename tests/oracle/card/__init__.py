"""The simulated card against torch's own host code, on a CUDA runtime that launches nothing.

__main__         the command: builds, runs the cases on both sides, prints what agrees
build            the runtime for an installed build of torch: `runtime.c`, and what else torch refers to
record           runs cases in one process, and writes down the events of the allocator
compare          two such records, case by case
cases_operators  calls of single operators
cases_models     steps of training
cases_decoders   a decoder in plain operators, as different people write it, also in full size
cases_training   more of training: architectures, convolutions, sparse gradients, loaders
cases_programs   programs with several models, optimizers of their own, hooks, a search for the largest batch
"""
