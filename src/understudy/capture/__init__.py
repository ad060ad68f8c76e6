"""capture: make_fx and its relatives. One run of a program under a recorder gives the graph of its operators.

make_fx              make_fx: options, the run, names of inputs, errors
recorder             ProxyTorchDispatchMode: every operator call becomes a node
tracer               PythonKeyTracer: the recorded graph, and the node of each value
trackers             the values that a tracer knows, as mappings
constants            parameters, buffers, constants and tensors from outside, as attributes of the graph module
borrowed_modules     the modules that the traced function refers to: their tensors during the trace
constant_values      the values of constants, by which a program may decide
program_caches       functions with a cache that the program calls: tensors in them before and after the trace
decompositions       decomposition tables
manual_tracing       dispatch_trace and other ways to trace by hand
predispatch          recording above autograd; the inner operators of composites, which gradients need
step                 capture_step: forward, loss, backward and optimizer as one graph
optimizer_steps      the state of an optimizer in such a graph
module_stack         the modules that were being called when a node was recorded
proxy_slots          get_proxy_slot and its relatives: the proxy of each value
deprecated           public names without effect, for one more release
graph_passes         after the run: dead code, writable zeros, runtime assertions, returned wrappers
higher_order/        cond, scan, while_loop, … and their functions as graphs
unrecorded_effects/  effects of a program that reach no dispatch mode
"""
