"""trace: graphs of programs that run on stand-ins.

    capture          make_fx: one run of one function under a recorder
    recorder         every operator call becomes a node
    tracer           the graph that is being recorded, and which node stands for which value
    slots            that knowledge, under the names that torch's users know
    sym_nodes        symbolic numbers in a graph
    constants        tensors that the graph did not make
    decomposing      operators written out in others, by a table
    dispatch_trace   tracing by hand
    predispatch      above autograd: changes of its state are nodes
    inner_recorder   above autograd: what an operator is made of, for a backward pass
    subgraphs        higher-order operators: their functions become graphs, also under the transforms of torch.func
    runtime_asserts  what was taken for granted of numbers that only data knows, as nodes
    reads            reads of data that no operator tells of
    generators       random generators that a program makes itself
    foreign          symbolic numbers of torch's own in a graph
    zeros            forward-mode gradients of zero that are written to
    module_stack     which modules a node comes from, by the path they were reached by
    effects          what a call does besides giving its result
    dead_code        nodes that nothing uses and that do nothing besides

    prop             FakeTensorProp: a graph, node by node
    prop_targets     what is known of a node's target before it is called
    prop_values      what is written into a node
    prop_state       the module's own tensors, borrowed for a run
    prop_subgraphs   graphs inside of graphs
    prop_edits       what an edit of a graph reaches
    prop_errors      errors that name the node
"""
