"""Calls of Slurm's commands, with their output as values."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from draftworks.errors import ConfigError, LauncherError

COLUMNS = {
    **{"JobID": 24, "State": 20, "exit_code": 12, "Reason": 200, "Name": 60, "Comment": 1000},
    **{"ArrayJobID": 24, "ArrayTaskID": 24, "RestartCnt": 12},
}
"""Columns of squeue that are read, and their widths."""
_UNKNOWN_JOB = "Invalid job id"
_UNREACHABLE = re.compile(
    r"unable to contact slurm|connect failure|connection refused|timed out|communication|munge|authentication", re.I
)
_NOT_NOW = re.compile(r"not available|busy|reserved|down|drain", re.I)
"""Words on nodes and partitions that come back: a real job waits for them."""
_KEPT = {"SLURM_CONF", "SLURM_CLUSTERS"}
_REQUEUE_S = 5
"""Seconds after which a requeued job may start."""
_TIMEOUT_S = 120.0
"""Seconds for one command; a controller under load lets its clients wait and retry."""


@dataclass(frozen=True)
class SlurmRecord:
    """One line of squeue or sacct.

    Attributes:
        id: of the job; an array's elements all have the array's.
        state: in Slurm's long form, such as COMPLETED.
        exit_code: of the batch script; None if Slurm did not say it.
        copy: number of an array's element; None for a job that is no array.
        restarts: how often it was requeued, as Slurm prints it; empty where it does not.
    """

    id: str
    name: str
    state: str
    exit_code: int | None
    reason: str
    comment: str
    copy: int | None = None
    restarts: str = ""


@dataclass(frozen=True)
class SlurmCommands:
    """Slurm's commands in `folder`, or on PATH.

    Raises:
        ConfigError: there are none.
        LauncherError: the controller cannot be reached, or answers with an error (its own words).
    """

    folder: str | None = None

    def submit(self, script: Path, env: Mapping[str, str]) -> str:
        """Submit a batch script with `env` added to its environment; return the job's id.

        Raises:
            ConfigError: Slurm refuses the job.
        """
        try:
            printed = self._run("sbatch", ["--parsable", str(script)], env)
        except LauncherError as error:
            if _UNREACHABLE.search(str(error)):
                raise
            raise ConfigError(f"Slurm refuses the job: {error}. Its script is {script}") from None
        return printed.strip().split(";")[0]

    def test(self, options: Iterable[str]) -> None:
        """Return if a batch script with these `#SBATCH` options would be taken, now or when nodes that are down are
        back.

        Raises:
            ConfigError: Slurm would refuse it.
        """
        script = "\n".join(["#!/bin/sh", *(f"#SBATCH {option}" for option in options), ""])
        try:
            self._run("sbatch", ["--test-only"], text=script)
        except LauncherError as error:
            if _UNREACHABLE.search(str(error)):
                raise
            words = str(error).removeprefix("Slurm: ")
            if not all(map(_NOT_NOW.search, words.split("; "))):
                raise ConfigError(f"Slurm would refuse the job: {words}") from None

    def list_jobs(self, *options: str) -> list[SlurmRecord]:
        """Return the jobs that squeue shows with `options`."""
        columns = ",".join(f"{name}:{width}" for name, width in COLUMNS.items())
        try:
            printed = self._run("squeue", ["--noheader", "--array", f"--Format={columns}", *options])
        except LauncherError as error:
            if _UNKNOWN_JOB in str(error):
                return []
            raise
        return [_parse_line(line) for line in printed.splitlines() if line.strip()]

    def list_accounted(self, *options: str) -> list[SlurmRecord]:
        """Return the jobs that sacct knows; none where Slurm keeps no accounts or has no sacct."""
        fields = "JobID,State,ExitCode,Reason,JobName,Comment"
        try:
            asked = ["--allocations", "--array", "--noheader", "--parsable2", f"--format={fields}", *options]
            printed = self._run("sacct", asked)
        except (LauncherError, ConfigError):
            return []
        return [_parse_account(line) for line in printed.splitlines() if line.count("|") >= 5]

    def cancel(self, *arguments: str) -> None:
        """Call scancel; a job that has ended or is unknown is no error."""
        try:
            self._run("scancel", list(arguments))
        except LauncherError as error:
            if _UNREACHABLE.search(str(error)):
                raise

    def requeue(self, id: str, copy: int) -> None:
        """Put an ended element of an array back into the queue, to start as soon as it can.

        Slurm itself would wait for two minutes. Nodes refuse a start within the second of the earlier one's end.
        """
        self._run("scontrol", ["requeue", f"{id}_{copy}"])
        self._run("scontrol", ["update", f"JobId={id}_{copy}", f"StartTime=now+{_REQUEUE_S}"])

    def _run(self, name: str, arguments: Sequence[str], env: Mapping[str, str] | None = None, text: str = "") -> str:
        """Return the output of a command that reads `text`."""
        program = name if self.folder is None else str(Path(self.folder) / name)
        # In an allocation of another job these would be taken for options of ours.
        foreign = ("SBATCH_", "SLURM_", "SQUEUE_", "SRUN_")
        outside = {key: value for key, value in os.environ.items() if key in _KEPT or not key.startswith(foreign)}
        try:
            done = subprocess.run(
                [program, *arguments],
                env={**outside, **(env or {})},
                input=text,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_TIMEOUT_S,
            )
        except FileNotFoundError:
            raise ConfigError(
                f"launcher of kind slurm: no command {name} {_describe_place(self.folder)}. Run Draftworks where jobs are "
                "submitted, or set launcher.commands to Slurm's folder"
            ) from None
        except subprocess.TimeoutExpired:
            raise LauncherError(f"Slurm: {name} timed out after {_TIMEOUT_S:g} s") from None
        if done.returncode:
            raise LauncherError(f"Slurm: {_join(done.stderr.splitlines()) or f'{name} ended with {done.returncode}'}")
        return done.stdout


def _describe_place(folder: str | None) -> str:
    return "on PATH" if folder is None else f"in {folder}"


def _join(lines: Iterable[str]) -> str:
    """Return the lines of an error as one, each without the command's name."""
    return "; ".join(re.sub(r"^\w+: (error: )?", "", line.strip()) for line in lines if line.strip())


def _parse_line(line: str) -> SlurmRecord:
    fields, start = {}, 0
    for name, width in COLUMNS.items():
        fields[name] = line[start : start + width].strip()
        start += width
    if fields["exit_code"].isdigit():  # as wait(2) has it
        fields["exit_code"] = str(int(fields["exit_code"]) >> 8)
    array, copy, restarts = (fields.pop(name) for name in ("ArrayJobID", "ArrayTaskID", "RestartCnt"))
    record = _make_record(*fields.values())
    return replace(record, id=array, copy=int(copy), restarts=restarts) if copy.isdigit() else record


def _parse_account(line: str) -> SlurmRecord:
    record = _make_record(*line.split("|", 5))
    array, _, copy = record.id.partition("_")
    return replace(record, id=array, copy=int(copy)) if copy.isdigit() else record


def _make_record(id: str, state: str, exit_code: str, reason: str, name: str, comment: str) -> SlurmRecord:
    code = exit_code.split(":")[0]
    # "CANCELLED by 1000", and "COMPLETED+" where a column was too narrow
    return SlurmRecord(
        id=id,
        name=name,
        state=(state.split() or [""])[0].rstrip("+"),
        exit_code=int(code) if code.isdigit() else None,
        reason="" if reason in ("None", "(null)") else reason,
        comment="" if comment == "(null)" else comment,
    )
