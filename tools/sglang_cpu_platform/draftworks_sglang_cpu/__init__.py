"""A platform plug-in of SGLang: a CPU that needs none of SGLang's compiled kernels.

SGLang's documented CPU mode imports kernels that are not published for CPU. A platform from outside makes it choose
the torch-native path of every layer instead; nothing of SGLang is replaced. Speculative decoding has no such path, so there
two functions are exchanged for other forms of them in SGLang: see draftworks_sglang_cpu.speculation.
"""

from __future__ import annotations


def activate() -> str | None:
    """The platform's class for SGLang to load; None where there is a GPU, so that the plug-in may stay installed."""
    import torch

    return None if torch.cuda.is_available() else "draftworks_sglang_cpu.platform:TorchCpuPlatform"
