"""Samples and tokens of each part of a target's data: counted where they exist, otherwise estimated."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce

from draftworks.config.capture import CaptureSpec
from draftworks.config.data import ResponseSpec
from draftworks.config.features import UntilSpec
from draftworks.config.registry_files import TrainingSpec
from draftworks.errors import ConfigError
from draftworks.planning.data_sample import DataSample, sample_data
from draftworks.planning.estimates import Estimate, Source
from draftworks.planning.identities import TRAIN
from draftworks.planning.subject import Found, PlanSubject
from draftworks.storage.artifacts import Artifact
from draftworks.storage.identity import EngineIdentity, FeatureIdentity, LastHidden, LayerTap
from draftworks.storage.names import HELDOUT_RESPONSES, RESPONSES, TRAINING_FEATURES, of_eval_set
from draftworks.storage.records import AnswersIdentity, FeaturesIdentity
from draftworks.targets.registry import HELDOUT
from draftworks.targets.training_data import load_slice_plan, make_greedy_settings

EVAL_PART = "all"
_LEFT_OUT = (
    *("rejected", "duplicates", "superseded"),
    *("other_events", "dropped_for_secrets", "dropped_by_redaction"),
)
"""Counts of a prepared set's rows that are not used."""
_DEVIATIONS = 2.0
_SAME_DATA, _OTHER_DATA = 1.05, 1.5
"""Factors by which tokens per sample may differ from those of earlier answers."""


@dataclass(frozen=True)
class Amount:
    """Size of one part of the data.

    Attributes:
        tokens: of all samples, prompts and answers.
        generated: tokens that the target generates for them; 0 where the data's own answers are taken.
        found: what exists of its answers.
    """

    samples: Estimate
    tokens: Estimate
    generated: Estimate
    source: Source
    found: Found = Found()

    def find_made_share(self, found: Found) -> float:
        """Return the share of the samples that a result has, 0 to 1; below 1 where the result itself is to be made."""
        share = divide(found.count_samples(self.samples.value), self.samples.value)
        return 1.0 if found.exact is not None else min(share, math.nextafter(1.0, 0.0))


@dataclass(frozen=True)
class _Part:
    """A part of the data: the eval set that it belongs to, or `heldout` for training data too, and its answers."""

    eval_set: str
    part: str
    asset: str
    settings: ResponseSpec


def count_amounts(subject: PlanSubject) -> Mapping[str, Amount]:
    """Return the amount of each part: `train`, `heldout` and the named eval sets.

    Raises:
        ConfigError: nothing is known of a data set: it lies elsewhere, was not prepared, and has no `max_conversations`;
            or the weights of a mix are not there.
        DataError: a data set has no files.
    """
    target = subject.target
    load_slice_plan(target, subject.registry)  # the same amount with any weights, but a run needs them
    kind = _find_kind(subject)
    greedy = make_greedy_settings(target, kind)
    parts = {TRAIN: _Part(HELDOUT, TRAIN, RESPONSES, target.responses)}
    parts |= {HELDOUT: _Part(HELDOUT, HELDOUT, HELDOUT_RESPONSES, greedy)}
    for name in target.evals:
        parts[name] = _Part(name, EVAL_PART, of_eval_set(name).responses, greedy)
    return {name: _count_part(subject, part) for name, part in parts.items()}


def _count_part(subject: PlanSubject, part: _Part) -> Amount:
    found = subject.find_answers(part.asset, part.part, part.settings, part.eval_set)
    if found.exact is not None:
        return _count_answered(found)
    sample = _sample(subject, part.eval_set)
    conversations = _count_conversations(subject, part, sample)
    generates = part.settings.mode == "regenerate"
    earlier = _find_similar_answers(subject, part)
    if earlier is not None:
        return _scale_earlier(subject, part, conversations, earlier, found)
    limit = float(subject.target.max_length)
    if sample is None:
        per_sample = Estimate(limit / 8, limit / 3, limit)
        text = f"nothing is known of its length but max_length {subject.target.max_length}"
        generated = per_sample if generates else Estimate.exactly(0.0)
        return _make_amount(conversations, per_sample, generated, Source("documented", text), found)
    answers = _estimate_answers(sample, part.settings, generates)
    per_sample = (sample.prompt_tokens + answers).cap(limit)
    generated = answers.cap(limit) if generates else Estimate.exactly(0.0)
    text = "the first rows of the data set, 3 to 5 characters a token"
    if sample.guessed and generates:
        text += ", answers of 50 to 2,000 tokens"
    if sample.tokenized:
        return _make_amount(
            conversations, per_sample, generated, Source("counted", "first rows of the data set"), found
        )
    return _make_amount(conversations, per_sample, generated, Source("documented", text), found)


def _make_amount(samples: Estimate, per_sample: Estimate, generated: Estimate, source: Source, found: Found) -> Amount:
    return Amount(samples, samples.times(per_sample), samples.times(generated), source, found)


