"""Training steps on a GPU in turns: a process for each side, which prepares beside the others and waits for its turn.

Imports nothing of this project or of its environment but torch, as processes of other environments use it too.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch

WARM_UP = 2
Step = Callable[[], object]


def serve_turns(prepare: Callable[[], Callable[[], Step]], device: str) -> None:
    """Prepare a step on the CPU; then do what each line of stdin says: `start`, or a number of steps. Answers in JSON.

    Between turns the process keeps weights and optimizer, and gives all other memory of the device back.
    """
    make = prepare()
    _answer({"prepared": True})
    step: Step | None = None
    for line in sys.stdin:
        begin = time.perf_counter()
        if line.strip() == "start":
            step = make()
            for _ in range(WARM_UP):
                step()
            warm = time.perf_counter()
            found = _run(step, 1, device)
            _rest(device)
            _answer({"start_s": warm - begin, "ms": found["ms"][0], "peak_gb": found["peak_gb"]})
            continue
        assert step is not None
        _answer(_run(step, int(line), device))
        _rest(device)


def _run(step: Step, steps: int, device: str) -> dict[str, Any]:
    step()  # memory is taken again
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    laps = []
    for _ in range(steps):
        begin = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        laps.append((time.perf_counter() - begin) * 1e3)
    peak = torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else None
    return {"ms": laps, "peak_gb": peak}


def _rest(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _answer(found: dict[str, Any]) -> None:
    print(json.dumps(found), flush=True)


class Side:
    """A process that runs `serve_turns`. The end of what it says on stderr is ours, too, when it is closed."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._name, self._errors = command[1], Path(tempfile.mkstemp(suffix=".err")[1])
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with self._errors.open("w") as file:
            self._process = subprocess.Popen(command, env=dict(environment), stderr=file, **pipes)
        self.prepared = False
        self.ms: list[float] = []
        self.peak_gb: float | None = None

    def start(self) -> dict[str, Any]:
        """Build and warm up on the device; return the seconds that took, and time and memory of a step then."""
        self.wait()
        return self._ask("start")

    def wait(self) -> None:
        """Wait until it has prepared."""
        if not self.prepared:
            self._read()
            self.prepared = True

    def run(self, steps: int) -> None:
        found = self._ask(str(steps))
        self.ms += found["ms"]
        self.peak_gb = found["peak_gb"]

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        if self._errors.exists():
            print(f"{self._name}:\n{self._said()[-4000:]}", file=sys.stderr)
            self._errors.unlink()

    def _said(self) -> str:
        return self._errors.read_text(errors="replace")

    def _ask(self, line: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # what it said is told below
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        lines: IO[str] | None = self._process.stdout
        assert lines is not None
        for line in lines:
            if line.startswith("{"):
                return json.loads(line)
        self._process.wait()
        said = [line for line in self._said().splitlines() if line and not line.startswith(" ")]
        errors = [line for line in said if re.match(r"[\w.]*(Error|Exception)\b", line)] or said
        raise RuntimeError(errors[-1][:250] if errors else f"exit code {self._process.returncode}")
