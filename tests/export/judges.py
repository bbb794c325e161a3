"""All judges of exports of one peer in one process of the peer's own Python, which imports the peer once: `judges.py MODULE...`.

Reads a JSON line {"judge", "folders", "work"} for each question, `judge` being one of the modules. A fork of this process answers
it, so that no judge finds what another one has set up, and leaves work/found.json and work/judge.log; then its exit code is
printed as a line.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

Judge = Callable[[list[Path], Path], list[Any]]


def answer(judge: Judge, folders: list[Path], work: Path) -> NoReturn:
    code = 1
    try:
        log = os.open(work / "judge.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        with torch.no_grad():
            found = judge(folders, work)
        (work / "found.json").write_text(json.dumps(found))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main(modules: list[str]) -> None:
    codes = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what imports print is no answer
    judges: dict[str, Judge] = {name: importlib.import_module(name).judge for name in modules}
    gc.freeze()
    for line in sys.stdin:
        asked = json.loads(line)
        pid = os.fork()
        if pid == 0:
            answer(judges[asked["judge"]], [Path(folder) for folder in asked["folders"]], Path(asked["work"]))
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), file=codes, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
