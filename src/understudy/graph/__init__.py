"""graph: modules that capture, prop and meta share.

borrowed_state  replaces the tensors of a module for the time of a run; pauses garbage collection
lazy_dict       a dict whose values are made on first access
node_values     `val` and `tensor_meta` of a node
node_origins    stack traces of nodes, and errors that name a node and the user's line
symbol_nodes    symbolic numbers as nodes
random_state    random state, default dtype and generators as nodes
show            show: a graph as a table
"""
