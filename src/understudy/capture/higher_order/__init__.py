"""Higher-order operators in a capture: the functions that they are given become graphs inside the graph.

    subgraphs        enter and record: from a call to graphs, a node and a result; what a branch must not do
    closures         tensors that a branch uses without being given them become operands; flex attention
    derivatives      forward and backward of these operators
    transforms       these operators under torch.func, and with ordinary gradients
    batching         these operators under torch.vmap
    torch_tracing    the capture of this thread, where torch's own rules ask for a tracer
"""
