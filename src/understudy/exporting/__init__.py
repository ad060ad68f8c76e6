"""exporting: captured graphs for the tools of torch.

program             export, its result, accelerate_export
inputs              the inputs and their dynamic dimensions; guards_of, check_inputs
signature           state as inputs, names, the signature; regions as subgraphs
functional_forms    operators that write, as functional operators and copies
functionalisation   removes writes; written inputs become outputs
interop             to_torch; torch's own fake values for specs
"""
