"""Drafts with all that a bundle tells: slices, what costs nothing, licences; records only, never loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
from service_site import ServiceSite

from draftworks.bundle.description import BundleSubject
from draftworks.evaluation.ladder.measurement import DraftMeasurement
from draftworks.evaluation.report.report import Report
from draftworks.evaluation.report.summary import SLICES
from draftworks.evaluation.report.tables import build_slices_table, publish_table

FREE = "lookup"
FREE_ACCEPTS = 0.5
CARD = "---\nlicense: apache-2.0\n---\n# A model\n"


@dataclass(frozen=True)
class BundleSite(ServiceSite):
    """The prompts of even number are of the topic `code`, the others of `chat`; `lookup` costs nothing."""

    def __post_init__(self) -> None:
        super().__post_init__()
        (self.registry / "datasets" / "none.yaml").write_text("files: [none.jsonl]\nlicence: CC-BY-4.0\n")
        (self.registry / "models" / "small" / "README.md").write_text(CARD)

    def measure_drafts(self, mean: float, prompts: int, weights: str) -> dict[str, DraftMeasurement]:
        free = tuple(self.make_walk(index, FREE_ACCEPTS, "free") for index in range(prompts))
        return super().measure_drafts(mean, prompts, weights) | {FREE: DraftMeasurement(None, walk=free)}

    def publish_more(self, folder: Path, report: Report) -> None:
        ids = [prompt.sample_id for prompt in report.drafts["trained"].walk]
        topics = ["code" if int(name[1:]) % 2 == 0 else "chat" for name in ids]
        columns = pd.DataFrame({"topic": topics}, index=pd.Index(ids, name="sample_id"))
        publish_table(folder / SLICES, build_slices_table(replace(report, columns=columns).walk_slices))

    def find_subject(self) -> BundleSubject:
        """The draft in service."""
        service = self.open()
        return service.find_subject(service.register.require().draft)
