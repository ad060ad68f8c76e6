"""The kernels of attention that published runs had: those of their time, not of today's torch.

    with attention_of("flash-attention 2"): ...     estimates in here are those of the older kernels; "" are today's

The curves are those of torch 2.13. What runs before it had is a property of their tables: a speed of the two families of
attention, relative to the curve. It is passed on as a calibration of the card, which is what a user has for it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TRITON, FLASH_2 = "triton", "flash-attention 2"
CHIP_OF = {"a100-40": "a100", "a100-80": "a100", "h100": "h100"}
SPEEDS = {
    # llm-foundry's tables of 2023; fitted on those of eight cards by `python -m tools.fit_kernels`
    TRITON: {"a100": (0.935, 0.645), "h100": (0.934, 0.316)},
    # Of published figures of both on an H100, causal, 16k tokens: 370 and 320 TFLOP/s against 640 and 560 of the third.
    FLASH_2: {"h100": (0.6, 0.57)},
}
"""Of the forward and the backward pass, by kernels and chip."""
FAMILIES = ("attention", "attention_backward")


@contextmanager
def attention_of(kernels: str) -> Iterator[None]:
    if not kernels:
        yield
        return
    before = os.environ.get("UNDERSTUDY_CONFIG")
    lines = []
    for card, chip in CHIP_OF.items():
        if chip in SPEEDS[kernels]:
            lines += [f"[{card}.speed]"]
            lines += [
                f"{family} = {speed}" for family, speed in zip(FAMILIES, SPEEDS[kernels][chip], strict=True)
            ]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "calibration.toml").write_text("\n".join(lines) + "\n")
        os.environ["UNDERSTUDY_CONFIG"] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ["UNDERSTUDY_CONFIG"]
            else:
                os.environ["UNDERSTUDY_CONFIG"] = before
