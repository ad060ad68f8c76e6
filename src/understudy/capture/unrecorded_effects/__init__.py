"""Effects of a program that reach no dispatch mode; here they are recorded.

    global_state     random state, default dtype, generators, data of parameters, as nodes
    data_reads       tolist, numpy, torch.tensor of a list: reads without an operator; determined values of real tensors
    torch_functions  the function mode that sees all of these; recurrent layers as one node
"""
