"""The plan of a streamed training: which samples each step takes, what producers capture, how far ahead, when it is freed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np

from draftworks.capture.capture_plan import SampleJob, make_batches
from draftworks.features.contracts import SampleRef
from draftworks.features.schedule import PaddedTrainSchedule
from draftworks.stream.metadata_store import InFlight, PromptTask, Watermark

Keep = Literal["until_last_use", "capture_again"]


@dataclass(frozen=True)
class StreamOrder:
    """The samples of every optimizer step, the same as those of `TrainSchedule` on any number of ranks.

    Steps are numbered from 1, as `global_step` is after the step.

    Attributes:
        samples, left_out: of `TrainSchedule`.

    Raises:
        ConfigError: the global batch is larger than the set.
    """

    samples: int
    global_batch_size: int
    seed: int
    total_steps: int
    left_out: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self._samples_of_steps(0)

    @property
    def steps_per_epoch(self) -> int:
        return self.samples // self.global_batch_size

    @property
    def epochs(self) -> int:
        """Epochs that are begun."""
        return -(-self.total_steps // self.steps_per_epoch)

    def get_epoch(self, step: int) -> int:
        """Return the epoch of a step, counted from 0."""
        return (step - 1) // self.steps_per_epoch

    def get_samples(self, step: int) -> np.ndarray:
        """Return the indices of the samples of a step, (global_batch_size,)."""
        return self._samples_of_steps(self.get_epoch(step))[(step - 1) % self.steps_per_epoch]

    def find_steps(self, epoch: int) -> np.ndarray:
        """Return the step in which an epoch takes each sample, (samples,); 0 where it leaves the sample out."""
        first = epoch * self.steps_per_epoch + 1
        taken = self._samples_of_steps(epoch)[: self.total_steps - first + 1]
        steps = np.zeros(self.samples, np.int64)
        steps[taken.ravel()] = np.repeat(np.arange(first, first + len(taken)), self.global_batch_size)
        return steps

    def count_common_steps(self, other: StreamOrder) -> int:
        """Return after how many steps this order and another one of the same population part.

        0 if their trainings have not equally many steps, in an epoch or in all: the learning rates would differ.
        """
        if (self.total_steps, self.steps_per_epoch) != (other.total_steps, other.steps_per_epoch):
            return 0
        for epoch in range(self.epochs):
            same = (self._population_of_steps(epoch) == other._population_of_steps(epoch)).all(axis=1)
            if not same.all():
                return min(self.total_steps, epoch * self.steps_per_epoch + int(np.argmin(same)))
        return self.total_steps

    def _population_of_steps(self, epoch: int) -> np.ndarray:
        """Return the samples of every step as indices in the population, (steps, global_batch_size)."""
        kept = np.delete(np.arange(self.samples + len(self.left_out)), self.left_out)
        return kept[self._samples_of_steps(epoch)]

    def _samples_of_steps(self, epoch: int) -> np.ndarray:
        return _get_samples_of_steps(self.samples, self.left_out, self.global_batch_size, self.seed, epoch)


@lru_cache(maxsize=4)
def _get_samples_of_steps(
    samples: int, left_out: tuple[int, ...], global_batch_size: int, seed: int, epoch: int
) -> np.ndarray:
    schedule = PaddedTrainSchedule(
        samples=samples, left_out=left_out, global_batch_size=global_batch_size, micro_batch_size=1, seed=seed
    )
    return schedule.samples_of_steps(epoch)


@dataclass(frozen=True)
class Lifetime:
    """Steps between which the features of each distinct content are held in the store.

    Attributes:
        first: the first step that takes each content, (contents,); 0 where no step does.
        last: the last such step, after which its features are freed.
    """

    first: np.ndarray
    last: np.ndarray


def find_lifetimes(order: StreamOrder, contents: Sequence[int] | np.ndarray, keep: Keep) -> tuple[Lifetime, ...]:
    """Return when features are captured and freed: one lifetime over all epochs, or with `capture_again` one an epoch.

    Args:
        contents: for each sample the index of its content; samples with the same tokens have the same.
    """
    of = np.asarray(contents)
    epochs = [_find_lifetime(order.find_steps(epoch), of) for epoch in range(order.epochs)]
    if keep == "capture_again" or not epochs:
        return tuple(epochs)
    unused = order.total_steps + 1
    first = np.min([np.where(each.first > 0, each.first, unused) for each in epochs], axis=0)
    return (Lifetime(np.where(first == unused, 0, first), np.max([each.last for each in epochs], axis=0)),)


def _find_lifetime(steps: np.ndarray, contents: np.ndarray) -> Lifetime:
    used = steps > 0
    count = int(contents.max(initial=-1)) + 1
    first, last = np.full(count, np.iinfo(np.int64).max), np.zeros(count, np.int64)
    np.minimum.at(first, contents[used], steps[used])
    np.maximum.at(last, contents[used], steps[used])
    return Lifetime(np.where(last == 0, 0, first), last)


@dataclass(frozen=True)
class StepGroup:
    """Consecutive optimizer steps, `first` to `last`, whose new features are captured in batches cut by length."""

    first: int
    last: int


class StreamingPlan:
    """A planned feature set with the order in which a training takes its samples. Every process makes the same plan.

    Samples with the same tokens share their features: the plan counts, captures and frees them as one *content*.

    Args:
        refs: all samples of the set, in its order; none of their features has to exist yet.
        watermark: how much may be captured and not yet used by an optimizer step.
        keep: `until_last_use` frees features after their last use in the training, `capture_again` after their last use
            in an epoch.
        followers: plans of the trainings that follow the stream, by name; this plan is then what producers capture for
            all of them. Without, the plan is that of one training.

    Raises:
        ConfigError: the watermark is below one global batch, or the global batch is larger than the set.
    """

    def __init__(
        self,
        refs: Sequence[SampleRef],
        order: StreamOrder,
        watermark: Watermark,
        keep: Keep = "until_last_use",
        followers: Mapping[str, StreamingPlan] | None = None,
    ) -> None:
        self.followers = dict(followers or {})
        self.refs = refs
        self.order = order
        self.watermark = watermark
        self.keep = keep
        self._content_of, self._samples_of = _group_by_content(refs)
        self._bytes = np.array([refs[samples[0]].estimated_bytes for samples in self._samples_of], np.int64)
        self._lifetimes = find_lifetimes(order, self._content_of, keep)
        self._new_samples, self._new_bytes = self._count_new()
        watermark.require_batch(InFlight(int(self._new_samples.max()), int(self._new_bytes.max()), 1))

    @cached_property
    def groups(self) -> tuple[StepGroup, ...]:
        """All steps in groups of at most half the watermark: one is filled while the trainer uses the one before.

        Batches are cut by length across a group, so that its first step waits for nearly all of it: where producers
        are as fast as the trainer, a training waits for as long as its largest group takes, whatever the watermark is.
        So a group spans no more than an eighth of the steps before it.
        """
        limits = self.watermark
        half = Watermark(*(None if limit is None else max(1, limit // 2) for limit in _list_limits(limits)))
        groups, first = [], 1
        while first <= self.order.total_steps:
            last = max(first, min(self._find_end(first - 1, half), first - 1 + (first - 1) // 8))
            groups.append(StepGroup(first, last))
            first = last + 1
        return tuple(groups)

    @property
    def peak_bytes(self) -> int:
        """Bytes that the store holds at most: what is kept for later steps, and what producers are ahead with."""
        size = self.order.total_steps + 2
        change = np.zeros(size, np.int64)
        for lifetime in self._lifetimes:
            used = lifetime.first > 0
            captured_at = self._find_earliest_capture(lifetime.first[used])
            np.add.at(change, captured_at, self._bytes[used])
            np.add.at(change, lifetime.last[used], -self._bytes[used])
        return int(change.cumsum().max())

    @property
    def captured_tokens(self) -> int:
        """Tokens that producers run through the target, each capture of `capture_again` counted."""
        return self.count_new_tokens(self.order.total_steps)

    def find_window_end(self, acked_step: int) -> int:
        """Return the last step whose features may be captured when `acked_step` steps are done; at least the next."""
        return self._find_end(acked_step, self.watermark)

    def make_tasks(self, group: StepGroup, run_id: str, batch_tokens: int, done: int = 0) -> list[PromptTask]:
        """Return the capture tasks of a group, those that are used first at the front.

        Left out are tasks of which nothing is used after `done` steps.

        A task is one batch for the engine: samples of similar length, at most `batch_tokens` with padding. Its ids and
        its batches depend on the plan only, so whoever captures it again gets the batch of the first time.
        """
        tasks = []
        for number, lifetime in enumerate(self._lifetimes):
            new = np.flatnonzero((group.first <= lifetime.first) & (lifetime.first <= group.last))
            jobs = [self._make_job(int(content)) for content in new]
            batches = list(make_batches(jobs, batch_tokens))
            batches.sort(key=lambda batch: min(lifetime.first[self._content_of[job.row]] for job in batch))
            tasks += [
                self._make_task(batch, f"{number}-{group.first}-{index}", run_id, group.last)
                for index, batch in enumerate(batches)
                if any(lifetime.last[self._content_of[job.row]] > done for job in batch)
            ]
        return tasks

    def list_jobs(self, task: PromptTask) -> list[SampleJob]:
        """Return the jobs of a task in the order of its batch, one for each content, with all streams missing."""
        rows = dict.fromkeys(self._samples_of[self._content_of[self._rows[each]]][0] for each in task.sample_ids)
        return [self._make_job(int(self._content_of[row])) for row in rows]

    def get_refs(self, sample_ids: Sequence[str]) -> list[SampleRef]:
        return [self.refs[self._rows[sample_id]] for sample_id in sample_ids]

    def get_sample_ids(self, step: int) -> list[str]:
        """Return the samples that an optimizer step takes."""
        return [self.refs[row].sample_id for row in self.order.get_samples(step)]

    @property
    def streams(self) -> tuple[str, ...]:
        """Names of the feature streams of every sample."""
        return tuple(self.refs[0].feature_keys) if self.refs else ()

    def find_ended(self, first_step: int, last_step: int) -> np.ndarray:
        """Return the contents whose last use, in the training or in an epoch, is at steps `first_step` to `last_step`."""
        ended = [(first_step <= each.last) & (each.last <= last_step) & (each.first > 0) for each in self._lifetimes]
        return np.flatnonzero(np.any(ended, axis=0))

    def find_claimed(self, contents: np.ndarray, done_step: int, window_end: int) -> np.ndarray:
        """Return whether each content may be captured for a step up to `window_end` and is used after `done_step`, (N,).

        With `capture_again`, features that the window already includes for the next epoch are among them.
        """
        claimed = np.zeros(len(contents), np.bool_)
        for lifetime in self._lifetimes:
            first, last = lifetime.first[contents], lifetime.last[contents]
            claimed |= (first > 0) & (first <= window_end) & (last > done_step)
        return claimed

    def find_freed(self, first_step: int, last_step: int) -> list[str]:
        """Return the feature keys that can go once steps `first_step` to `last_step` are done."""
        ended = self.find_ended(first_step, last_step)
        ended = ended[~self.find_claimed(ended, last_step, self.find_window_end(last_step))]
        return [self.get_key(content, stream) for content in ended for stream in self.streams]

    def list_contents(self, window_end: int) -> np.ndarray:
        """Return the contents that may be captured for a step up to `window_end`."""
        return np.flatnonzero(np.any([(e.first > 0) & (e.first <= window_end) for e in self._lifetimes], axis=0))

    def get_contents(self, rows: Sequence[int]) -> np.ndarray:
        """Return the contents of samples, given by their places in `refs`."""
        return self._content_of[list(rows)]

    def get_key(self, content: int, stream: str) -> str:
        return self.refs[self._samples_of[content][0]].feature_keys[stream]

    def find_needed(self, acked_step: int) -> list[SampleRef]:
        """Return a reference of each content that may be captured by now and is needed after `acked_step`."""
        end, needed = self.find_window_end(acked_step), []
        for lifetime in self._lifetimes:
            chosen = (lifetime.first > 0) & (lifetime.first <= end) & (lifetime.last > acked_step)
            needed += [self.refs[self._samples_of[content][0]] for content in np.flatnonzero(chosen)]
        return needed

    def find_ahead(self, done_step: int) -> list[SampleRef]:
        """Return a reference of each content that may be captured by now and that no step up to `done_step` has used."""
        end = self.find_window_end(done_step)
        new = np.any([(done_step < each.first) & (each.first <= end) for each in self._lifetimes], axis=0)
        return [self.refs[self._samples_of[content][0]] for content in np.flatnonzero(new)]

    def count_new_tokens(self, done_step: int) -> int:
        """Return the tokens that were captured for the steps up to `done_step`, each capture counted."""
        used = [(each.first > 0) & (each.first <= done_step) for each in self._lifetimes]
        return sum(int(self._tokens[chosen].sum()) for chosen in used)

    @cached_property
    def _tokens(self) -> np.ndarray:
        return np.array([self.refs[samples[0]].num_tokens for samples in self._samples_of], np.int64)

    @cached_property
    def _rows(self) -> dict[str, int]:
        return {ref.sample_id: row for row, ref in enumerate(self.refs)}

    def _make_job(self, content: int) -> SampleJob:
        row = self._samples_of[content][0]
        ref = self.refs[row]
        return SampleJob(row, ref.sample_id, ref.num_tokens, dict(ref.feature_keys), tuple(ref.feature_keys))

    def _make_task(self, batch: Sequence[SampleJob], task_id: str, run_id: str, step: int) -> PromptTask:
        rows = [row for job in batch for row in self._samples_of[self._content_of[job.row]]]
        ids = tuple(self.refs[row].sample_id for row in rows)
        return PromptTask(task_id, run_id, ids, step=step, num_tokens=sum(job.num_tokens for job in batch))

    def _count_new(self) -> tuple[np.ndarray, np.ndarray]:
        """Return samples and bytes that are captured for each step and no earlier one, (total_steps + 1,) each."""
        size = self.order.total_steps + 1
        samples, nbytes = np.zeros(size, np.int64), np.zeros(size, np.int64)
        for lifetime in self._lifetimes:
            np.add.at(samples, lifetime.first, 1)
            np.add.at(nbytes, lifetime.first, self._bytes)
        samples[0] = nbytes[0] = 0  # contents that no step takes
        return samples, nbytes

    def _find_end(self, done: int, limits: Watermark) -> int:
        """Return the last step up to which the new features of the steps after `done` are within the limits."""
        end = self.order.total_steps if limits.steps is None else min(self.order.total_steps, done + limits.steps)
        for limit, totals in ((limits.samples, self._total_samples), (limits.bytes, self._total_bytes)):
            if limit is not None:
                end = min(end, int(np.searchsorted(totals, totals[done] + limit, side="right")) - 1)
        return min(max(end, done + 1), self.order.total_steps)

    @cached_property
    def _total_samples(self) -> np.ndarray:
        return self._new_samples.cumsum()

    @cached_property
    def _total_bytes(self) -> np.ndarray:
        return self._new_bytes.cumsum()

    def _find_earliest_capture(self, steps: np.ndarray) -> np.ndarray:
        """Return for each step the number of steps done when its features are captured at the earliest."""
        ends = np.array([self.find_window_end(done) for done in range(self.order.total_steps)], np.int64)
        return np.searchsorted(ends, steps)


def _group_by_content(refs: Sequence[SampleRef]) -> tuple[np.ndarray, list[list[int]]]:
    """Return the content of each sample, (samples,), and the samples of each content."""
    contents: dict[tuple[str, ...], int] = {}
    of = np.array([contents.setdefault(tuple(ref.feature_keys.values()), len(contents)) for ref in refs], np.int64)
    samples: list[list[int]] = [[] for _ in contents]
    for row, content in enumerate(of):
        samples[content].append(row)
    return of, samples


def _list_limits(limits: Watermark) -> tuple[int | None, int | None, int | None]:
    return limits.samples, limits.bytes, limits.steps