def _count_answered(found: Found) -> Amount:
    """Return the amount of answers that exist."""
    made = found.exact
    assert made is not None
    figures = made.summary
    generated = _count_generated(made)
    return Amount(
        samples=Estimate.exactly(figures["samples"]),
        tokens=Estimate.exactly(figures["tokens"]),
        generated=Estimate.exactly(generated),
        source=Source("counted", f"{made.asset} {made.path.name}"),
        found=found,
    )


def _scale_earlier(
    subject: PlanSubject, part: _Part, conversations: Estimate, earlier: Artifact, found: Found
) -> Amount:
    """Return the amount by the tokens per sample of answers to other conversations of the target."""
    samples = max(float(earlier.summary["samples"]), 1.0)
    related = subject.find_same_data(part.eval_set) is not None
    factor = _SAME_DATA if related else _OTHER_DATA
    tokens, generated = earlier.summary["tokens"] / samples, _count_generated(earlier) / samples
    limit = float(subject.target.max_length)
    text = f"{tokens:.0f} tokens a sample, as in {earlier.asset} {earlier.path.name}"
    per_sample = Estimate.within(min(tokens, limit), factor).cap(limit)
    return _make_amount(
        conversations,
        Estimate(per_sample.low, min(tokens, limit), max(per_sample.high, min(tokens, limit))),
        Estimate.within(generated, factor) if part.settings.mode == "regenerate" else Estimate.exactly(0.0),
        Source("measured", text),
        found,
    )


def _count_generated(answers: Artifact) -> float:
    """Return the tokens that were generated for answers, those of earlier attempts included; 0 if they were taken."""
    mode = (AnswersIdentity.of(answers).responses or {}).get("mode")
    return float(answers.summary.get("supervised_tokens", 0)) if mode == "regenerate" else 0.0


def _find_similar_answers(subject: PlanSubject, part: _Part) -> Artifact | None:
    """Return the newest answers of the same kind and with the same limits: of the same part, or of another one."""
    target = subject.target
    for asset in dict.fromkeys((part.asset, RESPONSES, HELDOUT_RESPONSES)):
        for each in subject.list_results(asset):
            found = AnswersIdentity.of(each)
            responses = found.responses or {}
            limits = (found.max_length, responses.get("max_new_tokens", part.settings.max_new_tokens))
            same = responses.get("mode") == part.settings.mode and responses.get("thinking") == part.settings.thinking
            if same and limits == (target.max_length, part.settings.max_new_tokens) and each.summary.get("samples"):
                return each
    return None


def _count_conversations(subject: PlanSubject, part: _Part, sample: DataSample | None) -> Estimate:
    prepared = subject.find(of_eval_set(part.eval_set).conversations)
    if prepared is not None:
        key = "conversations" if part.part == EVAL_PART else part.part
        return Estimate.exactly(prepared.summary[key])
    related = subject.find_same_data(part.eval_set)
    if related is not None and {"rows", "rejected", "duplicates"} <= related.summary.keys():
        usable = related.summary["rows"] - sum(related.summary.get(reason, 0) for reason in _LEFT_OUT)
        return _choose(subject, part, Estimate.exactly(usable))
    limit = _find_limit(subject, part.eval_set)
    if sample is None and limit is None:
        name = subject.target.name
        heldout = part.eval_set == HELDOUT
        key = (
            f"data.max_conversations of target {name}"
            if heldout
            else f"max_conversations of evals/{part.eval_set}.yaml"
        )
        raise ConfigError(
            f"target {name}: a plan needs the number of conversations of {'its data' if heldout else part.eval_set}, "
            f"which is not known before they are prepared: files lie elsewhere, or no row can be read. Set {key}, or run: "
            f"draftworks run prepare --target {name}"
        )
    if sample is None:
        chosen = _choose_by_hash(Estimate.exactly(float(limit or 0)), _find_share(subject, part.part))
        return _ask(subject, part, chosen)
    rows = Estimate(sample.rows.low * 0.8, sample.rows.value, sample.rows.high)  # some are rejected, or duplicates
    return _choose(subject, part, rows)


def _choose(subject: PlanSubject, part: _Part, usable: Estimate) -> Estimate:
    """Return how many of the usable conversations belong to a part: training data is cut and then split, the held-out
    part of an eval set split and then cut."""
    limit = _find_limit(subject, part.eval_set)
    if part.eval_set != HELDOUT and subject.registry.load_eval_set(part.eval_set).part == "held_out":
        usable = _choose_by_hash(usable, subject.target.data.held_out_share)
    chosen = _choose_by_hash(usable if limit is None else usable.cap(limit), _find_share(subject, part.part))
    return _ask(subject, part, chosen)


def _ask(subject: PlanSubject, part: _Part, prompts: Estimate) -> Estimate:
    """Return how often prompts are asked: with thinking on and off, where the mix has shares of it, but for training."""
    return prompts * 2 if subject.target.asks_both_ways and part.part != TRAIN else prompts


