"""The main score of a report, for the choice of the best."""

from __future__ import annotations

from draftworks.errors import DraftworksError
from draftworks.evaluation.report.summary import TRAINED, ReportSummary
from draftworks.retention.stored_results import StoredResult
from draftworks.targets.registry import HELDOUT

_WALK_RUNG, _SIMULATED_RUNG = 3, 1


def read_score(report: StoredResult) -> float | None:
    """Return the walk (rung 3) of a report, or simulated_acc_len if it has none; None if it cannot be read."""
    try:
        summary = ReportSummary.load(report.path / HELDOUT)
    except DraftworksError:
        return None
    for rung in (_WALK_RUNG, _SIMULATED_RUNG):
        values = [each.value for each in summary.select_scores(TRAINED, rung) if each.value is not None]
        if values:
            return values[0]
    return None
