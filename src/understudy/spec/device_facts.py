"""Facts about a device on which the outcomes of operators depend.

Memory sizes and speeds are not among them: they do not affect outcomes. Imports nothing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Part of the cache's key: a plan made for one device is not replayed on another that differs in these facts.

    `capability` is (0, 0) for a device that has none; versions are as torch reports them (`torch.version.cuda`,
    `torch.backends.cudnn.version()`), "" and 0 where the library is not there.
    """

    kind: str
    capability: tuple[int, int] = (0, 0)
    multiprocessors: int = 0
    threads_per_multiprocessor: int = 0
    cuda: str = ""
    cudnn: int = 0

    def __str__(self) -> str:
        parts = [self.kind]
        if self.capability != (0, 0):
            parts[0] += f" {self.capability[0]}.{self.capability[1]}"
        if self.multiprocessors:
            parts.append(f"{self.multiprocessors} multiprocessors")
        if self.cuda:
            parts.append(f"CUDA {self.cuda}")
        if self.cudnn:
            parts.append(f"cuDNN {self.cudnn // 10_000}.{self.cudnn // 100 % 100}.{self.cudnn % 100}")
        return ", ".join(parts)
