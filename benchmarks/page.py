"""Run benchmarks one after another, keep what each printed, and write docs/benchmarks.md from it.

    python benchmarks/page.py                         # all of them; takes hours, and wants a machine with nothing else to do
    python benchmarks/page.py --only feature_io --only hf_rates
    python benchmarks/page.py --render                # the page again, from what is kept

`benchmarks/results/NAME.json` is one run of one benchmark: what it printed, its command, machine, date and load. The page is
`benchmarks/page.md` with each line `<!-- result NAME -->` replaced by that. A section whose results are not there is left
out, and the page ends with the aims that were missed and the benchmarks that were not run.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from figures import MISSED

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TEMPLATE = ROOT / "benchmarks" / "page.md"
PAGE = ROOT / "docs" / "benchmarks.md"
MOONCAKE_LIBRARIES = ".venv-mooncake/libraries/usr/lib/x86_64-linux-gnu:.venv-mooncake/libraries/lib/x86_64-linux-gnu"
COMMANDS = {
    "demo": "python benchmarks/demo.py --against f5da8b1",
    "step_time": "python benchmarks/step_time.py --no-compile",
    "teacher_labels": "python benchmarks/teacher_labels.py",
    "compiled_steps": "python benchmarks/step_time.py 512x4 --steps 3",
    "rivals": "python benchmarks/rivals.py",
    "two_ranks": "python benchmarks/two_ranks.py",
    "hf_rates": "python benchmarks/hf_rates.py",
    "answers": "python benchmarks/answers.py smollm2 --turns 1",
    "objective_memory": "python benchmarks/objective_memory.py --samples 4 --samples 16",
    "files_per_step": "python benchmarks/files_per_step.py",
    "packing": "python benchmarks/packing.py {eagle3_draft}",
    "checkpoint": "python benchmarks/checkpoint.py --repeats 9",
    "kill_training": "python benchmarks/kill_training.py --kills 50 --seed 7",
    "control_plane": "python benchmarks/control_plane.py",
    "evaluation": "python benchmarks/evaluation.py",
    "report_again": "python benchmarks/report_again.py {eagle3_report}",
    "sglang_hook": "python benchmarks/sglang_hook.py --hidden 832 --layers 12 --length 128 --batch 4 --repeats 7",
    "vllm_capture": "python benchmarks/vllm_capture.py --turns 9",
    "capture_client": "python benchmarks/capture_client.py",
    "overlap": "python benchmarks/overlap.py",
    "stream_overlap": "python benchmarks/stream_overlap.py {eagle3_draft} {training_features}",
    "streaming": "python benchmarks/streaming.py {eagle3_draft}",
    "feature_io": "python benchmarks/feature_io.py",
    "object_storage": "python benchmarks/object_storage.py --server --rounds 9 --trainings 3 --steps 8",
    "fp8_features": "python benchmarks/fp8_features.py --rounds 5 --samples 4",
    "mooncake_store": f"env LD_LIBRARY_PATH={MOONCAKE_LIBRARIES} .venv-mooncake/bin/python benchmarks/mooncake_store.py",
    "record_proxy": "python benchmarks/record_proxy.py",
    "slurm_start": "python benchmarks/slurm_start.py",
    "decisions": "python benchmarks/decisions.py --repeats 5",
    "code_location": "python benchmarks/code_location.py",
    "prune": "python benchmarks/prune.py",
    "plan": "python benchmarks/plan.py",
    "promotion_errors": "python benchmarks/promotion_errors.py",
    "fleet_year": "python benchmarks/fleet_year.py --seeds 2",
}
"""By name, in the order of the page; run in the root of the checkout. {STEP} is the newest run file of that step there."""

_MARK = re.compile(r"^<!-- result (\w+) -->$", re.MULTILINE)


@dataclass(frozen=True)
class Machine:
    """Where a benchmark ran. `instructions` is the instruction set that torch uses."""

    cpu: str
    instructions: str
    cores: int
    torch: str

    def __str__(self) -> str:
        cores = f"{self.cores} core{'s' * (self.cores != 1)}"
        return f"{self.cpu} ({self.instructions}, {cores}), torch {self.torch}"


@dataclass(frozen=True)
class Result:
    """One run of one benchmark.

    Attributes:
        command: as a user types it.
        date: ISO 8601, of its end.
        load: load averages of the last minute, before and after.
        output: what it printed; Markdown if it has a table.
    """

    command: str
    date: str
    machine: Machine
    load: tuple[float, float]
    seconds: float
    output: str

    @classmethod
    def read(cls, path: Path) -> Result:
        fields = json.loads(path.read_text())
        return cls(**fields | {"machine": Machine(**fields["machine"]), "load": tuple(fields["load"])})

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    def render(self) -> str:
        """Return the command, what it printed, and where and when, in Markdown."""
        output = self.output.strip("\n")
        if not any(line.startswith("|") for line in output.splitlines()):
            output = f"```text\n{output}\n```"
        date = datetime.fromisoformat(self.date)
        low, high = sorted(self.load)
        load = f"load {low:g} to {high:g}" if low < high else f"load {low:g}"
        where = f"{date.day} {date:%B %Y}; {self.machine}; {load}."
        return f"```bash\n{self.command}\n```\n\n{output}\n\n*{where}*"


def main(
    only: Annotated[list[str] | None, typer.Option(help="Run this benchmark and no other; may be repeated.")] = None,
    render: Annotated[bool, typer.Option("--render", help="Run nothing.")] = False,
) -> None:
    """Run benchmarks and write docs/benchmarks.md. One that fails keeps its earlier result; the others go on."""
    unknown = set(only or ()) - set(COMMANDS)
    if unknown:
        raise typer.BadParameter(f"unknown: {', '.join(sorted(unknown))}. Known: {', '.join(COMMANDS)}")
    failed = []
    for name in () if render else only or COMMANDS:
        print(f"{name}: {COMMANDS[name]}", flush=True)
        try:
            result = run_benchmark(COMMANDS[name])
        except (subprocess.CalledProcessError, OSError) as error:
            failed.append(f"{name}: {error}")
            continue
        RESULTS.mkdir(exist_ok=True)
        result.write(RESULTS / f"{name}.json")
        write_page()
    write_page()
    if failed:
        raise SystemExit("failed:\n" + "\n".join(failed))


def write_page() -> None:
    PAGE.write_text(render_page(TEMPLATE.read_text(), read_results(RESULTS)))


def run_benchmark(command: str) -> Result:
    """Run a command of `COMMANDS` on one thread.

    Raises:
        CalledProcessError: it failed.
        FileNotFoundError: its program, or a run file that it takes, is not there.
    """
    words = [find_run_file(word[1:-1]) if word.startswith("{") else word for word in shlex.split(command)]
    machine, before, began = describe_machine(), os.getloadavg()[0], time.monotonic()
    done = subprocess.run(
        [sys.executable if word == "python" else word for word in words],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "118", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    lines = [line.rstrip() for line in done.stdout.splitlines() if not line.startswith("{")]  # those are for programs
    return Result(
        command=re.sub(r"\{(\w+)\}", r"var/runs/RUN/\1/run.yaml", command),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=machine,
        load=(round(before, 1), round(os.getloadavg()[0], 1)),
        seconds=round(time.monotonic() - began),
        output="\n".join(lines),
    )


def find_run_file(step: str) -> str:
    """Return the newest run file of a step of the demo."""
    found = sorted(ROOT.glob(f"var/runs/*/{step}/run.yaml"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise FileNotFoundError(f"var/runs has no run of {step}: run `make demo` first")
    return str(found[-1])


def describe_machine() -> Machine:
    """Describe this machine."""
    import torch

    cpuinfo = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.*)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else []
    return Machine(
        cpu=names[0] if names else platform.processor() or platform.machine(),
        instructions=torch.backends.cpu.get_cpu_capability(),
        cores=os.cpu_count() or 1,
        torch=torch.__version__,
    )


def read_results(folder: Path) -> dict[str, Result]:
    """Read the results that are kept, by name, in the order of the page."""
    paths = {name: folder / f"{name}.json" for name in COMMANDS}
    return {name: Result.read(path) for name, path in paths.items() if path.exists()}


def render_page(template: str, results: Mapping[str, Result]) -> str:
    """Return the page: sections with all of their results, the aims that were missed, and what was not run."""
    sections = re.split(r"^(?=##+ )", template, flags=re.MULTILINE)
    kept = [each for each in sections if all(name in results for name in _MARK.findall(each))]
    text = "".join(kept).rstrip() + "\n"
    text = _MARK.sub(lambda mark: results[mark[1]].render(), text)
    missed = [
        f"{line.removeprefix('* ').removeprefix(MISSED)} (`{name}`)"
        for name, result in results.items()
        for line in result.output.splitlines()
        if line.removeprefix("* ").startswith(MISSED)
    ]
    not_run = [f"`{command}`" for name, command in COMMANDS.items() if name not in results]
    for title, lines in (("Aims that were not reached", missed), ("Without figures", not_run)):
        if lines:
            listed = (textwrap.fill(f"* {line}", 120, subsequent_indent="  ") for line in lines)
            text += f"\n## {title}\n\n" + "\n".join(listed) + "\n"
    return text


if __name__ == "__main__":
    typer.run(main)
