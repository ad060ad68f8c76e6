"""Values of tensors without data.

    determined        values that follow from the program alone, computed when somebody asks
    data_dependent    answers that lie in the data: from determined values, or as new symbols
    sizes_in_tensors  tensors of integers that are made of sizes; x[n] where n is symbolic
"""
