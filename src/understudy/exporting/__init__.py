"""exporting: captured graphs for the tools of torch.

    interop  to_torch
"""
