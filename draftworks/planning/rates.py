"""Speed of each program for a target: measured with it, scaled from another target of the deployment, or documented."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from draftworks.errors import DraftworksError
from draftworks.planning.documented_rates import find_documented, make_source, measure_size
from draftworks.planning.estimates import Estimate, Source
from draftworks.planning.measurements import (
    Measurement,
    Program,
    measure_answers,
    measure_capture,
    measure_evaluation,
    measure_export,
    measure_training,
)
from draftworks.planning.subject import PlanSubject
from draftworks.storage.artifacts import Artifact
from draftworks.storage.asset_names import (
    HELDOUT_FEATURES,
    HELDOUT_RESPONSES,
    RESPONSES,
    TRAINING_FEATURES,
    of_eval_set,
    of_strategy,
)
from draftworks.storage.records import ReportIdentity
from draftworks.targets.resolve import TargetShape

NEWEST = 5
"""Measurements that count."""
_LEAST_SHARE = 0.2
"""Of the tokens of the largest measurement; the speed of smaller ones is mostly that of their start."""
_ONE_RUN, _SEVERAL_RUNS, _OTHER_TARGET, _START = 1.25, 1.1, 2.0, 1.5
"""Factors by which a rate may be off: of one run, beyond those of several, of another target, of the seconds of a start."""
_MOST_OTHERS = 200
"""Other targets that are looked at."""


@dataclass(frozen=True)
class ProgramRate:
    """Speed of one job of a program.

    Attributes:
        start_s: seconds of a job beside its work; all of them where a program's time does not depend on tokens.
    """

    tokens_per_s: Estimate
    start_s: Estimate
    source: Source

    def estimate_seconds(self, tokens: Estimate) -> Estimate:
        return self.start_s + tokens.divide_by(self.tokens_per_s)


def find_rate(subject: PlanSubject, program: Program, device: str, ranks: int, strategy: str = "") -> ProgramRate:
    """Return the speed of a job of a program with so many ranks.

    Args:
        device: of the job, as its section of the registry names it.
        strategy: of the draft, for the programs that run one.
    """
    own = list(_measure(subject, program, strategy))
    if own:
        return _combine(own, ranks)
    on_gpu = subject.uses_gpu(device)
    other = _find_closest(subject, program, strategy, device)
    if other is not None:
        return _scale(program, other, subject.shape, ranks)
    found = find_documented(program, on_gpu)
    return ProgramRate(found.scale_to(program, subject.shape) * ranks, found.start_s, make_source(found))


@dataclass(frozen=True)
class _OtherTarget:
    name: str
    shape: TargetShape
    measured: Sequence[Measurement]
    ranks: int


def _combine(measured: Sequence[Measurement], ranks: int) -> ProgramRate:
    """Return the rate of the newest measurements. Where they say with how many ranks, it grows with the ranks."""
    largest = max(each.tokens for each in measured)
    chosen = [each for each in measured if each.tokens >= _LEAST_SHARE * largest][:NEWEST]
    newest = chosen[0].result
    when = datetime.fromtimestamp(newest.created, UTC).strftime("%Y-%m-%d")
    runs = "" if len(chosen) == 1 else f" and {len(chosen) - 1} more"
    source = Source("measured", f"{when} by {newest.asset} {newest.path.name}{runs}")
    start = statistics.median(max(each.start_s, 0.0) for each in chosen)
    start_s = Estimate(
        min(min(max(each.start_s, 0.0) for each in chosen), start / _START),
        start,
        max(max(each.start_s for each in chosen), start * _START),
    )
    if not largest:
        return ProgramRate(Estimate.exactly(1.0), start_s, source)
    speeds = [each.tokens_per_s * (1 if each.ranks is None else ranks / each.ranks) for each in chosen]
    value = sum(each.tokens for each in chosen) / sum(
        each.tokens / speed for each, speed in zip(chosen, speeds, strict=True)
    )
    factor = _ONE_RUN if len(chosen) == 1 else _SEVERAL_RUNS
    return ProgramRate(Estimate(min(speeds) / factor, value, max(speeds) * factor), start_s, source)


def _scale(program: Program, other: _OtherTarget, shape: TargetShape, ranks: int) -> ProgramRate:
    measured = _combine(other.measured, other.ranks)
    factor = measure_size(program, other.shape) / measure_size(program, shape) * ranks / other.ranks
    rate = measured.tokens_per_s * factor
    bounds = Estimate(rate.low / _OTHER_TARGET, rate.value, rate.high * _OTHER_TARGET)
    start = measured.start_s
    source = Source("scaled", f"from target {other.name} by size: {measured.source.text}")
    return ProgramRate(bounds, Estimate(start.low / _OTHER_TARGET, start.value, start.high * _OTHER_TARGET), source)


def _find_closest(subject: PlanSubject, program: Program, strategy: str, device: str) -> _OtherTarget | None:
    """Return the measured target of the deployment whose size is closest, on the same kind of device; None without any."""
    wanted, on_gpu = math.log(measure_size(program, subject.shape)), subject.uses_gpu(device)
    asset = _list_assets(subject, program, strategy)[0]
    names = [name for name in subject.registry.list_targets() if name != subject.target.name]
    made = [name for name in names if (subject.artifacts.root / asset / name).is_dir()][:_MOST_OTHERS]
    found: list[_OtherTarget] = []
    for name in made:
        try:
            target = subject.registry.load_target(name)
            other = PlanSubject(target, subject.registry, subject.artifacts, subject.digests, subject.before)
            same = target.capture.engine == subject.target.capture.engine
            measured = list(_measure(other, program, strategy))
            if measured and same and other.uses_gpu(find_device(other, program, strategy)) == on_gpu:
                found.append(_OtherTarget(name, other.shape, measured, count_ranks(other, program, strategy)))
        except DraftworksError:
            continue  # its own first step says what is wrong with it
    return min(found, key=lambda each: abs(math.log(measure_size(program, each.shape)) - wanted), default=None)


def find_device(subject: PlanSubject, program: Program, strategy: str = "") -> str:
    """Return the device of a program's jobs, as the registry names it."""
    target = subject.target
    if program == "export":
        return "cpu"
    if strategy and program in ("train", "evaluate"):
        return target.strategies[strategy].training.device if strategy in target.strategies else "auto"
    return target.capture.device


