"""Facts in plain numbers for an oracle of the rules, made from what a simulated year gave to the product.

An oracle is `tests/toys/decision_oracle.py`, written from docs/how-to/decisions.md and docs/how-to/in-service.md alone. It
calls nothing of the product and has two functions:

    oracle_decide(facts) -> "keep" | "tune" | "retrain" | "undecided"

        {
            "margins": {"tune": 0.05, "retrain": 0.15, "least_prompts": 20},
            "eval_sets": [                      # heldout first
                {
                    "eval_set": "heldout",
                    "reference": "same_prompts" | "both_drafts" | "former_figure" | "none",
                    "is_new": False,            # no draft was measured on it when the reference was put into service
                    "paired": {"difference": -0.10, "low": -0.15, "high": -0.06, "prompts": 150, "same": False} | None,
                                                # draft in service now minus reference, on the prompts of both
                    "former": {"value": 1.9, "low": 1.8, "high": 2.0, "prompts": 150} | None,
                    "now": {"value": 1.7, "low": 1.6, "high": 1.8, "prompts": 200} | None,
                                                # two measurements on other prompts, each with its own 95% interval
                    "tuned": True | False,      # a tune for what has changed is in service, or was refused
                },
            ],
        }

    `paired` is there for the references same_prompts and both_drafts, `former` and `now` for former_figure; the others are
    None. For the reference none all three are.

    oracle_promote(facts) -> "first" | "non_inferior" | "worse" | "undecided"      # of one eval set

        {
            "eval_set": "heldout",
            "margin": 0.03,
            "least_prompts": 20,
            "promotions": [                     # of drafts for the target's present weights, oldest first, each draft once
                {"draft": "d1", "on": None},    # its records have no figures of this eval set
                {"draft": "d2", "on": {"reference": None, "difference": None}},     # figures, but nothing to compare with
                {"draft": "d3", "on": {"reference": "d2", "difference": 0.04}},     # d3 minus d2
            ],
            "compared": {                       # every one of these drafts with the new draft, on the prompts of both
                "d1": None,                     # they have none in common
                "d3": {"difference": 0.02, "low": -0.01, "high": 0.05, "prompts": 150, "same": False},
                                                # new draft minus d3; same: they are one draft
            },
        }

    Of a draft that was promoted again the figures are those of the first time; if only later records have any, it counts as
    measured, with nothing to compare with.

    A digest is a name and nothing else. What the pages leave open about the best draft: a draft with no difference in its
    figures, or none on this eval set, is as good as the best one before it (0 for the first); of equally good drafts the
    newest stands for the best.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from draftworks.evaluation.ladder.prompt_acceptance import PromptAcceptance, micro_mean
from draftworks.evaluation.ladder.statistics import AcceptanceDifference, Resampling, bootstrap_interval
from draftworks.service.register import InService


def describe_promotion(
    eval_set: str,
    margin: float,
    least_prompts: int,
    history: Iterable[InService],
    target_digest: str,
    compared: Mapping[str, AcceptanceDifference | None],
    same: Container[str] = (),
) -> dict[str, Any]:
    """Return the facts of `oracle_promote`; `same` are the drafts that the new one is."""
    promotions: dict[str, dict[str, Any]] = {}
    for record in history:
        if record.draft.target_digest != target_digest:
            continue
        on = next((one for one in record.figures if one.eval_set == eval_set), None)
        found = promotions.get(record.draft.digest)
        if found is None:
            figures = None if on is None else {"reference": on.reference, "difference": on.difference}
            promotions[record.draft.digest] = {"draft": record.draft.digest, "on": figures}
        elif found["on"] is None and on is not None:
            found["on"] = {"reference": None, "difference": None}
    return {
        "eval_set": eval_set,
        "margin": margin,
        "least_prompts": least_prompts,
        "promotions": list(promotions.values()),
        "compared": {name: describe_paired(found, name in same) for name, found in compared.items()},
    }


def describe_loss(
    eval_set: str,
    reference: str,
    *,
    paired: AcceptanceDifference | None = None,
    former: Mapping[str, Any] | None = None,
    now: Mapping[str, Any] | None = None,
    is_new: bool = False,
    tuned: bool = False,
    same: bool = False,
) -> dict[str, Any]:
    """Return the facts of one eval set for `oracle_decide`."""
    return {
        "eval_set": eval_set,
        "reference": reference,
        "is_new": is_new,
        "paired": describe_paired(paired, same),
        "former": None if former is None else dict(former),
        "now": None if now is None else dict(now),
        "tuned": tuned,
    }


def describe_decision(
    tune_margin: float, retrain_margin: float, least_prompts: int, eval_sets: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the facts of `oracle_decide`."""
    margins = {"tune": tune_margin, "retrain": retrain_margin, "least_prompts": least_prompts}
    return {"margins": margins, "eval_sets": [dict(each) for each in eval_sets]}


def describe_paired(found: AcceptanceDifference | None, same: bool = False) -> dict[str, Any] | None:
    if found is None:
        return None
    low, high = found.interval.low, found.interval.high
    return {"difference": found.difference, "low": low, "high": high, "prompts": found.prompts, "same": same}


def describe_measurement(walk: Sequence[PromptAcceptance], resampling: Resampling) -> dict[str, Any]:
    """Return the value of a walk with its interval and the prompts that have a pass."""
    value, interval = micro_mean(walk), bootstrap_interval(walk, resampling)
    assert value is not None
    assert interval is not None
    prompts = sum(each.passes > 0 for each in walk)
    return {"value": value, "low": interval.low, "high": interval.high, "prompts": prompts}
