"""Values of tensors without data.

    determined        values that follow from the program alone, computed when somebody asks
    ranges            between which numbers values lie that are not determined
    answers           what is answered to a read of data that is not there: the policy, and the list of answers
    data_dependent    answers that lie in the data: from determined values, or as new symbols
    sizes_in_tensors  tensors of integers that are made of sizes; x[n] where n is symbolic
"""
