"""capture: make_fx and its relatives. One run of a program under a recorder gives the graph of its operators.

    make_fx              make_fx: options, the run, names of inputs, errors
    recorder             ProxyTorchDispatchMode: every operator call becomes a node
    tracer               PythonKeyTracer: the recorded graph, and the node of each value
    constants            parameters, buffers, constants and tensors from outside, as attributes of the graph module
    borrowed_modules     modules and cached functions that the traced function refers to: their tensors during the trace
    lazy_state           stand-ins of parameters, and nodes that are written again: made when they are first read
    decompositions       decomposition tables
    manual_tracing       dispatch_trace and other ways to trace by hand
    predispatch          recording above autograd; the inner operators of composites, which gradients need
    step                 capture_step: forward, loss, backward and optimizer as one graph
    optimizer_steps      the state of an optimizer in such a graph; parameters for which its step repeats
    module_stack         the modules that were being called when a node was recorded
    proxy_slots          get_proxy_slot and its relatives: the proxy of each value
    graph_passes         after the run: dead code, writable zeros, runtime assertions, returned wrappers
    repeated_layers/     layers like an earlier one are recorded without being run
    higher_order/        cond, scan, while_loop, … and their functions as graphs
    unrecorded_effects/  effects of a program that reach no dispatch mode
"""
