"""Facts about operators that other rooms ask for, one module for each subject.

    writes       what a call writes to, and which memory it may write to
    values       whether the values of results follow from those of inputs; which arguments are indices
    ranges       between which numbers the values of results lie
    devices      which device a call happens on, which calls may mix devices
    rare_dtypes  dtypes that the CPU computes little with
    autocast     which dtype autocast casts to
    recording    how an operator appears in a recorded graph
    caching      which plans may be kept, which composites are remembered
    scratch      memory that a kernel or a library takes besides results
    flops        what a call computes and moves: multiply-adds, operations, bytes
"""
