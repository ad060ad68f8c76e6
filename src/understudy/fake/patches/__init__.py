"""What torch answers otherwise while a fake mode is active. `understudy.patching` applies it.

Each function takes the object of torch and gives the one that replaces it: an answer for threads in which a fake mode is
active, or for fakes, and torch's own answer for all others.

    devices         questions about devices, and the data of real tensors
    modules         initial values of layers, encoders, data loaders
    control_flow    torch.compile, higher-order operators, scripted functions
    symbolic_sizes  functions that read sizes as plain integers
"""

from understudy.fake.patches import control_flow, devices, modules, symbolic_sizes

__all__ = ["control_flow", "devices", "modules", "symbolic_sizes"]
