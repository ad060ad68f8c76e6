"""ops: the facts about each operator.

A module for each family holds its rules and its decompositions for symbolic sizes.

    registry     one record for each operator, traits, the trait of rules
    hops         one record for each higher-order operator
    kernel_tables/  which dtypes CPU kernels refuse, by release of torch
    variants     rules of in-place and out= variants, derived from the functional ones
    factories    new tensors: from sizes and numbers, and copies of others
    random       operators that draw random numbers
    communication  collectives between processes
    refused      operators with data-dependent sizes or quantised results
    pointwise/   elementwise operators
    views/       views, copies of views, splitting and joining
    reductions/  operators that combine elements along dimensions
    linalg/      linear algebra and Fourier transforms
    nn/          parts of neural networks
    indexing/    reading and writing elements by index
    shared/      helpers of several families
    traits/      facts that other packages read
"""

import importlib
import pkgutil

for _module in pkgutil.walk_packages(__path__, f"{__name__}."):
    if not _module.name.endswith("__main__"):
        importlib.import_module(_module.name)  # importing a module registers its facts
