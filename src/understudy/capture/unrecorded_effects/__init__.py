"""What programs do without an operator that tells of it: the recorder hears of it here.

    global_state     random state, default dtype, generators, data of parameters, as nodes
    data_reads       tolist, numpy, torch.tensor of a list: reads without an operator; determined values of real tensors
    torch_functions  the mode for torch functions that notices all of these; recurrent layers as one node
"""
