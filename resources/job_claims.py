"""Claim files: which run waits for a job of a scheduler, and where the job's files are.

A claim lies beside what the job makes. It is there before the job is submitted and is completed after, so that whoever
finds it knows of the job in whatever moment its owner died.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from draftworks.config.launchers import LauncherSpec, parse_launcher
from draftworks.errors import DraftworksError
from draftworks.storage.files import publish_json, read_json
from resources.process_tree import RunProcess
from resources.scheduler import Scheduler, SeenJob, make_scheduler
from resources.torch_job import RunDir

CLAIM = "job.json"
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class JobClaim:
    """One job and its owner.

    Attributes:
        job_id: the scheduler's id; None while the job is being submitted.
        made: see `JobIdentity`.
        owner: the process that waits for the job.
        launcher: the settings by which the job's scheduler is found.
        written: time of this state, in seconds since the epoch.
    """

    name: str
    made: str
    files: RunDir
    owner: RunProcess
    launcher: Mapping[str, Any]
    written: float
    job_id: str | None = None

    @classmethod
    def begin(cls, name: str, made: str, files: RunDir, owner: RunProcess, launcher: LauncherSpec) -> JobClaim:
        """Return the claim of a job that is about to be submitted."""
        settings = launcher.model_dump(mode="json", exclude_unset=True, exclude={"programs"})
        return cls(name, made, files, owner, {**settings, "kind": launcher.kind}, time.time())

    @classmethod
    def read(cls, path: Path) -> JobClaim | None:
        """Return the claim in a file; None if there is no file, or no claim in it."""
        try:
            values = read_json(path)
            if values.pop("schema") != SCHEMA_VERSION or not values.pop("state"):
                return None
            files = RunDir(Path(values.pop("files")), values.pop("submission"))
            owner = RunProcess.from_tag(values["owner"]["run_id"], json.dumps(values.pop("owner")))
            return None if owner is None else cls(files=files, owner=owner, **values)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def to_json(self) -> dict[str, Any]:
        values = {**asdict(self), "launcher": dict(self.launcher)}
        values["files"], values["submission"] = str(self.files.path), self.files.submission
        state = "submitting" if self.job_id is None else "submitted"
        return {"schema": SCHEMA_VERSION, "state": state, **values}

    def of_job(self, job_id: str) -> JobClaim:
        """Return the claim of the job that was submitted."""
        return replace(self, job_id=job_id, written=time.time())

    def of_owner(self, owner: RunProcess) -> JobClaim:
        return replace(self, owner=owner, written=time.time())

    def publish(self, path: Path) -> None:
        """Replace the claim in its file."""
        publish_json(path, self.to_json())

    def take(self, path: Path) -> bool:
        """Write the claim file if there is none; return whether it is ours, of any number of processes that try."""
        path.parent.mkdir(parents=True, exist_ok=True)
        staging = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
        publish_json(staging, self.to_json())
        try:
            os.link(staging, path)  # also on NFS, where one of several links to one name succeeds
            return True
        except FileExistsError:
            return False
        finally:
            staging.unlink()

    def drop(self, path: Path) -> bool:
        """Remove the claim file if it still has this claim; return whether this call did it."""
        if JobClaim.read(path) != self:
            return False
        aside = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
        try:
            os.rename(path, aside)  # of several processes one succeeds
        except FileNotFoundError:
            return False
        aside.unlink()
        return True

    def open_scheduler(self) -> Scheduler:
        """Return the scheduler that has the job. Raises ConfigError if this deployment cannot reach it any more."""
        return make_scheduler(parse_launcher(self.launcher, f"claim of job {self.name}"))

    def look(self, scheduler: Scheduler) -> SeenJob | None:
        """Return the job as its scheduler sees it; None if it does not know it.

        A claim whose owner died between submitting the job and writing its id is completed by the job's name.
        """
        return scheduler.find(self.name) if self.job_id is None else scheduler.look(self.job_id)


def remove_damaged_claim(path: Path) -> None:
    """Remove a file that is in the place of a claim and has none, such as an empty one after a crash of the machine."""
    if not path.exists() or JobClaim.read(path) is not None:
        return
    aside = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
    with suppress(FileNotFoundError, FileExistsError):
        os.rename(path, aside)
        if JobClaim.read(aside) is not None:  # another process has put its claim there meanwhile
            os.link(aside, path)
    aside.unlink(missing_ok=True)


def is_taken_over(claim: JobClaim, partition: str, assets: Collection[str]) -> bool:
    """Whether a run that makes these assets comes to wait for a claimed job itself."""
    found, _, asset = claim.made.partition("/")
    return found == partition and asset.partition("/")[0] in assets


def is_claim_alive(path: Path, run_id: str) -> bool:
    """Whether a job lives that a run has claimed in a file. A scheduler that cannot be asked counts as yes."""
    claim = JobClaim.read(path)
    if claim is None or claim.owner.run_id != run_id:
        return False
    try:
        seen = claim.look(claim.open_scheduler())
    except DraftworksError:
        return True
    return seen is not None and not seen.state.is_final


def end_claimed_job(path: Path, grace_s: float) -> str | None:
    """End the job that is claimed in a file, if it lives, and remove the claim. Return the id of a job that was ended.

    Raises:
        DraftworksError: its scheduler cannot be asked.
    """
    claim = JobClaim.read(path)
    if claim is None:
        return None
    scheduler = claim.open_scheduler()
    seen = claim.look(scheduler)
    alive = seen is not None and not seen.state.is_final
    if seen is not None and alive:
        scheduler.end(seen.id, grace_s)
    claim.drop(path)
    return seen.id if seen is not None and alive else None


def end_abandoned_job(path: Path) -> str | None:
    """As `end_claimed_job`, but leave a job whose owner may be alive."""
    claim = JobClaim.read(path)
    if claim is None or not claim.owner.is_dead():
        return None
    return end_claimed_job(path, parse_launcher(claim.launcher, f"claim of job {claim.name}").grace_s)
