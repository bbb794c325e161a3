"""What came of an evaluation, for people and for programs: JSON, a table in Parquet, markdown, a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftworks.errors import StoreError
from draftworks.evaluation.plots import acceptance_plot
from draftworks.evaluation.result import EvalResult
from draftworks.publishing import publish_json, published

if TYPE_CHECKING:
    import pandas as pd

SCHEMA_VERSION = 1
REPORT, TABLE, MARKDOWN, PLOT = "report.json", "report.parquet", "report.md", "acceptance.png"
METRIC, RUNG = "simulated_acc_len", 1
RUNG_NOTE = (
    "Rung 1 of the acceptance ladder: `simulated_acc_len` = a1 + a1 a2 + a1 a2 a3 + ..., where a_i (rung 0) is the "
    "teacher-forced accuracy at draft position i. It counts draft tokens only and takes positions as independent."
)


@dataclass(frozen=True)
class Report:
    """The results of several drafts on one eval set of one target, best known first.

    Attributes:
        drafts: results by name, e.g. trained, untrained, bigram.
        provenance: digests and settings worth knowing.
    """

    target: str
    strategy: str
    eval_set: str
    drafts: Mapping[str, EvalResult]
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def table(self) -> pd.DataFrame:
        """One row per draft: what was measured, on which rung, then the accuracy at each position (acc_1 ...)."""
        import pandas as pd

        return pd.DataFrame([self._row(name, result) for name, result in self.drafts.items()])

    def markdown(self) -> str:
        """The table as a person reads it, and what its numbers mean."""
        shown = self.table().drop(columns=["target", "strategy", "eval_set", "metric", "rung"])
        shown = shown.rename(columns={"value": f"{METRIC} (rung {RUNG})", "avg_loss": "loss"})
        shown["loss"] = [f"{loss:.3f}" if loss is not None and loss == loss else "" for loss in shown["loss"]]
        text = shown.to_markdown(index=False, floatfmt=".3f", intfmt=",")
        title = f"**{self.strategy}** draft of **{self.target}** on `{self.eval_set}`"
        return f"{title}\n\n{text}\n\n{RUNG_NOTE}\n"

    def plot(self) -> bytes:
        """Accuracy per position of every draft, PNG."""
        return acceptance_plot(self.drafts, f"{self.strategy} draft of {self.target}, {self.eval_set}")

    def save(self, folder: Path) -> None:
        """Write all forms into `folder`, each atomically, report.json last."""
        folder.mkdir(parents=True, exist_ok=True)
        with published(folder / TABLE) as staging:
            self.table().to_parquet(staging, index=False)
        with published(folder / MARKDOWN) as staging:
            staging.write_text(self.markdown(), encoding="utf-8")
        with published(folder / PLOT) as staging:
            staging.write_bytes(self.plot())
        publish_json(folder / REPORT, self.to_json())

    def to_json(self) -> dict[str, Any]:
        drafts = {
            name: {"result": result.to_json(), "metrics": result.metrics()} for name, result in self.drafts.items()
        }
        return {
            "schema_version": SCHEMA_VERSION,
            "target": self.target,
            "strategy": self.strategy,
            "eval_set": self.eval_set,
            "metric": METRIC,
            "rung": RUNG,
            "drafts": drafts,
            "provenance": dict(self.provenance),
        }

    @classmethod
    def load(cls, folder: Path) -> Report:
        """Read report.json.

        Raises:
            StoreError: missing, damaged, or of another schema.
        """
        path = folder / REPORT
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            if values["schema_version"] != SCHEMA_VERSION:
                raise StoreError(f"{path}: schema {values['schema_version']}, expected {SCHEMA_VERSION}")
            drafts = {name: EvalResult.from_json(draft["result"]) for name, draft in values["drafts"].items()}
            return cls(values["target"], values["strategy"], values["eval_set"], drafts, values["provenance"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{path}: not an evaluation report ({error!r}). Evaluate the draft again") from error

    def _row(self, name: str, result: EvalResult) -> dict[str, Any]:
        return {
            "target": self.target,
            "strategy": self.strategy,
            "eval_set": self.eval_set,
            "draft": name,
            "metric": METRIC,
            "rung": RUNG,
            "value": result.simulated_acc_len,
            "avg_loss": result.avg_loss,
            "supervised_tokens": result.supervised_tokens,
            **{f"acc_{i}": accuracy for i, accuracy in enumerate(result.per_position_acc, start=1)},
        }
