"""exporting: captured graphs for the tools of torch.

    program             export, and the program that it gives
    acceleration        accelerate_export: torch.export.export on our capture
    requests            the inputs, and which of their dimensions are asked to vary
    signature           state as inputs, names, the signature
    regions             regions without gradients or with autocast, as graphs of their own
    guards              guards_of, check_inputs; requests that the program breaks
    interop             to_torch; torch's own fake values for specs
    functional_forms    operators that write, as operators that give new tensors and one kind of copy
    functionalisation   the copies of a graph as values, and what is written from outside as outputs
    view_inverses       what a tensor is, from the new value of a view of it
"""
