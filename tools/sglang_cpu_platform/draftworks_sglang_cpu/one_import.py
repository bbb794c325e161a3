"""The processes of an SGLang server on a CPU as forks of its first one: libraries are imported once, not in each.

That import is 13 of the 14 seconds of a core that a process of SGLang 0.5.23 takes to start, and a server has three.
SGLang starts them anew because CUDA does not survive a fork. Each asks the kernel to be ended with its parent as the
first thing it does, as before. An Engine inside another program is left alone: what threads run there is not known.
"""

from __future__ import annotations

import multiprocessing
import sys
from typing import Any

SERVER = "sglang.launch_server"
CHOICE = "sglang.srt.entrypoints.engine._set_envs_and_config"
"""The function of SGLang that chooses, last of all, how processes start."""


def register() -> None:
    """Register `choose_fork` with SGLang, in the first process of a server on a machine without a GPU."""
    import torch

    main = sys.modules["__main__"].__spec__
    if main is None or main.name != SERVER or torch.cuda.is_available():
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # pyright: ignore[reportMissingImports]

    HookRegistry.register(CHOICE, choose_fork, HookType.AFTER)


def choose_fork(result: None, server_args: Any) -> None:
    """Have processes forked from now on; not where several copies of the target are started, which threads do."""
    if server_args.dp_size == 1:
        multiprocessing.set_start_method("fork", force=True)
