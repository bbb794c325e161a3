"""A process that has imported what the programs import, and starts them as children of the process that started it.

A program's start is nearly all imports. The child is made by clone(CLONE_PARENT): its parent is the one that asks, which waits
for it, gets its exit code and dies before or after it, as if it had forked itself. This process computes nothing and has one
thread, so that a fork loses nothing.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import inspect
import json
import os
import signal
import socket
import sys

import warm_program
import warm_starts

_CLONE_PARENT, _CHILD_SETTID, _CHILD_CLEARTID = 0x8000, 0x01000000, 0x00200000
_SYS_CLONE = {"x86_64": 56, "aarch64": 220}
MOST_DESCRIPTORS = 64
NAME = "warm-server"
"""What `ps` shows of a server that a program has for what it starts."""
PRELOADED = [f"draftworks.programs.{name}" for name in ("regenerate", "capture", "train", "evaluate", "export")]
LATER = ("torch._dynamo", "torch.distributed.fsdp", "matplotlib.figure", "matplotlib.backends.backend_agg", "pandas")
"""What programs import on their way: by the first optimizer step, by a backend, for a plot and a table."""
STARTERS = ("torch.distributed.run", "torch.distributed.elastic.agent.server.local_elastic_agent", "dagster._cli")
LAZY = {"transformers": ("AutoModelForCausalLM", "AutoTokenizer", "LlamaForCausalLM", "PreTrainedTokenizerFast")}
"""What transformers imports only when asked for the name."""


def preload() -> None:
    from draftworks.config.strategies import list_strategies, resolve_strategy

    for module in (*PRELOADED, *LATER, *STARTERS):
        importlib.import_module(module)
    for name in list_strategies():
        importlib.import_module(resolve_strategy(name).factory.partition(":")[0])
    for module, names in LAZY.items():
        for name in names:
            getattr(sys.modules[module], name)
    # torchrun asks its stack for names of functions; source lines, which it does not use, are searched in every module.
    inspect.stack.__defaults__ = (0,)
    gc.collect()
    gc.freeze()


def serve(requests: socket.socket) -> tuple[warm_program.Start, list[int]]:
    """Start what is asked for until the other end is closed; returns in each child, with what it is to become."""
    while True:
        head, descriptors, _, _ = socket.recv_fds(requests, 8, MOST_DESCRIPTORS)
        if len(head) < 8:
            os._exit(0)
        text = _receive(requests, int.from_bytes(head, "little"))
        pid = clone_as_sibling()
        if pid == 0:
            requests.detach()
            return warm_program.Start(**json.loads(text)), descriptors
        for each in descriptors:
            os.close(each)
        requests.sendall(pid.to_bytes(8, "little"))


def _receive(requests: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        parts += requests.recv(size - len(parts))
    return bytes(parts)


def clone_as_sibling() -> int:
    """Fork a process whose parent is this one's parent; returns as os.fork. Only for a process of one thread."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    flags = _CLONE_PARENT | _CHILD_SETTID | _CHILD_CLEARTID | signal.SIGCHLD
    words = [ctypes.c_long(word) for word in (_SYS_CLONE[os.uname().machine], flags, 0, 0)]
    thread_id = ctypes.c_ulong(_find_thread_id(libc))  # libc keeps it, and the child has another
    last = (thread_id, ctypes.c_long(0)) if os.uname().machine == "x86_64" else (ctypes.c_long(0), thread_id)
    pid = libc.syscall(*words, *last)
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    elif pid < 0:
        raise OSError(ctypes.get_errno(), "clone failed")
    return pid


def _find_thread_id(libc: ctypes.CDLL) -> int:
    """The address at which libc keeps the id of this process's only thread."""
    found = ctypes.c_ulong(0)
    pr_get_tid_address = 40
    if libc.prctl(pr_get_tid_address, ctypes.byref(found), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_GET_TID_ADDRESS) failed")
    assert ctypes.c_int.from_address(found.value).value == os.getpid()
    return found.value


def fork_server() -> socket.socket:
    """Fork a server off this process, for what it will start; returns the end that asks. It ends with this process."""
    ours, theirs = socket.socketpair()
    if os.fork():
        theirs.close()
        return ours
    ours.detach()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nowhere, standard)
    os.closerange(3, theirs.fileno())
    os.closerange(theirs.fileno() + 1, warm_program.HIGH)
    warm_program.show_in_proc([NAME], {})
    for signum in (signal.SIGINT, signal.SIGTERM):  # of a group: it ends when the other end is closed
        signal.signal(signum, signal.SIG_IGN)
    warm_starts.become(*serve(theirs))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests, which end this process
    requests = socket.socket(fileno=int(sys.argv[1]))
    sys.path[:0] = [str(warm_program.ROOT)]
    preload()
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose threads"
    requests.sendall(b"ready")
    warm_starts.become(*serve(requests))


if __name__ == "__main__":
    sys.modules["warm_server"] = sys.modules["__main__"]
    main()
