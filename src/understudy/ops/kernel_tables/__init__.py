"""What CPU kernels refuse: a data file for each release of torch, written by a command that asks the real kernels.

refusals    refuses CPU calls for whose dtypes eager has no kernel
table       reads a file: signatures that kernels refuse, facts in which releases differ
signatures  the dtypes of a call, as files and kernels are asked about them
survey      asks real kernels in child processes
facts       facts in which releases differ, found by calling kernels
boxes       sets of signatures in few lines
__main__    python -m understudy.ops.kernel_tables > src/understudy/ops/kernel_tables/cpu-2.13.txt
"""
