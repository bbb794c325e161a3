"""Discrete simulation of a stream: producers capture tasks, a store carries their features, a trainer takes its steps.

Rules are those of the runtime: tasks are leased in the order of the plan while the watermark allows, a producer computes
one task while it stores the one before, a step begins when all of its samples are committed and read, and what it used
leaves the window when it is acknowledged. Rates are constant; what is random on a real machine is left out.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Plant:
    """Sizes and rates of producers, store, control plane and trainer. Rates are per second, sizes in bytes.

    Raises ValueError for a count below one, a rate that is not positive, or a watermark that holds no whole step.

    Attributes:
        capture_s: seconds of the engine for one sample, in one producer.
        task_samples: samples of a task, which is one batch of an engine.
        in_flight: tasks that a producer has leased at a time; with 2, one is computed while one is stored.
        put_rate: of one producer into the store; `get_rate` of all ranks of the trainer together.
        store_rate: what the store carries in all, of puts and gets.
        commit_s, ack_s: seconds of the control plane for one sample, one after another.
        step_s: seconds of one optimizer step; `read_ahead` steps are read while one is computed.
        watermark: samples that are leased and not yet acknowledged, at most.
        shares_device: producers and trainer take turns on one device.
    """

    sample_bytes: float
    producers: int
    capture_s: float
    task_samples: int
    step_samples: int
    step_s: float
    watermark: int
    put_rate: float = math.inf
    get_rate: float = math.inf
    store_rate: float = math.inf
    commit_s: float = 0.0
    ack_s: float = 0.0
    in_flight: int = 2
    read_ahead: int = 1
    shares_device: bool = False

    def __post_init__(self) -> None:
        if min(self.producers, self.task_samples, self.step_samples, self.in_flight) < 1 or self.read_ahead < 0:
            raise ValueError(
                "producers, task_samples, step_samples and in_flight are at least 1, read_ahead at least 0"
            )
        if min(self.put_rate, self.get_rate, self.store_rate) <= 0:
            raise ValueError("put_rate, get_rate and store_rate are above 0")
        if min(self.sample_bytes, self.capture_s, self.step_s, self.commit_s, self.ack_s) < 0:
            raise ValueError("sizes and seconds are not negative")
        least = self.step_samples + (self.task_samples if self.step_samples % self.task_samples else 0)
        if self.watermark < least:
            raise ValueError(f"the watermark holds {self.watermark} samples, a step in whole tasks needs {least}")

    def compute_limits(self) -> dict[str, float]:
        """Return the samples per second that each part could carry if it alone decided."""
        device_s = self.capture_s + self.step_s / self.step_samples if self.shares_device else 0.0
        return {
            "capture": _divide(self.producers, self.capture_s),
            "puts": _divide(self.producers * self.put_rate, self.sample_bytes),
            "store": _divide(self.store_rate, 2 * self.sample_bytes),
            "gets": _divide(self.get_rate, self.sample_bytes),
            "control plane": _divide(1.0, self.commit_s + self.ack_s),
            "training": _divide(self.step_samples, self.step_s + self.ack_s * self.step_samples),
            "device": _divide(1.0, device_s),
        }

    @property
    def slowest(self) -> str:
        """The part with the lowest limit."""
        limits = self.compute_limits()
        return min(limits, key=limits.__getitem__)


@dataclass(frozen=True)
class Outcome:
    """What a simulation counted.

    Attributes:
        captured_at: seconds after which the last task was committed.
        step_ends: seconds after which each step was acknowledged.
        peak_samples: committed and not yet acknowledged, at most.
        engine_share, trainer_share: of all seconds that engines and trainer worked, from start to end.
    """

    captured: int
    trained: int
    captured_at: float
    step_ends: tuple[float, ...]
    peak_samples: int
    engine_share: float
    trainer_share: float

    @property
    def seconds(self) -> float:
        return max(self.captured_at, self.step_ends[-1])

    @property
    def steady_rate(self) -> float:
        """Samples per second over the middle half of the steps, without the start and what is left at the end."""
        steps = len(self.step_ends)
        first, last = steps // 4, steps - 1 - steps // 4
        if last == first:
            return self.trained / self.seconds
        return (last - first) * (self.trained / steps) / (self.step_ends[last] - self.step_ends[first])

    def extrapolate(self, samples: float) -> float:
        """Return the seconds of `samples`: those of this simulation, and the rest at its steady rate."""
        return self.seconds + (samples - self.trained) / self.steady_rate


def simulate(plant: Plant, samples: int, after_capture: bool = False) -> Outcome:
    """Simulate one epoch of `samples`, a whole number of steps.

    Args:
        after_capture: training begins when everything is captured, and the watermark does not count: a stored set.

    Raises ValueError if `samples` are not whole steps.
    """
    if samples < plant.step_samples or samples % plant.step_samples:
        raise ValueError(f"{samples} samples are no whole number of steps of {plant.step_samples}")
    return _Simulation(plant, samples, after_capture).run()


class _Simulation:
    """State of one simulation. Events are functions of the time at which they happen."""

    def __init__(self, plant: Plant, samples: int, after_capture: bool) -> None:
        self._plant, self._samples, self._after_capture = plant, samples, after_capture
        self._steps = samples // plant.step_samples
        self._sizes = [min(plant.task_samples, samples - first) for first in range(0, samples, plant.task_samples)]
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self._idle = deque(range(plant.producers))
        self._leased_tasks = [0] * plant.producers
        self._computing = [False] * plant.producers
        self._to_store: list[deque[int]] = [deque() for _ in range(plant.producers)]
        self._store_free = self._control_free = 0.0
        self._next_task = self._leased = self._acknowledged = self._committed = self._peak = 0
        self._committed_tasks: set[int] = set()
        self._whole_tasks = self._prefix = 0
        self._reads = self._read = self._started = 0
        self._reading = self._training = self._device_taken = False
        self._captured_at = self._engine_s = self._trainer_s = 0.0
        self._ends: list[float] = []

    def run(self) -> Outcome:
        self._start_what_can(0.0)
        while self._events:
            now, _, happen = heapq.heappop(self._events)
            happen(now)
            self._start_what_can(now)
        if len(self._ends) < self._steps:
            raise RuntimeError(f"nothing can happen any more after {len(self._ends)} of {self._steps} steps")
        ended = max(self._captured_at, self._ends[-1])
        return Outcome(
            captured=self._committed,
            trained=len(self._ends) * self._plant.step_samples,
            captured_at=self._captured_at,
            step_ends=tuple(self._ends),
            peak_samples=self._peak,
            engine_share=_divide(self._engine_s, self._plant.producers * ended),
            trainer_share=_divide(self._trainer_s, ended),
        )

    def _at(self, when: float, happen: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), happen))

    def _start_what_can(self, now: float) -> None:
        # A step first: the trainer that shares a device with producers takes its turn as soon as its samples are there.
        if not self._training and self._read > self._started and not self._device_taken:
            self._start_step(now)
        while self._idle and self._may_lease():
            self._start_task(now, self._idle.popleft())
        if not self._reading and self._may_read():
            self._start_read(now)

    def _may_lease(self) -> bool:
        if self._next_task == len(self._sizes) or self._device_taken:
            return False
        held = self._leased - self._acknowledged + self._sizes[self._next_task]
        return self._after_capture or held <= self._plant.watermark

    def _start_task(self, now: float, producer: int) -> None:
        task, size = self._next_task, self._sizes[self._next_task]
        self._next_task += 1
        self._leased += size
        self._leased_tasks[producer] += 1
        self._computing[producer] = True
        self._device_taken = self._plant.shares_device
        seconds = self._plant.capture_s * size
        self._engine_s += seconds
        self._at(now + seconds, lambda then: self._store(then, producer, task))

    def _store(self, now: float, producer: int, task: int) -> None:
        """An engine is done with a task: its features go to the store, after those of the producer's task before."""
        self._device_taken = self._computing[producer] = False
        self._to_store[producer].append(task)
        if len(self._to_store[producer]) == 1:
            self._put(now, producer)
        if self._leased_tasks[producer] < self._plant.in_flight:
            self._idle.append(producer)

    def _put(self, now: float, producer: int) -> None:
        size = self._sizes[self._to_store[producer][0]] * self._plant.sample_bytes
        self._at(self._carry(now, size, self._plant.put_rate), lambda then: self._commit(then, producer))

    def _commit(self, now: float, producer: int) -> None:
        task = self._to_store[producer].popleft()
        if self._to_store[producer]:
            self._put(now, producer)
        ended = self._control(now, self._plant.commit_s * self._sizes[task])
        self._at(ended, lambda then: self._note_commit(then, producer, task))

    def _note_commit(self, now: float, producer: int, task: int) -> None:
        if self._leased_tasks[producer] == self._plant.in_flight and not self._computing[producer]:
            self._idle.append(producer)
        self._leased_tasks[producer] -= 1
        self._committed += self._sizes[task]
        self._committed_tasks.add(task)
        while self._whole_tasks in self._committed_tasks:
            self._committed_tasks.remove(self._whole_tasks)
            self._prefix += self._sizes[self._whole_tasks]
            self._whole_tasks += 1
        self._peak = max(self._peak, self._committed - self._acknowledged)
        self._captured_at = now

    def _may_read(self) -> bool:
        if self._reads == self._steps or self._reads > len(self._ends) + self._plant.read_ahead:
            return False
        needed = self._samples if self._after_capture else (self._reads + 1) * self._plant.step_samples
        return self._prefix >= needed

    def _start_read(self, now: float) -> None:
        self._reads += 1
        self._reading = True
        size = self._plant.step_samples * self._plant.sample_bytes
        self._at(self._carry(now, size, self._plant.get_rate), self._end_read)

    def _end_read(self, now: float) -> None:
        self._reading = False
        self._read += 1

    def _start_step(self, now: float) -> None:
        self._started += 1
        self._training = True
        self._device_taken = self._plant.shares_device
        self._trainer_s += self._plant.step_s
        self._at(now + self._plant.step_s, self._acknowledge)

    def _acknowledge(self, now: float) -> None:
        self._device_taken = False
        self._at(self._control(now, self._plant.ack_s * self._plant.step_samples), self._end_step)

    def _end_step(self, now: float) -> None:
        self._training = False
        self._acknowledged += self._plant.step_samples
        self._ends.append(now)

    def _carry(self, now: float, size: float, rate: float) -> float:
        """Return when `size` bytes, asked for `now`, have passed a link of `rate` and the store's shared capacity."""
        turn = max(now, self._store_free)
        self._store_free = turn + size / self._plant.store_rate
        return max(now + size / rate, self._store_free)

    def _control(self, now: float, seconds: float) -> float:
        self._control_free = max(now, self._control_free) + seconds
        return self._control_free


def _divide(amount: float, by: float) -> float:
    return amount / by if by else math.inf
