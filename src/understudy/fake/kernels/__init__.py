"""Kernels of ours on spare dispatch keys of torch.

    autocast    autocast and device-specific composites for devices that are not here
    recipes     composite operators on symbolic sizes, replayed from memory
    transforms  rules for torch.func on symbolic sizes
"""

from understudy.fake.kernels import autocast, recipes, transforms

__all__ = ["autocast", "recipes", "transforms"]
