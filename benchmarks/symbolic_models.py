"""Models that compute with sizes, of which torch's symbolic mode can run a pass, too.

Swin and ConvNeXt pad to multiples, cut windows and interpolate. Torch's mode can't build them with a `ShapeEnv` (their
constructors read numbers off tensors), and C++ refuses its symbols in padding unless the Python dispatcher is on. So
models are built outside of the mode here and moved into it, and there are two small ones of the same kind beside them:
of Swin itself, with twelve layers, one pass of torch's takes many minutes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WINDOW, SHIFT, HEADS = 7, 3, 2


def moved_into(mode: Any, module: nn.Module) -> nn.Module:
    """The module with stand-ins of this mode, of static sizes, in place of its parameters and buffers."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                fake = mode.from_tensor(parameter.detach(), static_shapes=True)
                part._parameters[name] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = mode.from_tensor(buffer, static_shapes=True)
    return module


class WindowAttention(nn.Module):
    """Attention within windows: the image is padded to whole windows, shifted, cut, put together again and cropped."""

    def __init__(self, width: int, shift: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mixed = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.shift = shift

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, height, width, channels = x.shape
        right, bottom = -width % WINDOW, -height % WINDOW
        padded = F.pad(self.norm(x), (0, 0, 0, right, 0, bottom))
        shifted = torch.roll(padded, (-self.shift, -self.shift), (1, 2))
        rows, columns = (height + bottom) // WINDOW, (width + right) // WINDOW
        windows = shifted.view(batch, rows, WINDOW, columns, WINDOW, channels).transpose(2, 3)
        windows = windows.reshape(-1, WINDOW * WINDOW, channels)
        query, key, value = (
            part.view(-1, WINDOW * WINDOW, HEADS, channels // HEADS).transpose(1, 2)
            for part in self.mixed(windows).chunk(3, -1)
        )
        attended = (
            F.scaled_dot_product_attention(query, key, value)
            .transpose(1, 2)
            .reshape(-1, WINDOW, WINDOW, channels)
        )
        whole = self.out(attended).view(batch, rows, columns, WINDOW, WINDOW, channels).transpose(2, 3)
        whole = whole.reshape(batch, height + bottom, width + right, channels)
        return x + torch.roll(whole, (self.shift, self.shift), (1, 2))[:, :height, :width]


class Merging(nn.Module):
    """Four neighbours become one, after padding to even sizes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.reduction = nn.Linear(4 * width, 2 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.pad(x, (0, 0, 0, x.shape[2] % 2, 0, x.shape[1] % 2))
        corners = [x[:, row::2, column::2] for column in range(2) for row in range(2)]
        return self.reduction(torch.cat(corners, -1))


class Windows(nn.Module):
    """Like Swin: patches, windows, merging, windows."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.stages = nn.Sequential(
            WindowAttention(width, 0),
            WindowAttention(width, SHIFT),
            Merging(width),
            WindowAttention(2 * width, 0),
        )
        self.head = nn.Linear(2 * width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.pad(x, (0, -x.shape[3] % 4, 0, -x.shape[2] % 4))
        return self.head(self.stages(self.patches(x).permute(0, 2, 3, 1)).mean((1, 2)))


class Pyramid(nn.Module):
    """Like ConvNeXt with a decoder: depthwise convolutions at three scales, then interpolation back to the input's size."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        widths = (width, 2 * width, 4 * width)
        self.stem = nn.Conv2d(3, width, 4, 4)
        self.mixers = nn.ModuleList(nn.Conv2d(w, w, 7, padding=3, groups=w) for w in widths)
        self.norms = nn.ModuleList(nn.LayerNorm(w) for w in widths)
        self.wide = nn.ModuleList(nn.Linear(w, 4 * w) for w in widths)
        self.narrow = nn.ModuleList(nn.Linear(4 * w, w) for w in widths)
        self.down = nn.ModuleList(nn.Conv2d(w, 2 * w, 2, 2) for w in widths[:-1])
        self.sides = nn.ModuleList(nn.Conv2d(w, width, 1) for w in widths)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = x.shape[2:]
        x = self.stem(x)
        levels = []
        for level, mixer in enumerate(self.mixers):
            mixed = self.norms[level](mixer(x).permute(0, 2, 3, 1))
            x = x + self.narrow[level](F.gelu(self.wide[level](mixed))).permute(0, 3, 1, 2)
            levels.append(self.sides[level](x))
            if level < len(self.down):
                x = self.down[level](x)
        whole = levels[-1]
        for side in reversed(levels[:-1]):
            whole = side + F.interpolate(whole, size=side.shape[2:], mode="nearest")
        return F.interpolate(whole, size=size, mode="bilinear", align_corners=False)


SMALL: dict[str, Callable[[], nn.Module]] = {"windows": Windows, "pyramid": Pyramid}
