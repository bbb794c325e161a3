"""The process that runs a Dagster run, as a tag of the run names it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import psutil

from draftworks.storage.process_place import Place, ProcessPlace, read_start


@dataclass(frozen=True)
class RunProcess:
    """The process that runs a Dagster run.

    Attributes:
        run_id: the run. Dagster copies tags to the run of a retry, so the tag alone does not say it.
        started: start time of the process, to recognise a reused pid.
    """

    run_id: str
    pid: int
    started: float
    place: Place

    @classmethod
    def of(cls, run_id: str, pid: int) -> RunProcess:
        """Return the record of a process on this machine. Raises psutil.Error if there is no such process."""
        try:
            return cls(run_id, pid, read_start(pid), Place.here())
        except ProcessLookupError:
            raise psutil.NoSuchProcess(pid) from None

    @classmethod
    def from_tag(cls, run_id: str, tag: str | None) -> RunProcess | None:
        """Return the process in a run's tag; None if the run has no tag, or only that of the run that it retries."""
        try:
            values = json.loads(tag or "")
            found = cls(**{**values, "place": Place(**values["place"])})
        except (ValueError, TypeError, KeyError):
            return None
        return found if found.run_id == run_id else None

    def to_tag(self) -> str:
        return json.dumps(asdict(self))

    def is_dead(self) -> bool | None:
        """Whether the process is gone; None if this machine or container cannot know."""
        return ProcessPlace(self.pid, self.started, self.place).is_dead()
