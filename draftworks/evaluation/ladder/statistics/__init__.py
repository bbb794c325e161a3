"""All statistics of acceptance: intervals, p-values, Holm's correction, Student's t. No torch.

The distribution of Student is the only thing that scipy would be needed for, at 35 MB (110 MB unpacked) and a version more
to keep: it is integrated here.
"""

from draftworks.evaluation.ladder.statistics.acceptance import (
    AcceptanceRatio,
    AcceptanceSummary,
    PairedDifference,
    bootstrap_interval,
    examine_paired,
    examine_unpaired,
    paired_difference,
    select_measured,
    subtract_paired,
    summarize_acceptance,
    unpaired_difference,
)
from draftworks.evaluation.ladder.statistics.blocks import find_block_interval
from draftworks.evaluation.ladder.statistics.holm import adjust_by_holm
from draftworks.evaluation.ladder.statistics.intervals import Tested, find_interval
from draftworks.evaluation.ladder.statistics.resampling import DEFAULT_RESAMPLING, Interval, Resampling
from draftworks.evaluation.ladder.statistics.student import compute_student_quantile

__all__ = [
    "DEFAULT_RESAMPLING",
    "AcceptanceRatio",
    "AcceptanceSummary",
    "Interval",
    "PairedDifference",
    "Resampling",
    "Tested",
    "adjust_by_holm",
    "bootstrap_interval",
    "compute_student_quantile",
    "examine_paired",
    "examine_unpaired",
    "find_block_interval",
    "find_interval",
    "paired_difference",
    "select_measured",
    "subtract_paired",
    "summarize_acceptance",
    "unpaired_difference",
]
