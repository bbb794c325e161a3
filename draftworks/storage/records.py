"""Typed records of data, drafts, exports and reports, written by one asset and read by others.

The JSON is that of earlier versions: a field that their records lack is read as None, which equals no current value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self

from draftworks.errors import StoreError
from draftworks.storage.artifacts import Artifact
from draftworks.storage.names import strategy_of_draft
from draftworks.storage.words import list_names, suggest_or_list


@dataclass(frozen=True)
class EvalData:
    """Versions of the eval data of a measurement: the version of the answers and, by name, the versions of the
    streams."""

    answers: str
    streams: dict[str, str] | str
    """A single digest of all streams in early records."""

    def to_json(self) -> list[Any]:
        return [self.answers, self.streams]

    @classmethod
    def from_json(cls, found: list[Any]) -> EvalData:
        return cls(*found)


@dataclass(frozen=True)
class Limits:
    """Length limits of answers, in tokens."""

    max_new_tokens: int
    max_length: int

    def to_json(self) -> list[int]:
        return [self.max_new_tokens, self.max_length]


@dataclass(frozen=True)
class DraftIdentity:
    """What a draft was made from: options of strategy and training as JSON, otherwise digests and content versions.

    Attributes:
        start_from: digest of the weights that it began with; None for random ones.
        target: digest of the target's weights.
        tokens: content version of the training tokens.
        features: digest of the content versions of the streams that were read.
        arrival: what decides the samples of a training in arrival order, of which `tokens` and `features` are those that
            were prepared before; None in planned order.
    """

    strategy: str
    options: dict[str, Any]
    start_from: str | None
    training: Mapping[str, Any]
    target: str | None
    tokens: str | None
    features: str | None
    vocab_mapping: str | None
    heldout: EvalData | None
    arrival: Mapping[str, Any] | None = None

    @property
    def seed(self) -> int:
        return self.training["seed"]

    def to_json(self) -> dict[str, Any]:
        assert self.heldout is not None
        plain = {each.name: getattr(self, each.name) for each in fields(self)}
        if self.arrival is None:
            del plain["arrival"]
        return {**plain, "heldout": self.heldout.to_json()}

    @classmethod
    def of(cls, draft: Artifact) -> DraftIdentity:
        found: dict[str, Any] = dict.fromkeys(each.name for each in fields(cls)) | draft.identity
        strategy = found["strategy"] or strategy_of_draft(draft.asset)
        known = {each.name: found[each.name] for each in fields(cls)}
        heldout = None if found["heldout"] is None else EvalData.from_json(found["heldout"])
        defaults = {"options": found["options"] or {}, "training": found["training"] or {}}
        return cls(**{**known, **defaults, "strategy": strategy, "heldout": heldout})


@dataclass(frozen=True)
class ExportIdentity:
    """Inputs of an export.

    Attributes:
        draft: digest of what the draft was made from.
        weights: version of the draft's weights.
        target: digest of the target's weights, its path or hub id, and its commit; some formats name the target.
        settings: formats and dtype that the target's entry asks for; of a quantised draft also on which answers it is walked.
        formats: the export formats of the strategy that are written unasked, and those that were asked for, with their
            revisions, so that an export is made again when one is added, or written otherwise.
        card: digest of the model card's file; None where there is none.
    """

    draft: str
    weights: str | None
    target: Sequence[str | None] | None
    settings: Mapping[str, Any] | None
    formats: Sequence[str] | None
    card: str | None

    def to_json(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @classmethod
    def of(cls, export: Artifact) -> ExportIdentity:
        values: dict[str, Any] = {each.name: export.identity.get(each.name) for each in fields(cls)}
        return cls(**values)


@dataclass(frozen=True)
class ReportIdentity:
    """Inputs of a report.

    Attributes:
        draft: version of the draft's weights.
        draft_identity: digest of the draft's inputs: drafts with equal weights may differ in options.
        evaluation: evaluation settings.
        bigram_tokens: version of the tokens from which the bigram table was counted.
    """

    draft: str
    draft_identity: str | None
    heldout: EvalData | None
    evaluation: Mapping[str, Any] | None
    limits: Limits | None
    bigram_tokens: str | None
    evals: Mapping[str, EvalData] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        assert self.heldout is not None
        assert self.limits is not None
        return {
            "draft": self.draft,
            "draft_identity": self.draft_identity,
            "heldout": self.heldout.to_json(),
            "evals": {name: measured.to_json() for name, measured in self.evals.items()},
            "evaluation": self.evaluation,
            "limits": self.limits.to_json(),
            "bigram_tokens": self.bigram_tokens,
        }

    @classmethod
    def of(cls, report: Artifact) -> ReportIdentity:
        found = report.identity
        heldout, limits = found.get("heldout"), found.get("limits")
        return cls(
            draft=found["draft"],
            draft_identity=found.get("draft_identity"),
            heldout=None if heldout is None else EvalData.from_json(heldout),
            evals={name: EvalData.from_json(measured) for name, measured in found.get("evals", {}).items()},
            evaluation=found.get("evaluation"),
            limits=None if limits is None else Limits(*limits),
            bigram_tokens=found.get("bigram_tokens"),
        )


@dataclass(frozen=True)
class DataIdentity:
    """Base of identities whose JSON has a key for each field."""

    def to_json(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @classmethod
    def of(cls, artifact: Artifact) -> Self:
        return cls(**{each.name: artifact.identity.get(each.name) for each in fields(cls)})


@dataclass(frozen=True)
class ConversationsIdentity(DataIdentity):
    """Inputs of the prepared conversations of a target.

    Attributes:
        dataset: content digest of the data set's files.
        data: the options of `data` that decide which conversations are kept, and in which part.
        split: what of a row decides in which part it is.
    """

    dataset: str | None
    data: Mapping[str, Any] | None
    vocab_size: int | None
    split: str | None = None


@dataclass(frozen=True)
class EvalSetIdentity(DataIdentity):
    """Inputs of the prepared conversations of a named eval set.

    Attributes:
        dataset: content digest of its files.
        held_out_share: of the part that no draft is trained on; the JSON has the key only if the set is that part.
        both_ways: each prompt is asked with thinking off and on; the JSON has the key only if that is so.
        split: what of a row decides whether it is held out; the JSON has the key as `held_out_share`.
    """

    dataset: str | None
    max_conversations: int | None
    max_rejected_share: float | None
    vocab_size: int | None
    held_out_share: float | None = None
    both_ways: bool | None = None
    split: str | None = None

    def to_json(self) -> dict[str, Any]:
        optional, found = ("held_out_share", "both_ways", "split"), super().to_json()
        return {name: value for name, value in found.items() if name not in optional or value is not None}


@dataclass(frozen=True)
class AnswersIdentity(DataIdentity):
    """Inputs of conversations with answers, in tokens.

    Attributes:
        conversations: content version of the conversations; `part` is the part of them that is answered.
        responses: options that decide the answers.
        target: digest of the target's weights; None, as the fields of its engine, where the target does not answer.
        tokenizer: digest of tokenizer and chat template.
        args: SGLang's additional arguments; the JSON has the key only if there are some.
        revision: of how turns are asked and what of them is a label.
    """

    conversations: str | None
    part: str | None
    responses: Mapping[str, Any] | None
    target: str | None
    tokenizer: str | None
    max_length: int | None
    only_last_turn: bool | None
    compute_dtype: str | None = None
    backend: str | None = None
    args: list[str] | None = None
    revision: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in super().to_json().items() if name != "args" or value}

    def is_greedy_of(self, target_digest: str) -> bool:
        """Return whether the target of these weights wrote the answers by its own engine, each token its likeliest."""
        responses = self.responses or {}
        own = responses.get("mode") == "regenerate" and "endpoint" not in responses and self.target == target_digest
        return own and not responses.get("temperature") and responses.get("repetition_penalty", 1.0) == 1.0

    def find_sampling_of(self, target_digest: str) -> dict[str, Any] | None:
        """Return temperature, top_k and top_p at which the target of these weights wrote the answers, by its own engine or an
        endpoint; None if it did not, or if a penalty changed what it says.
        """
        responses = self.responses or {}
        if responses.get("mode") != "regenerate" or self.target != target_digest:
            return None
        if responses.get("repetition_penalty", 1.0) != 1.0:
            return None
        temperature = responses.get("temperature", 0.0)
        cuts = {"top_k": responses.get("top_k") or None, "top_p": responses.get("top_p", 1.0)} if temperature else {}
        return {"temperature": temperature, **cuts}


@dataclass(frozen=True)
class FeaturesIdentity(DataIdentity):
    """Inputs of the features of a training set.

    Attributes:
        tokens: content version of the tokenized set.
        target: digest of the target's weights.
        taps: hf_index of each captured tap.
        capture: options of the capture that decide the features' values.
    """

    tokens: str | None
    target: str | None
    taps: list[int] | None
    capture: Mapping[str, Any] | None


@dataclass(frozen=True)
class EvalFeaturesIdentity(DataIdentity):
    """Inputs of the features of an eval set: the key of its cache entry, and digests of what the entry is made from.

    Attributes:
        eval_data: content version of the answers.
        target: digest of the target's weights.
        tokenizer: digest of tokenizer and chat template.
        capture: digest of the options of the capture that decide the features' values.
    """

    eval_cache_key: str
    eval_data: str | None
    target: str | None
    tokenizer: str | None
    capture: str | None


def read_captured_weights(features: Artifact) -> str | None:
    """Return the digest of the target's weights from which features, of a training set or an eval set, were captured."""
    return features.identity.get("target")


