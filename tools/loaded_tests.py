"""Runs the tests whose verdict could hang on the machine's load, again and again beside busy processes; tells who failed.

    python -m tools.loaded_tests [--turns 5] [--busy 8] [--workers 8] [PYTEST_ARGUMENT ...]

Without arguments for pytest it runs `FILES`: what waits for processes, threads, ports and time-outs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
FILES = (
    *(f"tests/house/test_house_{name}.py" for name in ("waiting", "leftovers", "pins", "warm_starts")),
    *(
        f"tests/resources/test_resources_{name}.py"
        for name in ("launcher_contract", "local_launcher", "scheduler_launcher", "kubernetes_launcher", "companions")
    ),
    "tests/resources/test_resources_kubernetes_scheduler.py",
    *(
        f"tests/programs/test_programs_{name}.py"
        for name in ("program", "ray_job", "train", "train_resume", "draft_names", "observe", "start")
    ),
    *(f"tests/stream/test_stream_{name}.py" for name in ("control_server", "consumer_lease", "sqlite_database")),
    *(f"tests/capture/engines/test_capture_sglang_{name}.py" for name in ("engine", "job", "balancing")),
    "tests/capture/test_capture_in_flight.py",
    "tests/preflight/installation",
    "tests/service/test_service_hook.py",
    *(
        f"tests/stream/test_stream_{name}.py"
        for name in ("shared_stream", "left_out", "failures", "streaming", "interleaved", "kills", "arrival_signals")
    ),
    *(f"tests/storage/test_storage_{name}.py" for name in ("artifacts", "lease", "lease_file", "object_store")),
    *(
        f"tests/spec_assets/test_spec_assets_{name}.py"
        for name in ("adoption", "stream_kills", "command_line", "killed_run", "unused", "interrupted_training")
    ),
    *(f"tests/production/test_production_{name}.py" for name in ("observer",)),
)
BUSY = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
ELSEWHERE = ("long", "speculators", "specforge", "sglang", "vllm", "mooncake", "cluster", "ray", "trackers", "gpu")
"""Markers of tests that need what `make test` does not have."""


@dataclass(frozen=True)
class Turn:
    """What one run of pytest came to."""

    tests: int
    failed: tuple[str, ...]


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep the processors busy with so many processes."""
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run_tests(arguments: Sequence[str]) -> Turn:
    """Run pytest once. Raises RuntimeError if it could not run."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        marked = " and ".join(f"not {marker}" for marker in ELSEWHERE)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", marked, f"--junitxml={report}"]
        done = subprocess.run([*command, *arguments], cwd=ROOT)
        if not report.exists():
            raise RuntimeError(f"pytest ended with exit code {done.returncode} and no report")
        return read_report(report)


def read_report(report: Path) -> Turn:
    """Return what a report of pytest (JUnit's form) says."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    return Turn(len(cases), tuple(f"{case.get('classname')}::{case.get('name')}" for case in failed))


def describe(turns: Sequence[Turn]) -> str:
    """Return one line per test that failed in any turn, and one about all."""
    failed = Counter(name for turn in turns for name in set(turn.failed))
    lines = [f"failed in {count} of {len(turns)} turns: {name}" for name, count in failed.most_common()]
    tests = max((turn.tests for turn in turns), default=0)
    return "\n".join([*lines, f"{len(turns)} turns of {tests} tests, {len(failed)} tests failed in any"])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5, help="how often all of them run")
    parser.add_argument("--busy", type=int, default=8, help="busy processes beside them")
    parser.add_argument(
        "--workers", type=int, default=8, help="tests at a time: with as many as busy processes, half is theirs"
    )
    known, rest = parser.parse_known_args(arguments)
    spread = ["-n", str(known.workers), "--dist", "loadfile", "--no-loadscope-reorder"] if known.workers > 1 else []
    turns: list[Turn] = []
    with busy(known.busy):
        for number in range(known.turns):
            turns.append(run_tests([*spread, *(rest or FILES)]))
            print(f"turn {number + 1}: {len(turns[-1].failed)} of {turns[-1].tests} failed", flush=True)
    print(describe(turns))
    return int(any(turn.failed for turn in turns))


if __name__ == "__main__":
    sys.exit(main())
