"""Effects of a program that reach no dispatch mode; here they are recorded.

tensor_data      tolist, numpy, torch.tensor of a list: reads without an operator; determined values of real tensors;
                 data of parameters and other aliases, as nodes
torch_functions  the function mode that sees all of these; recurrent layers as one node
"""
