"""Names of assets, and the validation of names that are partition keys and path components."""

from __future__ import annotations

import re
import unicodedata
from typing import NamedTuple

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


def require_name(value: str) -> str:
    """Return `value` if it is safe as a partition key and as a path component; raise ValueError otherwise."""
    if not NAME.fullmatch(value) or "..." in value:
        allowed = "lower-case letters, digits, '.', '_' and '-', at most 63, and never '...'"
        raise ValueError(f"{value!r} is not a name: {allowed}{_suggest_name(value)}")
    return value


def _suggest_name(value: str) -> str:
    """Return the closest name to a text as the end of a message; empty where nothing is left of it."""
    plain = unicodedata.normalize("NFKD", value.casefold()).encode("ascii", "ignore").decode()
    name = re.sub(r"[^a-z0-9._-]+|\.{3,}", "-", plain).strip("-._")[:63]
    return f"; did you mean {name}?" if NAME.fullmatch(name) else ""


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
FLEET = "fleet"
FP8_GATE = "fp8_gate"
THINKING_COMPARISON = "thinking_comparison"
HELDOUT_RESPONSES = "heldout_responses"
HELDOUT_FEATURES = "heldout_eval_features"


class StrategyAssets(NamedTuple):
    """Names of the assets that exist once per strategy, and of the results of `draftworks bundle`, which are none."""

    draft: str
    report: str
    export: str
    serving: str
    recipe: str
    export_recipe: str
    promoted: str
    decision: str
    observed: str
    bundle: str


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