def count_ranks(subject: PlanSubject, program: Program, strategy: str = "") -> int:
    """Return how many devices the jobs of a program use together; a process on the CPU counts as one."""
    target = subject.target
    place = subject.registry.resolve_launcher(target, program)
    capture, nodes = target.capture, place.nodes
    if program == "export":
        return 1
    if program in ("train", "evaluate"):
        entry = target.strategies.get(strategy)
        return nodes * (1 if entry is None else entry.training.processes)
    processes = capture.processes if program == "capture" else 1
    return nodes * place.workers * processes * capture.gpus_per_process


def _list_assets(subject: PlanSubject, program: Program, strategy: str) -> list[str]:
    """Return the assets whose results measure a program, the main one first."""
    names, evals = of_strategy(strategy), [of_eval_set(name) for name in subject.target.evals]
    return {
        "regenerate": [RESPONSES, HELDOUT_RESPONSES, *(each.responses for each in evals)],
        "capture": [TRAINING_FEATURES, HELDOUT_FEATURES, *(each.features for each in evals)],
        "train": [names.draft],
        "evaluate": [names.report],
        "export": [names.export],
    }[program]


def _measure(subject: PlanSubject, program: Program, strategy: str) -> Iterator[Measurement]:
    """Yield what was measured of a program with this target, newest first."""
    results = [each for asset in _list_assets(subject, program, strategy) for each in subject.list_results(asset)]
    for result in sorted(results, key=lambda each: -each.created):
        found = _read(subject, program, result)
        if found is not None:
            yield found


def _read(subject: PlanSubject, program: Program, result: Artifact) -> Measurement | None:
    engine = subject.target.capture.engine
    if program == "regenerate":
        return measure_answers(result, engine)
    if program == "capture":
        return measure_capture(result, engine)
    if program == "train":
        return measure_training(result)
    if program == "evaluate":
        return measure_evaluation(result, _count_measured_tokens(subject, result))
    return measure_export(result)


def _count_measured_tokens(subject: PlanSubject, report: Artifact) -> float:
    """Return the tokens of the eval sets that a report measured on; 0 if one of them is gone."""
    identity = ReportIdentity.of(report)
    sets = {"heldout": identity.heldout, **identity.evals}
    total = 0.0
    for name, data in sets.items():
        made = subject.list_results(of_eval_set(name).responses)
        answers = next((each for each in made if data is not None and each.data_version == data.answers), None)
        if answers is None:
            return 0.0
        total += answers.summary.get("tokens", 0)
    return total