LEAST_VERSION = 8
"""Characters of a data version that are enough to recognise it."""
_SHOWN = 5
_ROOM = 18 * _SHOWN
"""Characters for so many names."""


def read_names(results: Iterable[Artifact]) -> dict[str, str]:
    """Return the data version of each result by its name, in the order given."""
    return {each.path.name: each.data_version for each in results}


def choose_name(given: str, known: Mapping[str, str | None], what: str = "draft") -> str:
    """Return the name of the result that a user means.

    Args:
        given: the name or its begin.
        known: data version by name; None where it is not known.
        what: kind of result, for the message.

    Raises:
        StoreError: none begins so, or several do; a data version is answered with the name.
    """
    if given in known:
        return given
    found = [name for name in known if given and name.startswith(given)]
    if len(found) == 1:
        return found[0]
    if found:
        raise StoreError(f"several {what}s begin with {given}: {list_names(found, _SHOWN)}. Give more of it")
    hint = explain_data_version(given, known, what)
    if hint is not None:
        raise StoreError(hint)
    raise StoreError(f"no {what} {given!r:.80}; {suggest_or_list(given, known, _ROOM)}")


def explain_data_version(given: str, known: Mapping[str, str | None], what: str = "draft") -> str | None:
    """Return the name to use in place of a data version, or of its begin, in words; None if it is none."""
    if len(given) < LEAST_VERSION:
        return None
    same = [name for name, version in known.items() if version is not None and version.startswith(given)]
    if not same:
        return None
    return f"{given} is the data version of {what} {list_names(same, _SHOWN, between=' and ')}, which goes by that name: give {same[0]}"
