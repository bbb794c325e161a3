"""Runs what `make test` leaves out, room by room, and goes on where it was cut off.

    python -m tools.long_tests [--again] [--only PART ...] [--list]

Parts that passed are kept beside the environment with a digest of the checkout: another checkout begins anew.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STATE = ROOT / ".venv" / "long.json"
KINDS = {"sglang": ".venv", "vllm": ".venv", "mooncake": ".venv-mooncake", "cluster": ".venv", "ray": ".venv-ray"}
"""Markers of tests that need real servers, and the environment whose Python runs pytest."""
APART = ("speculators", "specforge", "trackers", *KINDS)
STARTING = ("capture", "deploy", "distributed", "jobs", "programs", "resources", "runtime", "sensors", "spec_assets")
"""Rooms whose tests start programs."""
NOTHING_COLLECTED = 5


@dataclass(frozen=True)
class Part:
    """One run of pytest.

    Attributes:
        python: of the environment, below the checkout.
    """

    name: str
    marker: str
    paths: tuple[str, ...]
    python: str = ".venv/bin/python"
    options: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)


def list_parts(root: Path, libraries: str) -> Iterator[Part]:
    """Yield all parts: long tests and random examples of each room, real starts, and what needs real servers.

    Args:
        libraries: LD_LIBRARY_PATH with which Mooncake finds its own.
    """
    here = " and ".join(f"not {marker}" for marker in (*APART, "gpu"))
    rooms = sorted(path.name for path in (root / "tests").iterdir() if any(path.rglob("test_*.py")))
    random = ("--hypothesis-profile", "long")
    for room in rooms:
        yield Part(room, f"(long or hypothesis) and {here}", (f"tests/{room}",), options=random)
    for room in STARTING:
        yield Part(f"{room}-real-starts", f"not long and {here}", (f"tests/{room}",), env={"WARM": "0"})
    for kind, environment in KINDS.items():
        others = " and ".join(f"not {other}" for other in KINDS if other != kind)
        env = {"LD_LIBRARY_PATH": libraries} if kind == "mooncake" else {}
        yield Part(kind, f"long and {kind} and {others}", ("tests",), f"{environment}/bin/python", env=env)
    both = {"LD_LIBRARY_PATH": libraries}
    yield Part("sglang-mooncake", "long and sglang and mooncake", ("tests",), ".venv-mooncake/bin/python", env=both)


def digest_checkout(root: Path) -> str:
    """Return a digest of the commit and of what was changed since."""
    said = [
        subprocess.run(["git", *words], cwd=root, check=True, capture_output=True).stdout
        for words in (["rev-parse", "HEAD"], ["diff", "HEAD"], ["status", "--porcelain"])
    ]
    return hashlib.sha256(b"\0".join(said)).hexdigest()


def run_part(part: Part, root: Path, workers: str) -> int:
    """Run one part; return the exit code, 0 also if it has no test."""
    command = [
        part.python,
        "-m",
        "pytest",
        "-n",
        workers,
        "--dist",
        "loadfile",
        "--timeout",
        "3600",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(
        [*command, "-m", part.marker, *part.options, *part.paths], cwd=root, env={**os.environ, **part.env}
    )
    return 0 if done.returncode == NOTHING_COLLECTED else done.returncode


def read_passed(state: Path, digest: str) -> dict[str, float]:
    """Return the parts that passed in this checkout, with their seconds."""
    try:
        known = json.loads(state.read_text())
    except (OSError, ValueError):
        return {}
    return known["passed"] if known.get("checkout") == digest else {}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true", help="also what passed in this checkout")
    parser.add_argument("--only", nargs="+", metavar="PART", help="these parts")
    parser.add_argument("--list", action="store_true", help="print the names of all parts")
    parser.add_argument("--workers", default=os.environ.get("TEST_WORKERS", "2"))
    parser.add_argument("--libraries", default=os.environ.get("LD_LIBRARY_PATH", ""), help="those of Mooncake")
    given = parser.parse_args(arguments)
    parts = [each for each in list_parts(ROOT, given.libraries) if not given.only or each.name in given.only]
    if given.list:
        print("\n".join(each.name for each in parts))
        return 0
    digest = digest_checkout(ROOT)
    passed = {} if given.again else read_passed(STATE, digest)
    failed = []
    for part in parts:
        if part.name in passed:
            print(f"== {part.name}: passed before, {passed[part.name]:.0f} s")
            continue
        print(f"== {part.name}", flush=True)
        begin = time.monotonic()
        if run_part(part, ROOT, given.workers):
            failed.append(part.name)
            continue
        passed[part.name] = time.monotonic() - begin
        STATE.write_text(json.dumps({"checkout": digest, "passed": passed}, indent=1))
    print(
        f"{len(passed)} parts passed in {sum(passed.values()):.0f} s"
        + (f"; failed: {', '.join(failed)}" if failed else "")
    )
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
