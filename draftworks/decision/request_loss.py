"""What served requests lost since the first hours of the draft in service, as one more loss that is decided about."""

from __future__ import annotations

from dataclasses import dataclass

from draftworks.decision.record import Reference
from draftworks.decision.rule import LossEvidence, subtract_figures
from draftworks.production.served_logs import read_served_logs
from draftworks.service.promotion import Service
from draftworks.storage.words import list_names

SERVED_REQUESTS = "served requests"
"""Stands where the name of an eval set does; no eval set can have it."""


@dataclass(frozen=True)
class RequestLoss:
    """The loss by logged requests.

    Attributes:
        facts: what a decision was about: the slices that fell and how all requests changed, not the figures, which every
            request changes.
    """

    evidence: LossEvidence
    facts: tuple[str, ...]


def find_request_loss(service: Service, draft: str) -> RequestLoss | None:
    """Return the loss of the draft in service, by its digest; None where the entry does not ask for it.

    As long as there is nothing to compare with, nothing can be lost.

    Raises:
        DataError, StoreError: a log cannot be read, or a record is damaged.
    """
    requests = service.target.observation.requests
    if requests is None or not requests.decide:
        return None
    logs = read_served_logs(service.target, service.registry.root, service.artifacts, service.strategy)
    found = next((each for each in logs.standings if each.draft == draft), None)
    if found is None:
        return _find_nothing("no request of the draft in service is logged")
    whole = found.slices[0]
    if not found.baseline_over:
        return _find_nothing("the first hours of the draft in service are not over")
    first, now = whole.first, whole.now
    if first is None or now is None or first.interval is None or now.interval is None:
        return _find_nothing("too few requests in the first hours, or in the last ones")
    fallen = [each.name for each in found.fallen]
    evidence = LossEvidence(
        SERVED_REQUESTS,
        Reference.FIRST_HOURS,
        reference_draft=draft,
        value=now.value,
        reference_value=first.value,
        loss=subtract_figures(first.value, first.interval, now.value, now.interval),
        prompts=now.count,
        reference_prompts=first.count,
        reason=f"fell: {list_names(fallen)}" if fallen else "",
    )
    return RequestLoss(evidence, (whole.verdict, *fallen))


def _find_nothing(reason: str) -> RequestLoss:
    return RequestLoss(LossEvidence(SERVED_REQUESTS, Reference.NONE, reason=reason, is_new=True), ())
