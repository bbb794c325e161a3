"""Sizes that follow from the amount of data: bytes of features, tokens of a training."""

from __future__ import annotations

from draftworks.config.capture import CaptureSpec
from draftworks.config.registry_files import TrainingSpec
from draftworks.planning.amounts import Amount
from draftworks.planning.estimates import Estimate
from draftworks.planning.made_results import list_taps
from draftworks.planning.subject import PlanSubject
from draftworks.storage.asset_names import TRAINING_FEATURES
from draftworks.storage.data_records import FeaturesIdentity
from draftworks.storage.identity import EngineIdentity, FeatureIdentity, LastHidden, LayerTap


def count_token_bytes(subject: PlanSubject, capture: CaptureSpec) -> int:
    """Return the bytes that the features of one token take in a store: all taps of the target's drafts, and `last`."""
    identity = FeatureIdentity("", EngineIdentity(capture.engine), capture.dtype, capture.storage)
    streams = [*(LayerTap(tap) for tap in list_taps(subject)), LastHidden()]
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


def count_training_tokens(training: TrainingSpec, amount: Amount) -> Estimate:
    """Return the tokens that a training takes through the draft: those of its steps' samples, each epoch counted."""
    batch = training.global_batch_size
    samples = (amount.samples.low, amount.samples.value, amount.samples.high)
    steps = [training.count_steps(int(count) // batch) for count in samples]
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
