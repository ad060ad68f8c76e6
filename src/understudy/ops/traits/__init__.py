"""Facts about operators that other packages read, one module for each subject.

writes       which arguments a call writes to, and which overlaps it rejects
values       whether the values of results follow from those of inputs; which arguments are indices
ranges       bounds of the values of results
devices      on which device a call runs, which calls accept several devices
autocast     which dtype autocast casts to, the paths of composites on an accelerator
caching      which plans may be cached, which composites have recipes, how operators appear in a recorded graph
scratch      temporary memory of kernels and libraries; how reductions spread over blocks
cuda_kernels temporary memory of attention and of sorts
flops        the work of a call: multiply-adds, operations, bytes moved
kernel_families  the kernels that a call runs on a card
"""
