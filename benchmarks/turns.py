"""Training steps in turns: a process for each side, of which one works while the others wait.

Imports nothing of this project or of its environment but torch, as processes of other environments use it too.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

WARM_UP = 3


def serve_steps(make: Callable[[], Callable[[], object]], after_torch: float) -> None:
    """Make a step, then run as many as each line of stdin says; print a JSON line for each.

    `cpu_s` and `wall_s` are the times of the steps, `mb` is the peak memory since this call above `after_torch`, which is the
    memory after `import torch`, and `step_mb` the same above that before `make`.
    """
    begin = read_memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # from here on, VmHWM is the peak
    step = make()
    for _ in range(WARM_UP):
        step()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        found: dict[str, list[float]] = {"cpu_s": [], "wall_s": []}
        for _ in range(int(line)):
            cpu, wall = time.process_time(), time.perf_counter()
            step()
            found["cpu_s"].append(time.process_time() - cpu)
            found["wall_s"].append(time.perf_counter() - wall)
        peak = read_memory("VmHWM")
        print(json.dumps({**found, "mb": peak - after_torch, "step_mb": peak - begin}), flush=True)


class Stepper:
    """A process that runs `serve_steps`; waits until its steps are warm.

    Raises:
        RuntimeError: it ended; what it said is on stderr.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            command, env=dict(environment), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.seconds: list[float] = []
        self.wall_seconds: list[float] = []
        self.mb = self.step_mb = 0.0
        self._read()

    def run(self, steps: int) -> None:
        """Run steps; `seconds` of processor time and `wall_seconds` get a value more for each, `mb` and `step_mb` are new."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        found = self._read()
        self.seconds += found["cpu_s"]
        self.wall_seconds += found["wall_s"]
        self.mb, self.step_mb = found["mb"], found["step_mb"]

    def close(self) -> None:
        self._process.communicate()

    def _read(self) -> dict:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"{self._process.args} ended with exit code {self._process.wait()}")


def read_memory(field: str) -> float:
    """Return a field of `/proc/self/status` in MB: `VmRSS`, the memory of this process, or `VmHWM`, its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(dict(line.split(":", 1) for line in lines if ":" in line)[field].split()[0]) / 1000
