"""Higher-order operators in a capture: their functions become subgraphs.

subgraphs        `enter` and `record`: from a call to subgraphs, a node and a result; checks of branches
closures         tensors from the closure of a branch become operands, its variables are kept; flex attention
derivatives      gradients of these operators
transforms       these operators under torch.func, and with ordinary gradients
torch_tracing    the current tracer for torch's own rules
"""
