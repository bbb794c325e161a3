"""What differs between two drafts in recipe, data, size and cost of training; from records and file headers. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from draftworks.config.draft_options import WEIGHTS
from draftworks.errors import DraftworksError
from draftworks.fleet.compared_drafts import ComparedDraft
from draftworks.storage.artifacts import Artifact
from draftworks.storage.names import CONVERSATIONS, RESPONSES, TOKENIZED_TRAIN, VOCAB_MAPPING, of_strategy
from draftworks.targets.safetensors_headers import read_header

MISSING = "(not set)"
"""Value of a key that only the other draft has."""
_RECIPE = ("strategy", "start_from", "options", "training")
_TARGET = "weights of the target"
_DATA = ("tokens", "features", "vocab_mapping", "heldout")
_FIGURES = ("samples", "tokens", "supervised_tokens", "longest", "coverage", "heldout_coverage")
_SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True)
class Difference:
    """One key with another value in each draft."""

    key: str
    a: Any
    b: Any


@dataclass(frozen=True)
class DraftCost:
    """Size of a draft, and what its training cost; None where it is not known.

    Attributes:
        weights_bytes: of the published weights.
        hours: of training, from its first to its last step, without waiting in queues.
        rank_hours: hours times the processes that trained.
        tokens: that the training read, an epoch after the other.
    """

    parameters: int | None = None
    weights_bytes: int | None = None
    steps: int | None = None
    tokens: int | None = None
    hours: float | None = None
    rank_hours: float | None = None
    tokens_per_s: float | None = None

    @classmethod
    def of(cls, draft: Artifact | None) -> DraftCost:
        """Read them from a draft's record, and from the header of its weights."""
        if draft is None:
            return cls()
        summary = draft.summary
        seconds, ranks = summary.get("seconds"), summary.get("world_size")
        hours = None if seconds is None else seconds / _SECONDS_PER_HOUR
        path = draft.path / WEIGHTS
        try:
            parameters = sum(math.prod(tensor.shape) for tensor in read_header(path).values())
            nbytes = path.stat().st_size
        except (OSError, DraftworksError):  # pruned, or of another software's layout
            parameters, nbytes = None, None
        return cls(
            parameters,
            nbytes,
            summary.get("steps"),
            summary.get("tokens"),
            hours,
            None if hours is None or ranks is None else hours * ranks,
            summary.get("tokens_per_s"),
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def find_recipe_differences(a: ComparedDraft, b: ComparedDraft) -> tuple[Difference, ...]:
    """Return the settings that differ, of draft, training and answers. A key that only one has is `MISSING` in the other."""
    return _differ(_read_recipe(a), _read_recipe(b))


def find_data_differences(a: ComparedDraft, b: ComparedDraft) -> tuple[Difference, ...]:
    """Return what differs in the data: content versions, and the figures of the training set where that is there."""
    return _differ(_read_data(a), _read_data(b))


def _differ(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[Difference, ...]:
    keys = dict.fromkeys([*a, *b])
    found = (Difference(key, a.get(key, MISSING), b.get(key, MISSING)) for key in keys)
    return tuple(one for one in found if one.a != one.b)


def _read_recipe(side: ComparedDraft) -> dict[str, Any]:
    made_from = side.made_from
    if made_from is None:
        return {"strategy": side.strategy, _TARGET: side.weights_of_target}
    recipe = {_TARGET: made_from.target, **{name: getattr(made_from, name) for name in _RECIPE}}
    recipe["start_from"] = _name_start(side, made_from.start_from)
    return {**_flatten(recipe), **{key: value for each in _read_lineage(side) for key, value in each.settings.items()}}


def _name_start(side: ComparedDraft, weights: str | None) -> str | None:
    """Return the name of the draft that a training began with; of weights of no draft here, the digest, said so."""
    if weights is None:
        return None
    began = _find(side, of_strategy(side.strategy).draft, weights)
    return f"weights {weights}, of no draft here" if began is None else began.path.name


def _read_data(side: ComparedDraft) -> dict[str, Any]:
    made_from = side.made_from
    found: dict[str, Any] = {}
    if made_from is not None:
        plain = {name: getattr(made_from, name) for name in _DATA}
        heldout = made_from.heldout
        found = _flatten({**plain, "heldout": None if heldout is None else heldout.answers})
    return {**found, **{key: value for each in _read_lineage(side) for key, value in each.figures.items()}}


@dataclass(frozen=True)
class _Input:
    """An input of a draft that is still among the results: its settings and figures, by key."""

    settings: Mapping[str, Any]
    figures: Mapping[str, Any]


def _read_lineage(side: ComparedDraft) -> Iterator[_Input]:
    """Yield tokens, vocabulary mapping, answers and conversations that a draft was made from, as far as they are there."""
    made_from = side.made_from
    if made_from is None:
        return
    tokens = _find(side, TOKENIZED_TRAIN, made_from.tokens)
    if tokens is not None:
        yield _Input({}, {f"training set: {name}": tokens.summary[name] for name in _FIGURES if name in tokens.summary})
    mapping = _find(side, VOCAB_MAPPING, made_from.vocab_mapping)
    if mapping is not None:
        shown = {name: mapping.summary[name] for name in _FIGURES if name in mapping.summary}
        yield _Input({}, {f"vocabulary: {name}": value for name, value in shown.items()})
    answers = None if tokens is None else _find(side, RESPONSES, tokens.identity.get("responses"))
    if answers is None:
        return
    names = ("responses", "max_length", "only_last_turn", "compute_dtype", "backend", "args")
    settings = {name: answers.identity[name] for name in names if name in answers.identity}
    yield _Input(_flatten(settings, "answers: "), {"tokenizer": answers.identity.get("tokenizer")})
    prepared = _find(side, CONVERSATIONS, answers.identity.get("conversations"))
    if prepared is not None:
        data = _flatten({"data": prepared.identity.get("data")})
        yield _Input(data, {"data set": prepared.identity.get("dataset")})


def _find(side: ComparedDraft, asset: str, version: Any) -> Artifact | None:
    """Return the newest result of that content; None if it was pruned."""
    if side.store is None or version is None:
        return None
    known = side.store.list_all(asset, side.target)
    return next((one for one in known if one.data_version == version), None)


def _flatten(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Return nested mappings as one, with keys such as `training.lr`."""
    found: dict[str, Any] = {}
    for name, value in json.loads(json.dumps(values)).items():
        if isinstance(value, Mapping):
            found |= _flatten(value, f"{before}{name}.")
        else:
            found[f"{before}{name}"] = value
    return found
