"""What is in `var` and in the feature stores, what of it is in use, and what may go."""

from __future__ import annotations

import gc
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from draftworks.data.slices import WEIGHTS_FILE, read_plan
from draftworks.errors import DraftworksError
from draftworks.evaluation.report.summary import TRAINED, ReportSummary
from draftworks.features.manifest import MANIFEST
from draftworks.retention.removable import Item, Place, UnusedFeatures, find_unused_features, list_served
from draftworks.retention.stored_results import (
    StoredResult,
    list_asset_folders,
    list_folders,
    list_pins,
    measure_folder,
    read_results,
)
from draftworks.storage.artifacts import UNPUBLISHED
from draftworks.storage.files import read_json
from draftworks.storage.names import CONVERSATIONS, TRAINING_FEATURES, of_strategy
from draftworks.targets.gguf_store import GGUF
from draftworks.targets.registry import HELDOUT

if TYPE_CHECKING:
    from draftworks.features.contracts import StoredFile


ReadScore = Callable[[StoredResult], float | None]


@dataclass(frozen=True)
class UsedResults:
    """Results in use, with the reason.

    Attributes:
        reasons: by folder: "current", "best", "pinned", "in service"; or "made into ASSET DIGEST" for what a result in
            use was made from.
    """

    reasons: Mapping[Path, str] = field(default_factory=dict)

    def __contains__(self, result: StoredResult) -> bool:
        return result.path in self.reasons


def find_used(
    results: Sequence[StoredResult], roots: Mapping[Path, str], alone: Mapping[Path, str] | None = None
) -> UsedResults:
    """Return the results in `roots`, and all that they were made from, directly or not.

    A result refers to another of the same target if its identity mentions one of the other's names. A draft's identity
    has a digest over its streams instead of the name of its features: it refers to all features of its tokens and target.

    Args:
        roots: reason by folder.
        alone: reason by folder of results that are kept without what they were made from.
    """
    by_target: defaultdict[str, list[StoredResult]] = defaultdict(list)
    for result in results:
        by_target[result.target].append(result)
    reasons: dict[Path, str] = {}
    for one in by_target.values():
        index = _Index.of(one)
        waiting = [result for result in one if result.path in roots]
        reasons.update((result.path, roots[result.path]) for result in waiting)
        while waiting:
            user = waiting.pop()
            for used in index.find_used_by(user):
                if used.path not in reasons:
                    reasons[used.path] = f"made into {user.asset} {user.digest}"
                    waiting.append(used)
    for result in results:
        if alone is not None and result.path in alone:
            reasons.setdefault(result.path, alone[result.path])
    return UsedResults(reasons)


def find_best(reports: Iterable[StoredResult], read_score: ReadScore) -> dict[Path, str]:
    """Return, as roots, the report with the highest score of each asset and target; of equal ones the earliest.

    Args:
        read_score: reads the main score of a report; None if it has none that can be read.
    """
    groups: defaultdict[tuple[str, str], list[StoredResult]] = defaultdict(list)
    for report in reports:
        groups[report.asset, report.target].append(report)
    best: dict[Path, str] = {}
    for group in groups.values():
        if len(group) == 1:
            best[group[0].path] = "best"  # without reading it: it is current, or all that is left
            continue
        scored = [(score, -each.created, each.path) for each in group if (score := read_score(each)) is not None]
        if scored:
            best[max(scored)[2]] = "best"
    return best


@dataclass(frozen=True)
class _Index:
    """Results of one target by their names, and the sets of training features by what they were made from."""

    named: Mapping[str, Sequence[StoredResult]]
    features: Mapping[tuple[object, object], Sequence[StoredResult]]

    @classmethod
    def of(cls, results: Iterable[StoredResult]) -> _Index:
        named: defaultdict[str, list[StoredResult]] = defaultdict(list)
        features: defaultdict[tuple[object, object], list[StoredResult]] = defaultdict(list)
        for result in results:
            for name in result.names:
                named[name].append(result)
            if result.asset == TRAINING_FEATURES:
                features[result.made_from].append(result)
        return cls(dict(named), dict(features))

    def find_used_by(self, user: StoredResult) -> Iterator[StoredResult]:
        for text in user.mentions:
            yield from self.named.get(text, ())
        yield from self.features.get(user.made_from, ())


_WALK_RUNG, _SIMULATED_RUNG = 3, 1


def read_score(report: StoredResult) -> float | None:
    """Return the walk (rung 3) of a report, or simulated_acc_len if it has none; None if it cannot be read."""
    try:
        summary = ReportSummary.load(report.path / HELDOUT)
    except DraftworksError:
        return None
    for rung in (_WALK_RUNG, _SIMULATED_RUNG):
        values = [each.value for each in summary.select_scores(TRAINED, rung) if each.value is not None]
        if values:
            return values[0]
    return None


