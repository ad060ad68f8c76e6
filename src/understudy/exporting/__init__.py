"""exporting: captured graphs for the tools of torch.

    program             export, the program that it gives, accelerate_export
    inputs              which dimensions are asked to vary; guards_of, check_inputs
    signature           state as inputs, names, the signature; regions as graphs of their own
    functional_forms    operators that write, as new values and copies
    functionalisation   writes as values, and what is written from outside as outputs
    interop             to_torch; torch's own fake values for specs
"""
