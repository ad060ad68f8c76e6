"""Our kernels on dispatch keys of torch that no backend uses.

autocast    autocast and device-specific composites for devices that this machine lacks
recipes     recorded decompositions of composite operators, replayed
"""

from understudy.fake.kernels import autocast, recipes

__all__ = ["autocast", "recipes"]
