"""capture: make_fx and its relatives. One run of a program under a recorder gives the graph of its operators.

    make_fx              make_fx: its options, the run, names of inputs, errors
    recorder             ProxyTorchDispatchMode: every operator call becomes a node
    tracer               PythonKeyTracer: the graph that is recorded, and which node stands for which value
    constants            parameters, buffers, constants and tensors from outside, as attributes of the graph module
    borrowed_modules     modules and cached functions that the traced function refers to: their tensors during the trace
    lazy_state           stand-ins of parameters and metadata of nodes that are made when somebody reads them
    decompositions       operators written out in others, by a table
    manual_tracing       dispatch_trace and other ways to trace by hand
    predispatch          recording above autograd, and the parts of composite operators that gradients need
    step                 capture_step: forward, loss, backward and optimizer as one graph
    module_stack         which module a node comes from
    proxy_slots          get_proxy_slot and its relatives: which proxy stands for which value
    graph_passes         after the run: dead code, gradients that may be written to, runtime assertions
    wrapper_subclasses   tensors of wrapper classes that a program makes and returns
    repeated_layers/     layers like an earlier one are recorded without being run
    higher_order/        cond, scan, while_loop, … and their functions as graphs
    unrecorded_effects/  what programs do without an operator that tells of it
"""
