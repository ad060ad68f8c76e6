"""Values of tensors without data.

determined        values that follow from the program alone, computed when they are read
input_numbers     inputs that are one number in a tensor, as symbols
ranges            bounds of values that are not determined
answers           the policy for reads of missing data, and the list of the answers given
data_dependent    data-dependent operators: answered from determined values, or with unbacked symbols
sizes_in_tensors  tensors of integers that are computed from sizes; x[n] where n is symbolic
"""
