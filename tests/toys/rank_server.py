"""A process that has imported what the programs import, and forks a rank off itself for whoever asks.

The ranks of a small run spend nearly all their time on imports. A rank forked here is a process of its own, with its own
environment and its own log, as torchrun would start it, but it begins at the program. The server computes nothing
itself, so it has no threads that a fork would lose.

One JSON object per line on stdin is a request, one per line on stdout is its answer:
    {"program", "args", "env", "log"}  ->  {"pid"}     start a module, as `python -m` does, or a script
    {"pid"}                            ->  {"code"}    its exit code, null while it runs
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import sys
import traceback
from typing import Any

PRELOADED = [f"draftworks.programs.{name}" for name in ("regenerate", "capture", "train", "evaluate", "export")]
LATER = ("torch._dynamo", "torch.distributed.fsdp", "matplotlib.figure", "matplotlib.backends.backend_agg", "pandas")
"""What programs import on their way: by the first optimizer step, by a backend, for a plot and a table."""
LAZY = {"transformers": ("AutoModelForCausalLM", "AutoTokenizer", "LlamaForCausalLM", "PreTrainedTokenizerFast")}
"""What transformers imports only when asked for the name."""


def serve() -> None:
    """Answer requests until stdin ends, then kill what still runs."""
    _preload()
    requests, answers = sys.stdin, os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    running: set[int] = set()
    try:
        for line in requests:
            request = json.loads(line)
            answer = _poll(request["pid"], running) if "pid" in request else _start(request, running)
            print(json.dumps(answer), file=answers, flush=True)
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)


def _preload() -> None:
    from draftworks.config.strategies import list_strategies, resolve_strategy

    for module in (*PRELOADED, *LATER):
        importlib.import_module(module)
    for name in list_strategies():
        importlib.import_module(resolve_strategy(name).factory.partition(":")[0])
    for module, names in LAZY.items():
        for name in names:
            getattr(sys.modules[module], name)
    gc.collect()
    gc.freeze()


def _start(request: dict[str, Any], running: set[int]) -> dict[str, int]:
    pid = os.fork()
    if pid == 0:
        os._exit(_become(**request))
    running.add(pid)
    return {"pid": pid}


def _poll(pid: int, running: set[int]) -> dict[str, int | None]:
    found, status = os.waitpid(pid, os.WNOHANG)
    if not found:
        return {"code": None}
    running.discard(pid)
    return {"code": os.waitstatus_to_exitcode(status)}


def _become(program: str, args: list[str], env: dict[str, str], log: str) -> int:
    """Run the program in this process, which was just forked; returns its exit code."""
    os.setsid()
    nowhere, output = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for descriptor, source in ((0, nowhere), (1, output), (2, output)):
        os.dup2(source, descriptor)
    os.environ.clear()
    os.environ.update(env)
    sys.argv[1:] = args
    code: object = 0
    try:
        if program.endswith(".py"):
            runpy.run_path(program, run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else int(code is not None)


if __name__ == "__main__":
    serve()
