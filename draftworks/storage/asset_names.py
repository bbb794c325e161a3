"""Asset names, defined once: the key in Dagster and the first part of a result's path."""

from __future__ import annotations

from typing import NamedTuple

HELDOUT = "heldout"
"""The eval set that is split off the training data of a target."""

TARGET_MODEL = "target_model"
DATASET = "dataset"
RECIPE = "recipe"
EVALUATION_RECIPE = "evaluation_recipe"
CONVERSATIONS = "conversations"
RESPONSES = "responses"
TOKENIZED_TRAIN = "tokenized_train"
VOCAB_MAPPING = "vocab_mapping"
TRAINING_FEATURES = "training_features"
LEADERBOARD = "leaderboard"
FP8_GATE = "fp8_gate"
THINKING_COMPARISON = "thinking_comparison"
HELDOUT_RESPONSES = "heldout_responses"
HELDOUT_FEATURES = "heldout_eval_features"


class StrategyAssets(NamedTuple):
    """Names of the assets that exist once per strategy."""

    draft: str
    report: str
    export: str
    serving: str
    recipe: str
    export_recipe: str
    promoted: str
    decision: str
    observed: str


class EvalSetAssets(NamedTuple):
    """Names of the assets that exist once per eval set; the conversations of `heldout` hold the training part too."""

    conversations: str
    responses: str
    features: str


def of_strategy(strategy: str) -> StrategyAssets:
    return StrategyAssets(*(f"{strategy}_{kind}" for kind in StrategyAssets._fields))


def strategy_of_draft(asset: str) -> str:
    """Return the strategy of an asset `{strategy}_draft`."""
    return asset.removesuffix("_draft")


def of_eval_set(name: str) -> EvalSetAssets:
    conversations = CONVERSATIONS if name == HELDOUT else f"{name}_set"
    return EvalSetAssets(conversations, f"{name}_responses", f"{name}_eval_features")
