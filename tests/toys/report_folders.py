"""Reports of drafts as results that lie in a folder: written, never measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from draftworks.data.tokenized import TokenRow, write_tokens
from draftworks.evaluation.ladder.measurement import DraftMeasurement
from draftworks.evaluation.ladder.prompt_acceptance import PromptAcceptance
from draftworks.evaluation.ladder.statistics import Resampling
from draftworks.evaluation.report.report import Report
from draftworks.evaluation.report.writing import save_report
from draftworks.evaluation.result import EvalResult
from draftworks.storage.artifacts import Artifact, ArtifactStore, BuildResult

TARGET, ASSET = "small", "eagle3_report"
ACCURACY = EvalResult(30.0, 10.0, 40, {"acc_corrects": (8.0, 4.0), "acc_denoms": (10.0, 8.0)})


@dataclass(frozen=True)
class ReportFolders:
    """What is published for the target `small`."""

    var: Path

    @property
    def artifacts(self) -> ArtifactStore:
        return ArtifactStore(self.var)

    def publish_answers(self, samples: Mapping[str, Sequence[int]], masked: int = 0) -> str:
        """Held-out answers by sample id, their first `masked` tokens not supervised; returns their version."""
        rows = [TokenRow(name, np.array(ids, np.int32), np.arange(len(ids)) >= masked) for name, ids in samples.items()]

        def build(out: Path) -> BuildResult:
            return BuildResult(write_tokens(out / "tokens", rows)["digest"])

        identity = {"samples": {name: list(ids) for name, ids in samples.items()}, "masked": masked}
        return self.artifacts.obtain("heldout_responses", TARGET, identity, build).data_version

    def publish_report(
        self,
        draft: str,
        answers: str,
        accepted: Mapping[str, list[int]],
        draft_tokens: int = 3,
        by_position: Mapping[int, Mapping[str, list[int]]] | None = None,
        lookup: Mapping[str, list[int]] | None = None,
        tasks: Mapping[str, str] | None = None,
    ) -> Artifact:
        """A report of a draft, by the draft tokens that each pass of the walk accepted on each prompt; none is no walk.

        Args:
            lookup: the same of prompt lookup; None is a report from before it was measured.
            tasks: by sample id, to slice by.
        """
        ranges = {begin: _acceptance(found) for begin, found in (by_position or {}).items()}
        trained = DraftMeasurement(ACCURACY, walk=_acceptance(accepted), walk_by_position=ranges)
        measured = {"trained": trained, "untrained": DraftMeasurement(ACCURACY)}
        if lookup is not None:
            measured["lookup"] = DraftMeasurement(None, walk=_acceptance(lookup))
        columns = None if tasks is None else pd.DataFrame({"task": tasks})

        def build(out: Path) -> BuildResult:
            report = Report(
                *(TARGET, "eagle3", "heldout", measured, draft_tokens),
                columns=columns,
                resampling=Resampling(resamples=200),
            )
            save_report(report, out / "heldout")
            scores = {name: one.metrics() for name, one in measured.items()}
            return BuildResult(
                f"of {draft}", {"drafts": scores, "draft_tokens": draft_tokens, "evals": {"heldout": {}}}
            )

        identity = {"draft": draft, "heldout": [answers, "features"]}
        return self.artifacts.obtain(ASSET, TARGET, identity, build)


def _acceptance(accepted: Mapping[str, list[int]]) -> tuple[PromptAcceptance, ...]:
    return tuple(
        PromptAcceptance.from_accepted_counts(name, found, sum(found) + len(found)) for name, found in accepted.items()
    )