NOT_USED = "nothing in use was made from it"
CHUNK_BYTES = 256 << 20
"""Features are removed in groups of about this size, the oldest first."""


@dataclass(frozen=True)
class Holding:
    """Bytes of one kind and owner: a target, the digest of weights that targets share, or empty for runs."""

    kind: str
    owner: str


@dataclass(frozen=True)
class Survey:
    """Everything that takes room.

    Attributes:
        candidates: what may go.
        targets_of: targets by the digest of the weights that they share, which owns their features and answers.
    """

    sizes: Mapping[Holding, int]
    candidates: tuple[Item, ...]
    used: UsedResults
    targets_of: Mapping[str, frozenset[str]]

    @property
    def totals(self) -> dict[str, int]:
        """Bytes by kind."""
        totals: Counter[str] = Counter()
        for holding, nbytes in self.sizes.items():
            totals[holding.kind] += nbytes
        return dict(totals)


@contextmanager
def _pause_collection() -> Iterator[None]:
    """Let no search for cycles run: among records of 100,000 results, which have none, it takes half of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_pause_collection()
def survey(place: Place) -> Survey:
    """Look at everything.

    Raises:
        StoreError: what is in use cannot be told: a pin, a record of service, a feature set in use, or a store cannot be read.
    """
    results = _Results.read(place)
    sizes: Counter[Holding] = Counter()
    candidates: list[Item] = []
    for found in (
        *_look_at_results(place, results),
        *_look_at_features(place, results),
        *_look_at_shared(place, results),
        *_look_at_models(place),
        *_look_at_runs(place),
        *_look_at_unfinished(place),
    ):
        sizes[Holding(found.item.kind, found.item.owner)] += found.item.nbytes
        if found.may_go:
            candidates.append(found.item)
    return Survey(dict(sizes), tuple(candidates), results.used, results.targets_of)


@dataclass(frozen=True)
class _Found:
    item: Item
    may_go: bool


@dataclass(frozen=True)
class _Results:
    """All results.

    Attributes:
        mentioned: texts in the identities of those in use.
        targets_of: targets by the digest of the weights of any of their results.
    """

    everything: tuple[StoredResult, ...]
    used: UsedResults
    mentioned: frozenset[str]
    targets_of: Mapping[str, frozenset[str]]

    @classmethod
    def read(cls, place: Place) -> _Results:
        found = tuple(each for folder in list_asset_folders(place.var) for each in read_results(folder))
        served = list_served(place.var)
        used = find_used(found, {**_find_roots(place, found), **served.whole}, served.reports)
        targets_of: defaultdict[str, set[str]] = defaultdict(set)
        for each in found:
            if each.weights is not None:
                targets_of[each.weights].add(each.target)
        mentioned = frozenset(text for each in found if each in used for text in each.mentions)
        return cls(found, used, mentioned, {weights: frozenset(names) for weights, names in targets_of.items()})

    def list_used_sets(self, var: Path) -> list[Path]:
        """Return the folders of the feature sets in use, those of eval features too."""
        sets = [each.path for each in self.everything if each.asset == TRAINING_FEATURES and each in self.used]
        return sets + [path for path in _list_paths(var / "eval_cache") if path.name in self.mentioned]

    def estimate_seconds(self, weights: str, nbytes: int) -> float:
        """Return how long a capture of so many bytes took with these weights; infinite if nobody knows."""
        rates = [each.bytes_per_s for each in self.everything if each.weights == weights and each.bytes_per_s]
        return nbytes / max(rates) if rates else math.inf


def _find_roots(place: Place, results: Iterable[StoredResult]) -> dict[Path, str]:
    here = [each for each in results if each.target in place.targets]
    roots = find_best([each for each in here if each.asset.endswith("_report")], read_score)
    roots.update(_list_weighted_reports(place.var, here))
    roots.update((each.path, "current") for each in here if each.is_current)
    roots.update((place.var / pin.result, "pinned") for pin in list_pins(place.var))
    return roots


def _list_weighted_reports(var: Path, results: Iterable[StoredResult]) -> Iterator[tuple[Path, str]]:
    """Yield the reports that the weights of current conversations were made from: later ones are compared with them.

    Raises:
        ConfigError: weights cannot be read. What is compared is not known then.
    """
    for each in results:
        if each.asset == CONVERSATIONS and each.is_current and (each.path / WEIGHTS_FILE).is_file():
            plan = read_plan(each.path / WEIGHTS_FILE)
            yield var / of_strategy(plan.strategy).report / plan.target / plan.report, "weights"


def _look_at_results(place: Place, results: _Results) -> Iterator[_Found]:
    for each in results.everything:
        size = measure_folder(each.path)
        item = Item(
            kind=each.kind,
            owner=each.target,
            name=f"{each.asset} {each.digest}",
            path=each.path,
            nbytes=size.nbytes,
            seconds=each.seconds,
            newest=max(each.created, size.newest),
            why=NOT_USED if each.target in place.targets else "its target is not in the registry",
            targets=frozenset({each.target}),
        )
        yield _Found(item, each not in results.used and place.is_old(item.newest))


def _look_at_features(place: Place, results: _Results) -> Iterator[_Found]:
    for found in find_unused_features(place.stores, results.list_used_sets(place.var)):
        old = sorted((file for file in found.files if place.is_old(file.written)), key=lambda file: file.written)
        left = found.total
        for number, files in enumerate(_group(old), start=1):
            nbytes = sum(file.nbytes for file in files)
            left -= nbytes
            item = Item(
                kind="features",
                owner=found.weights,
                name=f"features {found.weights} part {number}",
                path=found.store.root,
                nbytes=nbytes,
                seconds=results.estimate_seconds(found.weights, nbytes),
                newest=files[-1].written,
                why="no set of features in use names them",
                targets=results.targets_of.get(found.weights, frozenset()),
                features=UnusedFeatures(found.store, tuple(files), found.total),
            )
            yield _Found(item, may_go=True)
        kept = Item("features", found.weights, "features", found.store.root, max(left, 0), math.inf, place.now)
        yield _Found(kept, may_go=False)


def _look_at_shared(place: Place, results: _Results) -> Iterator[_Found]:
    """Yield eval features and answers, which targets of the same weights share."""
    entries = [("eval_features", path, _read_weights(path)) for path in _list_paths(place.var / "eval_cache")]
    entries += [("answers", path, path.name) for path in _list_paths(place.var / "answers")]
    for kind, path, weights in entries:
        size = measure_folder(path)
        item = Item(
            kind=kind,
            owner=weights,
            name=f"{kind} {path.name}",
            path=path,
            nbytes=size.nbytes,
            seconds=math.inf,
            newest=size.newest,
            why=NOT_USED,
            targets=results.targets_of.get(weights, frozenset()),
        )
        yield _Found(item, path.name not in results.mentioned and place.is_old(size.newest))


def _look_at_models(place: Place) -> Iterator[_Found]:
    """Yield dequantised GGUF files, which cost seconds to make again. A run of any target may still use an older one."""
    for path in _list_paths(place.var / GGUF):
        if path.suffix or path.name.startswith("."):
            continue  # a lock, or one that is being made
        size, why = measure_folder(path), "no target names the GGUF file that it was"
        item = Item("models", "", f"model {path.name}", path, size.nbytes, 0.0, size.newest, why, place.targets)
        unnamed = place.models is not None and path.name not in place.models
        yield _Found(item, unnamed and place.is_old(size.newest))


def _look_at_runs(place: Place) -> Iterator[_Found]:
    days = place.settings.runs_days
    for path in _list_paths(place.var / "runs"):
        size = measure_folder(path)
        why = f"no file of this run was written to for {days:g} days"
        item = Item("runs", "", f"run {path.name}", path, size.nbytes, 0.0, size.newest, why)
        yield _Found(item, place.is_old(size.newest, days))


def _look_at_unfinished(place: Place) -> Iterator[_Found]:
    """Yield what interrupted work has left: results that were being made, and streams."""
    made = [
        Path(entry.path)
        for folder in list_asset_folders(place.var)
        for entry in list_folders(folder)
        if entry.name.endswith(UNPUBLISHED)
    ]
    streams = [path for folder in _list_paths(place.var / "streams") for path in _list_paths(folder)]
    for path in [*made, *streams]:
        size, target = measure_folder(path), path.parent.name
        item = Item(
            kind="unfinished",
            owner=target,
            name=f"{path.parent.parent.name} {path.name}",
            path=path,
            nbytes=size.nbytes,
            seconds=math.inf,
            newest=size.newest,
            why="it was interrupted, and nothing has gone on with it",
            targets=frozenset({target}),
        )
        yield _Found(item, place.is_old(size.newest))


def _group(files: Iterable[StoredFile]) -> Iterator[list[StoredFile]]:
    """Yield files in order, in groups of at least `CHUNK_BYTES`, the last one smaller."""
    group: list[StoredFile] = []
    nbytes = 0
    for file in files:
        group.append(file)
        nbytes += file.nbytes
        if nbytes >= CHUNK_BYTES:
            yield group
            group, nbytes = [], 0
    if group:
        yield group


def _read_weights(entry: Path) -> str:
    try:
        return str(read_json(entry / MANIFEST)["identity"]["target"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _list_paths(folder: Path) -> list[Path]:
    return [Path(entry.path) for entry in list_folders(folder)]
