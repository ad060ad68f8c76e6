"""Names of torch that differ between releases."""

from __future__ import annotations

import torch
import torch.utils.checkpoint

CHECKPOINT_GENERATOR = "torch.utils.checkpoint._checkpoint_without_reentrant_generator"
"""What surrounds the function of a checkpoint; since torch 2.14 under another name."""
if hasattr(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator_impl"):
    CHECKPOINT_GENERATOR += "_impl"
