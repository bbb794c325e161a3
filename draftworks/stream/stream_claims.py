"""What the trainings that follow one stream still need of its features: how far producers go, and what may be freed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np

from draftworks.capture.plan import SampleJob
from draftworks.stream.metadata_store import ConsumerProgress
from draftworks.stream.streaming_plan import StreamingPlan

FreeAt = Literal["step", "checkpoint"]
Progress = Mapping[str, ConsumerProgress]
"""Progress of consumers by name; one that has done nothing yet may be absent."""
_NOT_BEGUN = ConsumerProgress()


class StreamClaims:
    """The claims of all followers of a stream. A follower that has left has none; one that has not begun has all.

    Args:
        plan: what producers capture for all followers together.
        alone: the follower's name where the plan is that of one training.
        free_at: as in `StreamConsumer`: with `checkpoint`, steps after the last checkpoint may be trained again.
    """

    def __init__(self, plan: StreamingPlan, alone: str, free_at: FreeAt = "step") -> None:
        self._plan = plan
        self._plans: Mapping[str, StreamingPlan] = plan.followers or {alone: plan}
        self._free_at = free_at

    @property
    def is_shared(self) -> bool:
        return len(self._plans) > 1

    def find_done_step(self, progress: Progress) -> int | None:
        """Return the step that every follower has done; None if no follower trains any more."""
        done = {name: each.done_step for name, each in self._iterate_present(progress)}
        return min((step for name, step in done.items() if step < self._plans[name].order.total_steps), default=None)

    def find_slowest(self, progress: Progress) -> str:
        """Return the name of the follower that has done the fewest steps of those that take part."""
        return min(self._iterate_present(progress), key=lambda item: item[1].done_step)[0]

    def list_left(self, progress: Progress) -> frozenset[str]:
        """Return the followers that need nothing any more."""
        return frozenset(name for name in self._plans if progress.get(name, _NOT_BEGUN).left)

    def list_free(self, name: str, contents: np.ndarray, progress: Progress, window_end: int) -> list[str]:
        """Return the feature keys that `name` reads of some contents and no follower needs any more.

        Args:
            contents: indices of contents of the plan, (N,).
            window_end: the last step that producers may have captured for.
        """
        plan = self._plans[name]
        needed = self._find_needed(contents, progress, window_end)
        kept = {stream: needed.get(stream, np.zeros(len(contents), np.bool_)) for stream in plan.streams}
        return [
            plan.get_key(content, stream)
            for index, content in enumerate(contents)
            for stream in plan.streams
            if not kept[stream][index]
        ]

    def list_all_free(self, progress: Progress) -> list[str]:
        """Return the keys of everything that may have been captured and that no follower needs any more."""
        ahead = max((each.done_step for _, each in self._iterate_present(progress)), default=None)
        end = self._plan.order.total_steps if ahead is None else self._plan.find_window_end(ahead)
        keys: dict[str, None] = {}
        for name, plan in self._plans.items():
            keys.update(dict.fromkeys(self.list_free(name, plan.list_contents(end), progress, end)))
        return list(keys)

    def drop_unneeded(self, jobs: Sequence[SampleJob], progress: Progress, window_end: int) -> list[tuple[str, ...]]:
        """Return for each job the missing streams that a follower still needs."""
        contents = self._plan.get_contents([job.row for job in jobs])
        needed = self._find_needed(contents, progress, window_end)
        return [
            tuple(stream for stream in job.missing if stream in needed and needed[stream][index])
            for index, job in enumerate(jobs)
        ]

    def _find_needed(self, contents: np.ndarray, progress: Progress, window_end: int) -> dict[str, np.ndarray]:
        """Return for each stream whether a follower needs it of each content, (N,)."""
        needed: dict[str, np.ndarray] = {}
        for name, each in self._iterate_present(progress):
            step = each.done_step if self._free_at == "step" else each.checkpoint_step
            wanted = self._plans[name].find_claimed(contents, step, window_end)
            for stream in self._plans[name].streams:
                needed[stream] = needed[stream] | wanted if stream in needed else wanted
        return needed

    def _iterate_present(self, progress: Progress) -> Iterator[tuple[str, ConsumerProgress]]:
        for name in self._plans:
            each = progress.get(name, _NOT_BEGUN)
            if not each.left:
                yield name, each
