"""Typed identities of the data of a draft: conversations, answers and features, written by one asset and read by others.

The JSON is that of earlier versions: a field that their records lack is read as None, which equals no current value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from draftworks.storage.artifacts import Artifact


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
