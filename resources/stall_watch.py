"""Detects jobs without progress, from the heartbeats of their ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from draftworks.programs.heartbeat import FILE, HeartbeatRecord

_LONGEST_GAP_S = 10.0
"""Longest time between two polls that counts: if this process was suspended, the job may have been as well."""
_START_S = 600.0
"""Least time before a rank's first pulse, while Python imports libraries."""


@dataclass
class _Rank:
    """A rank's last heartbeat, and the watch's times of its last write and of its last progress."""

    pulse: HeartbeatRecord
    wrote_s: float
    progressed_s: float


@dataclass
class StallWatch:
    """Detects a job without progress from its ranks' heartbeats; time between two far apart polls counts only in part.

    Args:
        folder: torchrun's log folder, where heartbeats are beside error files.
        log: the job's output file; its growth counts as progress.
        limit_s: longest time in seconds without progress.
    """

    folder: Path
    log: Path
    limit_s: float
    clock: Callable[[], float] = time.monotonic
    _ranks: dict[Path, _Rank] = field(default_factory=dict)
    _elapsed_s: float = 0.0
    _looked_at: float | None = None
    _log_bytes: int = 0
    _logged_s: float = 0.0

    def find_stalled(self) -> list[HeartbeatRecord] | None:
        """Return the ranks of a job without progress, the most suspicious first; None for a healthy job.

        Call it more often than every `_LONGEST_GAP_S` seconds: longer gaps are not counted in full.
        """
        now = self.clock()
        self._elapsed_s += min(now - (now if self._looked_at is None else self._looked_at), _LONGEST_GAP_S)
        self._looked_at = now
        self._read()
        running = [rank for rank in self._ranks.values() if not rank.pulse.ended]
        silent = [rank for rank in running if self._elapsed_s - rank.wrote_s > self.limit_s]
        last = max([self._logged_s, *(rank.progressed_s for rank in self._ranks.values())])
        limit_s = self.limit_s if self._ranks else max(self.limit_s, _START_S)
        if not silent and self._elapsed_s - last <= limit_s:
            return None
        order = sorted(self._ranks.values(), key=lambda rank: (rank not in silent, rank.wrote_s, rank.progressed_s))
        return [rank.pulse for rank in order]

    def _read(self) -> None:
        size = self.log.stat().st_size if self.log.exists() else 0
        if size != self._log_bytes:
            self._log_bytes, self._logged_s = size, self._elapsed_s
        paths = list(self.folder.rglob(FILE))
        for gone in set(self._ranks).difference(paths):
            del self._ranks[gone]  # put away, as when a scheduler starts the same job again after it suspended it
        for path in paths:
            pulse = HeartbeatRecord.read(path)
            known = self._ranks.get(path)
            if pulse is None:
                continue
            if known is None:
                self._ranks[path] = _Rank(pulse, self._elapsed_s, self._elapsed_s)
                continue
            if pulse.written != known.pulse.written:
                known.wrote_s = self._elapsed_s
            if pulse.beats != known.pulse.beats:
                known.progressed_s = self._elapsed_s
            known.pulse = pulse
