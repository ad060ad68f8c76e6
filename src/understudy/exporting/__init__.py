"""exporting: captured graphs for the tools of torch.

    interop             to_torch; torch's own fake values for specs
    functional_forms    operators that write, as operators that give new tensors and one kind of copy
    functionalisation   the copies of a graph as values, and what is written from outside as outputs
    view_inverses       what a tensor is, from the new value of a view of it
"""
