"""library_kernels: kernels of other libraries on simulated cards.

    modules     stand-in modules for packages that cannot be installed without a GPU
    launches    a kernel that writes its arguments: what a listener sees of it
    flash_attn  the functions of that package, by torch's own operators of the same kernels
    xformers    the same for xformers.ops
    apex        norms, softmax and gradients of weights of NVIDIA's Apex
    compiled    operators of torchvision and torchaudio whose compiled library does not load
    extensions  CUDA extensions that a program compiles: not built
    triton      kernels written in Triton: decorators and launches, also of the installed package

A package that is installed is used as it is.
"""

from understudy.simulation.library_kernels import compiled as compiled
from understudy.simulation.library_kernels import extensions as extensions
from understudy.simulation.library_kernels.apex import APEX
from understudy.simulation.library_kernels.flash_attn import FLASH_ATTN
from understudy.simulation.library_kernels.triton import TRITON
from understudy.simulation.library_kernels.xformers import XFORMERS

STAND_INS = {"flash_attn": FLASH_ATTN, "xformers": XFORMERS, "triton": TRITON, **APEX}
