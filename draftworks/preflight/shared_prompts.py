"""Prompts that come more than once: in the rows of one data set, and in what is trained on and an eval set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice

from draftworks.config.registry_files import DatasetSpec, TargetSpec
from draftworks.data.conversations import Conversation
from draftworks.data.sources import SERVED
from draftworks.data.split import is_held_out
from draftworks.data.token_rows import TokenRow
from draftworks.preflight.findings import Findings
from draftworks.preflight.sample_rows import Sample, read_usable
from draftworks.targets.registry import Registry

MOST_ROWS = 20_000
"""Rows of a data set that are read for this; of served prompts, those of the sample."""
LARGEST_SHARE = 0.05
"""Share of the rows that may have one prompt before a warning: whole prompts are held out, or none of their rows."""


def check_prompts(target: TargetSpec, samples: Mapping[str, Sample], registry: Registry, findings: Findings) -> None:
    """Report training rows that share a prompt, and prompts of eval sets that are trained on.

    Args:
        samples: by the name of the data set, of all that are trained on or measured on.
    """
    trained = _Prompts()
    for name in target.training_datasets:
        trained.add(registry.load_dataset(name), samples[name], registry)
    _report_shared(f"target {target.name}: data set {' + '.join(target.training_datasets)}", trained, findings)
    for name in target.evals:
        spec = registry.load_eval_set(name)
        if spec.part == "held_out":
            continue
        measured = _Prompts()
        measured.add(registry.load_dataset(spec.dataset), samples[spec.dataset], registry)
        both = measured.rows.keys() & trained.rows.keys()
        learnt = sum(not is_held_out(key, target.data.held_out_share) for key in both)
        if learnt:
            findings.warning(
                f"target {target.name}: eval set {name}: {learnt:,} of {len(measured.rows):,} prompts are trained on too, so it "
                "measures what was learnt by heart. Take them out, or set its part: held_out"
            )


@dataclass
class _Prompts:
    """Distinct rows by the key of their prompt, and an example of each; `whole` if these are all rows that there are."""

    rows: Counter[str] = field(default_factory=Counter)
    shown: dict[str, str] = field(default_factory=dict)
    whole: bool = True
    _ids: set[str] = field(default_factory=set)

    def add(self, dataset: DatasetSpec, sample: Sample, registry: Registry) -> None:
        known = sample.whole or dataset.format == SERVED  # a hook that redacts these may cost more than reading
        rows = sample.items if known else read_usable(dataset, registry.root, sample.kind)
        read = 0
        for read, row in enumerate(islice(rows, MOST_ROWS), start=1):  # noqa: B007
            if row.id not in self._ids:
                self._ids.add(row.id)
                self.rows[row.prompt_key] += 1
                self.shown.setdefault(row.prompt_key, "" if dataset.format == SERVED else f", {_show(row)!r}")
        self.whole = self.whole and (sample.whole or (not known and not sample.skipped and read < MOST_ROWS))


def _show(row: Conversation | TokenRow) -> str:
    """Return the beginning of a prompt; of token rows, their first ids."""
    if isinstance(row, TokenRow):
        return " ".join(map(str, row.input_ids[:8]))
    asked = next((turn.content for turn in row.turns if turn.role == "user"), "")
    return asked[:40]


def _report_shared(where: str, found: _Prompts, findings: Findings) -> None:
    total, shared = found.rows.total(), sum(count for count in found.rows.values() if count > 1)
    if not shared:
        return
    rows = f"{total:,} rows" if found.whole else f"first {total:,} rows"
    findings.note(
        f"{where}: {shared:,} of its {rows} share a prompt (system and first user turn) with another one, and are trained on "
        f"or held out with it: {len(found.rows):,} prompts"
    )
    key, most = found.rows.most_common(1)[0]
    if most > LARGEST_SHARE * total:
        findings.warning(
            f"{where}: {most:,} of its {rows} have one prompt ({most / total:.0%}){found.shown[key]}: all are trained on, or all "
            "held out. Take some out, or let the first user turn differ"
        )
