"""The interface of a scheduler such as Slurm to launchers, and the schedulers by kind.

No Dagster here, so that an implementation can be tested alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from draftworks.config.launchers import LauncherSpec
from draftworks.errors import LauncherError
from resources.torch_job import JobState, RunDir, TorchJob

NAME_PREFIX = "dw-"
"""Begins the name of every job that Draftworks submits."""


@dataclass(frozen=True)
class JobRequest:
    """A job to create.

    Attributes:
        name: "dw-" and at most 40 hex digits; the same for every attempt of the same job.
        job: what to run; `job.nodes` is the number of nodes to ask for, `job.copies` of how many like jobs.
        env: the whole of what is added to the environment of torchrun. Its values are for this job only, and some are
            secret: they belong into no command line and no world-readable file.
        files: of this attempt, on the shared file system. The output of all ranks is appended to `files.log` (attempts of
            one job share it), `files.ranks` is torchrun's `--log-dir`; those of `files.of_copy(number)` for a copy.
        claim: path that the scheduler keeps with the job (a comment, an annotation) and gives back in `SeenJob`.
        min_nodes: fewest nodes to start with if `job.nodes` are not there, set after a node was lost; None: `job.nodes`, no
            fewer.
    """

    name: str
    job: TorchJob
    env: Mapping[str, str]
    files: RunDir
    claim: Path
    min_nodes: int | None = None


@dataclass(frozen=True)
class DeadCopy:
    """A copy that ended otherwise than by success, while others may go on.

    Attributes:
        life: what tells this death from a later one of the same copy, such as how often it was started before.
        lost: see `SeenJob`.
    """

    number: int
    life: str
    lost: bool = False


@dataclass(frozen=True)
class SeenJob:
    """The state of a job by its scheduler. One of several copies has ended when all of them have.

    Attributes:
        reason: the scheduler's own words: why it waits in the queue, was refused, cannot pull its image, was pre-empted,
            lost its node; empty if there is nothing to say.
        lost: the scheduler ended it and not the program, such as by pre-emption, at the time limit, or with a node. It may
            be submitted again. Where it cannot be told, False.
        claim: the path of the request; None if the scheduler has lost it.
        dead: the copies that have died, of a job with several.
    """

    id: str
    name: str
    state: JobState
    reason: str = ""
    lost: bool = False
    claim: Path | None = None
    dead: tuple[DeadCopy, ...] = ()


class Scheduler(ABC):
    """A scheduler, or one queue of it. A method that cannot reach it raises LauncherError with its own words."""

    engine: str
    """Name for the metadata of a run: slurm, kubernetes, ray."""

    has_arrays: bool = False
    """Whether a request may ask for several copies of its job, which become one job of the scheduler."""

    @abstractmethod
    def create(self, request: JobRequest) -> str:
        """Submit a job and return its id.

        An earlier job of the same name has ended when this is called; a scheduler with unique names removes it first.

        Raises:
            ConfigError: the scheduler refuses the request and a user can change that (its own words).
            LauncherError: the scheduler cannot be reached, or refuses for another reason.
        """

    def check(self, request: JobRequest) -> None:
        """Raise the error that `create` would raise for such a job, as far as it is known without creating one.

        A kind that can only tell whether it is reached leaves this as it is.
        """
        self.list()

    @abstractmethod
    def find(self, name: str) -> SeenJob | None:
        """Return the job of this name that has not ended; else the newest ended one that is known; else None."""

    @abstractmethod
    def look(self, id: str) -> SeenJob | None:
        """Return a job as it is now; None if the scheduler does not know it any more."""

    @abstractmethod
    def end(self, id: str, grace_s: float) -> None:
        """End a job: terminate, after `grace_s` seconds kill. Returns when all of its processes have ended.

        Does nothing for a job that has ended or is unknown.
        """

    def restart(self, id: str, copy: int) -> None:
        """Start a dead copy of a job again, under the same id. A scheduler that does so by itself does nothing.

        Raises:
            LauncherError: the scheduler refuses that, or cannot be reached.
        """
        raise LauncherError(f"{self.engine} has no arrays, and so no copy of job {id} to start again")

    @abstractmethod
    def list(self) -> list[SeenJob]:
        """Return all jobs of Draftworks that have not ended, whoever submitted them, as far as this user may see them."""


SCHEDULERS: dict[str, str] = {
    "kubernetes": "resources.kubernetes_scheduler",
    "ray": "resources.ray_scheduler",
    "slurm": "resources.slurm_scheduler",
}
"""By kind of launcher, the module whose `make_scheduler(spec)` makes its scheduler."""


def make_scheduler(spec: LauncherSpec) -> Scheduler:
    """Return the scheduler of a launcher whose jobs live in one.

    Raises:
        ConfigError: its client or extra is not installed.
    """
    return import_module(SCHEDULERS[spec.kind]).make_scheduler(spec)
