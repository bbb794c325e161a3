"""Rung 3 of what proposes without a model: the walk of a greedy server, replayed exactly from tokens alone. No torch.

It depends on the eval set, the training answers and the number of proposed tokens, on no draft: it is measured once and
kept, for any number of drafts and reports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from draftworks.data.tokenized import TokenizedSet, TokenRow
from draftworks.errors import DraftworksError
from draftworks.evaluation.ladder.answer_walk import AnswerSpan, find_answer_spans
from draftworks.evaluation.ladder.prompt_acceptance import (
    Pass,
    PlacedPass,
    PromptAcceptance,
    PromptsByPosition,
    join_samples,
    split_by_position,
)
from draftworks.evaluation.measurement_cache import MeasurementCache
from draftworks.evaluation.rivals.names import BIGRAM, LOOKUP, LOOKUP_VLLM, NO_DRAFT, SUFFIX, SUFFIX_CACHED
from draftworks.evaluation.rivals.proposers import BigramProposer, BigramTable, LookupProposer, NoProposer, Proposer
from draftworks.evaluation.rivals.suffixes import AnswersText, SuffixProposer

REVISION = 1
"""Increase it when a change of this package changes the counts for the same inputs."""
VLLM_SIZE = 5


@dataclass(frozen=True)
class RivalSample:
    """The walk of one rival on one sample; `by_position`: in each range of places, by the begin of the range."""

    walk: PromptAcceptance
    by_position: Mapping[int, PromptAcceptance]


@dataclass(frozen=True)
class RivalWalk:
    """The walk of one rival on an eval set, as that of a draft."""

    walk: tuple[PromptAcceptance, ...]
    walk_by_position: PromptsByPosition

    @classmethod
    def of(cls, samples: Iterable[RivalSample]) -> RivalWalk:
        ordered = sorted(samples, key=lambda one: one.walk.sample_id)
        return cls(tuple(one.walk for one in ordered), join_samples(one.by_position for one in ordered))

    def to_json(self) -> dict[str, Any]:
        """Return the counts that the others follow from: sample id, emitted tokens, histogram."""
        ranges = {str(begin): list(map(_to_list, prompts)) for begin, prompts in self.walk_by_position.items()}
        return {"walk": list(map(_to_list, self.walk)), "by_position": ranges}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RivalWalk:
        ranges = {int(begin): tuple(map(_from_list, prompts)) for begin, prompts in values["by_position"].items()}
        return cls(tuple(map(_from_list, values["walk"])), ranges)


def _to_list(prompt: PromptAcceptance) -> list[Any]:
    return [prompt.sample_id, prompt.emitted, list(prompt.histogram)]


def _from_list(values: Sequence[Any]) -> PromptAcceptance:
    name, emitted, histogram = values
    accepted = sum(length * count for length, count in enumerate(histogram))
    return PromptAcceptance(name, sum(histogram), accepted, emitted, tuple(histogram))


@dataclass(frozen=True)
class Rivals:
    """What proposes without a model, after the training answers of one target.

    Attributes:
        start: makes a proposer for a request, by the rival's name.
    """

    start: Mapping[str, Callable[[], Proposer]]

    @classmethod
    def after(cls, training: TokenizedSet, vocab_size: int) -> Rivals:
        table, answers = BigramTable.count(training, vocab_size), AnswersText.of(training)
        return cls(
            {
                NO_DRAFT: NoProposer,
                BIGRAM: lambda: BigramProposer(table),
                LOOKUP: lambda: LookupProposer((3, 2, 1), newest=True),
                LOOKUP_VLLM: lambda: LookupProposer((VLLM_SIZE,), newest=False),
                SUFFIX: SuffixProposer,
                SUFFIX_CACHED: lambda: SuffixProposer(answers),
            }
        )

    def measure(self, samples: Iterable[TokenRow], draft_tokens: int) -> dict[str, list[RivalSample]]:
        """Return the walk of every rival on every sample, with at most `draft_tokens` proposed per pass."""
        rows = list(samples)
        return {
            name: [replay_sample(sample, start(), draft_tokens) for sample in rows]
            for name, start in self.start.items()
        }


def replay_sample(sample: TokenRow, proposer: Proposer, draft_tokens: int) -> RivalSample:
    """Replay greedy serving of all answers of a sample; the target's own token follows what it accepts."""
    ids = sample.input_ids.tolist()
    told = 0

    def ask(span: AnswerSpan, known: int) -> Pass:
        nonlocal told
        proposer.extend(ids[told:known])
        told = known
        accepted = 0
        for proposed, token in zip(proposer.propose(draft_tokens), ids[known : span.end]):
            if proposed != token:
                break
            accepted += 1
        return span.make_pass(known, accepted)

    passes: list[PlacedPass] = []
    for span in find_answer_spans(sample.loss_mask):
        passes += span.walk(lambda known, span=span: ask(span, known))
    return RivalSample(
        PromptAcceptance.of(sample.sample_id, [one.result for one in passes]),
        split_by_position(sample.sample_id, passes),
    )


@dataclass(frozen=True)
class RivalIdentity:
    """All that decides the walks.

    Attributes:
        eval_tokens, training_tokens: content digests of the tokenized sets.
        samples: digest of the ids of the samples that were measured.
    """

    eval_tokens: str
    training_tokens: str
    samples: str
    draft_tokens: int
    revision: int = REVISION

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class RivalLookup:
    """Walks by rival that were kept, or why they cannot be used, or neither."""

    walks: Mapping[str, RivalWalk] | None = None
    problem: str | None = None


@dataclass(frozen=True)
class RivalCache:
    """A folder of walks of rivals, see `MeasurementCache`."""

    kept: MeasurementCache

    def find(self, identity: RivalIdentity) -> RivalLookup:
        found = self.kept.find(identity.to_json())
        if found.values is None:
            return RivalLookup(problem=found.problem)
        try:
            return RivalLookup({name: RivalWalk.from_json(values) for name, values in found.values.items()})
        except (ValueError, LookupError, TypeError, AttributeError, DraftworksError) as error:
            return RivalLookup(problem=f"{self.kept.path(identity.to_json())} cannot be read: {error!r}")

    def store(self, identity: RivalIdentity, walks: Mapping[str, RivalWalk]) -> None:
        """Publish them atomically. Raises StoreError if that fails."""
        self.kept.store(identity.to_json(), {name: walk.to_json() for name, walk in walks.items()})
