"""The rules of decision and promotion calculated again, from docs/how-to/decisions.md and in-service.md alone.

Nothing of the product is imported. The shape of the facts is in benchmarks/fleet_facts.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, hypot
from typing import Any

URGENCY = ("retrain", "tune", "undecided", "keep")
MOST_PROMPTS = 1_000_000


@dataclass(frozen=True)
class Loss:
    """Accepted tokens per pass lost on an eval set, with its 95% interval.

    Attributes:
        prompts: those of the present measurement.
        former_prompts: those of the former figure; None with a paired difference.
        fixed_low, fixed_high: what the former figure adds to each side, which more prompts do not make smaller.
        same: whether both measurements are of one draft.
    """

    value: float
    low: float
    high: float
    prompts: int
    former_prompts: int | None = None
    fixed_low: float = 0.0
    fixed_high: float = 0.0
    same: bool = False

    @property
    def says_nothing(self) -> bool:
        return self.low == self.high and not self.same


def oracle_decide(facts: Mapping[str, Any]) -> str:
    """Return the choice for a target: the most urgent of its eval sets."""
    choices = [oracle_decide_one(facts["margins"], each) for each in facts["eval_sets"]]
    return min(choices, key=URGENCY.index)


def oracle_decide_one(margins: Mapping[str, Any], eval_set: Mapping[str, Any]) -> str:
    """Return the choice on one eval set."""
    if eval_set["reference"] == "none":
        return "keep" if eval_set["is_new"] else "undecided"
    loss = find_loss(eval_set)
    counted = [loss.prompts] if loss.former_prompts is None else [loss.prompts, loss.former_prompts]
    if any(count < margins["least_prompts"] for count in counted):
        return "undecided"
    if loss.says_nothing:
        return "undecided"
    if not loss.high > margins["tune"]:
        return "keep"
    if not loss.low > margins["tune"]:
        return "undecided"
    return "retrain" if loss.low > margins["retrain"] or eval_set["tuned"] else "tune"


def find_loss(eval_set: Mapping[str, Any]) -> Loss:
    """Return the loss of an eval set that has one."""
    if eval_set["reference"] in ("same_prompts", "both_drafts"):
        gain = eval_set["paired"]
        return Loss(-gain["difference"], -gain["high"], -gain["low"], gain["prompts"], same=gain["same"])
    former, now = eval_set["former"], eval_set["now"]
    value = former["value"] - now["value"]
    down = max(0.0, former["value"] - former["low"]), max(0.0, now["high"] - now["value"])
    up = max(0.0, former["high"] - former["value"]), max(0.0, now["value"] - now["low"])
    return Loss(
        value,
        value - hypot(*down),
        value + hypot(*up),
        now["prompts"],
        former["prompts"],
        fixed_low=down[0],
        fixed_high=up[0],
    )


def oracle_count_prompts(margins: Mapping[str, Any], eval_set: Mapping[str, Any]) -> int | None:
    """Return how many prompts would decide an undecided eval set with a loss; None if more would not."""
    loss, margin, least = find_loss(eval_set), margins["tune"], margins["least_prompts"]
    if (loss.former_prompts is not None and loss.former_prompts < least) or loss.says_nothing:
        return None
    gap = loss.value - margin
    width, fixed = (loss.high - loss.value, loss.fixed_high) if gap < 0 else (loss.value - loss.low, loss.fixed_low)
    room = gap * gap - fixed * fixed
    if gap == 0 or room <= 0:
        return None
    variable = max(width * width - fixed * fixed, 0.0) if width > 0 else 0.0
    wanted = loss.prompts * variable / room
    if wanted > MOST_PROMPTS:
        return None
    return max(ceil(wanted) if gap < 0 else floor(wanted) + 1, least, loss.prompts + 1)


def oracle_promote(facts: Mapping[str, Any]) -> str:
    """Return the verdict of the rule of promotion on one eval set."""
    promotions: Sequence[Mapping[str, Any]] = facts["promotions"]
    known: list[tuple[float, int, str]] = []  # strength, place in the history, draft
    for place, promotion in enumerate(promotions):
        known.append((_find_strength(promotion["on"], known), place, promotion["draft"]))
    comparable = [one for one in known if facts["compared"].get(one[2]) is not None]
    if not comparable:
        was_measured = any(promotion["on"] is not None for promotion in promotions)
        return "undecided" if was_measured else "first"
    stands_for_best = max(comparable)
    behind = max(known)[0] - stands_for_best[0]
    gain = facts["compared"][stands_for_best[2]]
    if gain["prompts"] < facts["least_prompts"]:
        return "undecided"
    if gain["low"] == gain["high"] and not gain["same"]:
        return "undecided"
    if gain["low"] - behind >= -facts["margin"]:
        return "non_inferior"
    return "worse" if gain["high"] - behind < -facts["margin"] else "undecided"


def _find_strength(on: Mapping[str, Any] | None, earlier: Sequence[tuple[float, int, str]]) -> float:
    """Return how good a draft is known to be, from its own promotion; 0 is the first one."""
    best = max((strength for strength, _, _ in earlier), default=0.0)
    if on is None or on["difference"] is None:
        return best
    return next((strength + on["difference"] for strength, _, draft in earlier if draft == on["reference"]), best)
