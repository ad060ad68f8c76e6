"""meta: MetaTracer and symbolic_trace, a torch-level trace in which every value has metadata.

tracer      MetaTracer, symbolic_trace
recorder    FunctionRecorder: calls of torch functions become nodes
derivation  the metadata of a call's result: by the same call on stand-ins
overrides   manual_meta_overrides
results     the values that the program gets for the results of nodes
arguments   from values to the arguments of nodes; sizes as nodes
inputs      signature, examples, concrete arguments
structures  dicts, dataclasses, caches with values in them
devices     the device of a value
regions     autocast and no_grad as nodes
vmap        functions of torch.vmap as subgraphs
modules     the paths of called modules, safe names
proxies     MetaProxy: values with unknown metadata, and the arguments of overridden hooks
patches     functions that are replaced while a program is traced
errors      MetaTraceError
"""
