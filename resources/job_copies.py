"""Dead copies of a job: killed copies are started again."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from resources.job_failure import has_failure_message, is_interrupted, is_user_error
from resources.scheduler import DeadCopy, SeenJob
from resources.torch_job import RunDir

MAX_KILLS = 10
"""Deaths of one copy without a message after which the job has failed. The others do its work meanwhile."""


class CopyVerdict(NamedTuple):
    """The actions for a job's copies.

    Attributes:
        restart: numbers of those to start again.
        failure: why the whole job has failed; empty if it has not.
        is_open: whether a copy has died of which it is not known yet why.
    """

    restart: tuple[int, ...] = ()
    failure: str = ""
    is_open: bool = False


@dataclass
class CopyWatch:
    """Judges each death of a copy once, by what its ranks left, and only then by what the scheduler says.

    An error of the program fails the job. A copy that was interrupted in order, that the scheduler ended, or that was killed
    is started again.

    Attributes:
        files_lag_s: seconds in which the shared file system shows what an ended copy has written.
    """

    files_lag_s: float
    clock: Callable[[], float] = time.monotonic
    _since: dict[DeadCopy, float] = field(default_factory=dict)
    _judged: set[DeadCopy] = field(default_factory=set)
    _kills: Counter[int] = field(default_factory=Counter)

    def judge(self, seen: SeenJob, files: RunDir) -> CopyVerdict:
        restart: list[int] = []
        is_open = False
        for each in seen.dead:
            if each in self._judged:
                continue
            own = files.of_copy(each.number)
            spoke = has_failure_message(own)
            was_stopped = each.lost or is_interrupted(own)
            if not spoke and not was_stopped and self._is_early(each):
                is_open = True
                continue
            # Ranks whose peers were lost with a node leave errors of their connections.
            if spoke and (not was_stopped or is_user_error(own)):
                return CopyVerdict(failure=f"copy {each.number} failed, its log is {own.log}")
            self._judged.add(each)
            self._kills[each.number] += not was_stopped
            if self._kills[each.number] > MAX_KILLS:
                return CopyVerdict(failure=f"copy {each.number} was killed {MAX_KILLS} times, its log is {own.log}")
            restart.append(each.number)
        return CopyVerdict(tuple(restart), is_open=is_open)

    def _is_early(self, dead: DeadCopy) -> bool:
        """Whether files of a copy may not be visible yet."""
        now = self.clock()
        return now - self._since.setdefault(dead, now) < self.files_lag_s