def _choose_by_hash(rows: Estimate, share: float) -> Estimate:
    """Return how many of the rows a hash chooses that chooses each with this probability.

    That is binomial: the bounds are two standard deviations, sqrt(n p (1 - p)) each, beyond those of the rows.
    """
    spread = [_DEVIATIONS * math.sqrt(count * share * (1.0 - share)) for count in (rows.low, rows.high)]
    return Estimate(
        max(rows.low * share - spread[0], 0.0), rows.value * share, min(rows.high * share + spread[1], rows.high)
    )


def _find_limit(subject: PlanSubject, eval_set: str) -> int | None:
    if eval_set == HELDOUT:
        data, streaming = subject.target.data.max_conversations, subject.target.streaming
        given = [each for each in (data, streaming and streaming.vocabulary_samples) if each is not None]
        return min(given, default=None)
    return subject.registry.load_eval_set(eval_set).max_conversations


def _find_share(subject: PlanSubject, part: str) -> float:
    held_out = subject.target.data.held_out_share
    return {TRAIN: 1.0 - held_out, HELDOUT: held_out}.get(part, 1.0)


def _estimate_answers(sample: DataSample, settings: ResponseSpec, generates: bool) -> Estimate:
    """Return the answer tokens of one row: the data's own, or what the target may say in their place."""
    if not generates:
        return sample.answer_tokens
    limit = settings.max_new_tokens * sample.turns
    given = sample.answer_tokens.cap(limit)
    return Estimate(given.low / 2, given.value, limit)


def _find_kind(subject: PlanSubject) -> str:
    """Return "tokens" for a data set that is tokenized already, else "conversations"."""
    dataset = subject.registry.load_dataset(subject.target.dataset)
    if dataset.format != "auto":
        return "tokens" if dataset.format == "tokens" else "conversations"
    known = subject.find_same_data()
    return "conversations" if known is None else str(known.summary.get("kind", "conversations"))


def _sample(subject: PlanSubject, eval_set: str) -> DataSample | None:
    """Return the size of an eval set's data, of all data sets of a mix for `heldout`; None if one of them is unknown."""
    registry, target = subject.registry, subject.target
    names = target.training_datasets if eval_set == HELDOUT else [registry.load_eval_set(eval_set).dataset]
    found = [registry.read_data(sample_data, name) for name in names]
    known = [each for each in found if each is not None]
    return reduce(DataSample.join, known) if len(known) == len(names) else None


def count_token_bytes(subject: PlanSubject, capture: CaptureSpec) -> int:
    """Return the bytes that the features of one token take in a store: all taps of the target's drafts, and `last`."""
    identity = FeatureIdentity("", EngineIdentity(capture.engine), capture.dtype, capture.storage)
    streams = [*(LayerTap(tap) for tap in subject.taps), LastHidden()]
    return sum(identity.count_bytes(stream, subject.shape.hidden_size) for stream in streams)


def find_distinct_share(subject: PlanSubject) -> float:
    """Return the share of the training tokens that is stored, as samples with equal tokens are stored once.

    It is that of the target's newest feature set; 1 where there is none.
    """
    for each in subject.list_results(TRAINING_FEATURES):
        found, figures = FeaturesIdentity.of(each), each.summary
        kept = found.capture or {}
        if not figures.get("tokens") or kept.get("dtype") not in ("float32", "bfloat16"):
            continue
        identity = FeatureIdentity("", EngineIdentity(""), kept["dtype"], kept.get("storage", "plain"))
        streams = [*(LayerTap(tap) for tap in found.taps or ()), LastHidden()]
        per_token = sum(identity.count_bytes(stream, subject.shape.hidden_size) for stream in streams)
        return min(figures["bytes"] / (figures["tokens"] * per_token), 1.0)
    return 1.0


def count_training_tokens(training: TrainingSpec, amount: Amount, until: UntilSpec | None = None) -> Estimate:
    """Return the tokens that a training takes through the draft: those of its steps' samples, each epoch counted.

    Args:
        amount: of the data that is prepared before.
        until: the end of a training in arrival order. One with its source is counted as with `amount`.
    """
    batch = training.global_batch_size
    samples = (amount.samples.low, amount.samples.value, amount.samples.high)
    known = None if until is None else until.count_steps(batch)
    steps = [training.count_steps(int(count) // batch) if known is None else known for count in samples]
    mean = count_mean_tokens(amount)
    return Estimate(
        steps[0] * batch * mean.low, steps[1] * batch * mean.value, steps[2] * batch * max(mean.high, mean.value)
    )


def count_mean_tokens(amount: Amount) -> Estimate:
    """Return the tokens of one sample."""
    pairs = zip(
        (amount.tokens.low, amount.tokens.value, amount.tokens.high),
        (amount.samples.low, amount.samples.value, amount.samples.high),
        strict=True,
    )
    low, value, high = sorted(divide(tokens, samples) for tokens, samples in pairs)
    return Estimate(low, value, high)


def divide(part: float, whole: float) -> float:
    """Return the quotient; 0 where there is nothing to divide by."""
    return part / whole if whole else 0.0
