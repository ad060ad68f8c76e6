"""Functions of torch that are replaced while a fake mode is active. `understudy.patching` applies the patches.

Each function takes the original object and returns its replacement, which changes the behaviour for fakes, or in
threads in which a fake mode is active, and calls the original otherwise.

    devices         questions about devices, and the data of real tensors
    layers          construction and initial values of torch's own layers
    modules         encoders, data loaders, files, storages, data-parallel modules
    lazy_modules    parameters and buffers of nn.LazyLinear and others, before the first batch
    control_flow    torch.compile, higher-order operators, scripted functions
    symbolic_sizes  functions that read sizes as plain integers
"""

from understudy.fake.patches import control_flow, devices, layers, lazy_modules, modules, symbolic_sizes

__all__ = ["control_flow", "devices", "layers", "lazy_modules", "modules", "symbolic_sizes"]
