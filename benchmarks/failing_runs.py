"""Start runs that fail on a busy machine, and count how many of them end with the reason.

    python benchmarks/failing_runs.py                                   # 50 runs beside 6 busy processes
    python benchmarks/failing_runs.py --runs 8 --load 2 --json runs.json

The mistakes are of four kinds: in the data, the registry, the model's path, the name of a strategy. Half of the runs
are started by `draftworks run`, half by `dagster job execute` with jobs/console.yaml. A run passes if the reason is
among the last lines it prints and its exit code is that of a failure.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
LAST_LINES = 3
TARGET = """
model: {model}
dataset: chats
max_length: 96
capture: {{device: cpu}}
strategies: {{{strategy}: {{options: {{draft_vocab_size: 256}}, training: {{device: cpu}}}}}}
"""
LOCATION = """
from pathlib import Path
from spec_assets.code_location import build_definitions
defs = build_definitions(Path(__file__).parent / "registry")
"""


@dataclass(frozen=True)
class Mistake:
    """A mistake that makes a run fail; only its cause prints `reason`."""

    name: str
    reason: str
    target: str
    chats: str = '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}\n'


TINY = TARGET.format(model=ROOT / "registry" / "models" / "tiny", strategy="eagle3")
MISTAKES = (
    Mistake("data", "has a key conversations, messages or input_ids", TINY, chats="not json\n"),
    Mistake("key", "unknown key max_lenght; did you mean max_length?", TINY.replace("max_length", "max_lenght")),
    Mistake("model", "is not a directory", TARGET.format(model="nowhere", strategy="eagle3")),
    Mistake("strategy", "did you mean eagle3", TARGET.format(model="models/tiny", strategy="eagle33")),
)
COMMANDS = ("draftworks run", "dagster job execute")


@dataclass(frozen=True)
class Ended:
    """One run: its mistake, whether its last lines give the reason, and how many lines it printed in how many seconds."""

    command: str
    mistake: str
    exit_code: int
    told: bool
    lines: int
    seconds: float
    last: list[str]


def fail(folder: Path, command: str, mistake: Mistake) -> Ended:
    """Run `prepare` in a folder of its own and read its output."""
    for below in ("registry/targets", "registry/datasets", "home"):
        (folder / below).mkdir(parents=True)
    (folder / "registry" / "targets" / "small.yaml").write_text(mistake.target)
    (folder / "registry" / "datasets" / "chats.yaml").write_text("files: [chats.jsonl]\n")
    (folder / "registry" / "chats.jsonl").write_text(mistake.chats)
    (folder / "location.py").write_text(LOCATION)
    shutil.copy(ROOT / ".dagster" / "dagster.yaml", folder / "home")
    location = ["-f", str(folder / "location.py")]
    if command == COMMANDS[0]:
        words = ["draftworks.programs.cli", "run", "prepare", "--target", "small", *location]
    else:
        tags = json.dumps({"dagster/partition": "small"})
        words = ["dagster", "job", "execute", *location, "-j", "prepare", "--tags", tags]
        words += ["-c", str(ROOT / "jobs" / "console.yaml")]
    environment = {**os.environ, "DAGSTER_HOME": str(folder / "home"), "PYTHONWARNINGS": "ignore"}
    started = time.monotonic()
    ran = subprocess.run(
        [sys.executable, "-m", *words], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    lines = ran.stderr.splitlines()
    told = mistake.reason in "\n".join(lines[-LAST_LINES:])
    seconds = round(time.monotonic() - started, 1)
    return Ended(command, mistake.name, ran.returncode, told, len(lines), seconds, lines[-LAST_LINES:])


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Context with processes that only compute, and end with this process however it ends."""
    until_orphaned = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"
    burning = [subprocess.Popen([sys.executable, "-c", until_orphaned]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in burning:
            process.kill()
            process.wait()


def main(
    runs: Annotated[int, typer.Option(help="How many failing runs.")] = 50,
    load: Annotated[int, typer.Option(help="Processes that keep the machine busy beside them.")] = 6,
    at_a_time: Annotated[int, typer.Option(help="Runs that go on together.")] = 2,
    json_file: Annotated[Path | None, typer.Option("--json", help="Where to write every run, as it ends.")] = None,
) -> None:
    """Count failing runs whose last lines give the reason."""
    plan = [(COMMANDS[number % 2], MISTAKES[number // 2 % len(MISTAKES)]) for number in range(runs)]
    with tempfile.TemporaryDirectory() as scratch, busy(load), ThreadPoolExecutor(at_a_time) as pool:
        folders = [Path(scratch) / str(number) for number in range(runs)]
        ended = []
        for one in pool.map(lambda folder, planned: fail(folder, *planned), folders, plan):
            ended.append(one)
            print(
                f"{len(ended)} of {runs}: {one.command}, {one.mistake}, {one.seconds} s, reason last: {one.told}",
                file=sys.stderr,
                flush=True,
            )
            if json_file is not None:
                json_file.write_text(json.dumps([asdict(each) for each in ended], indent=2))
    table = Table("command", "mistake", "runs", "reason last", "exit code 0", "most lines", "slowest s")
    for command in COMMANDS:
        for mistake in MISTAKES:
            group = [one for one in ended if (one.command, one.mistake) == (command, mistake.name)]
            if group:
                told, zero = sum(one.told for one in group), sum(one.exit_code == 0 for one in group)
                figures = (len(group), told, zero, max(one.lines for one in group), max(one.seconds for one in group))
                table.add_row(command, mistake.name, *map(str, figures))
    Console().print(table)
    told = sum(one.told for one in ended)
    print(f"{told} of {len(ended)} failing runs ended with the reason in their last {LAST_LINES} lines")
    for one in ended:
        if not one.told:
            print(f"{one.command}, {one.mistake}: " + " | ".join(one.last))


if __name__ == "__main__":
    typer.run(main)
