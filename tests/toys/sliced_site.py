"""Reports of drafts on prompts of several languages, as records: promoted, measured again, trained with weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from service_site import ACCURACY, ServiceSite

from draftworks.data.conversations import Conversation, Turn, write_conversations
from draftworks.data.slices import WEIGHTS_FILE, SlicePlan, save_plan
from draftworks.data.tokenized import TokenRow, write_tokens
from draftworks.evaluation.ladder.measurement import DraftMeasurement
from draftworks.evaluation.ladder.prompt_acceptance import PromptAcceptance
from draftworks.evaluation.ladder.statistics import Resampling
from draftworks.evaluation.report.report import Report
from draftworks.evaluation.report.summary import PROMPTS, REPORT
from draftworks.evaluation.report.tables import build_prompts_table, publish_table
from draftworks.storage.artifacts import Artifact, BuildResult, FileManifest
from draftworks.storage.files import publish_json

PROMPTS_PER_LANGUAGE = 60
TARGET = "small"


def publish_sliced_report(
    site: ServiceSite, draft: Artifact, accepted: Mapping[str, float], first: int = 0
) -> Artifact:
    """A report of a draft that accepts so many tokens per pass by language; prompts are numbered from `first`."""
    names = {f"{language}{first + n}": language for language in accepted for n in range(PROMPTS_PER_LANGUAGE)}
    ids, mask = np.arange(5, dtype=np.int32), np.ones(5, bool)
    rows = [TokenRow(name, ids, mask, {"language": language, "topic": "any"}) for name, language in names.items()]
    answers = site.artifacts.obtain(
        "heldout_responses",
        TARGET,
        {"first": first, "languages": sorted(accepted)},
        lambda out: BuildResult(write_tokens(out / "tokens", rows)["digest"]),
    )

    def build(out: Path) -> BuildResult:
        walk = tuple(_walk(name, accepted[language]) for name, language in names.items())
        drafts = {"trained": DraftMeasurement(ACCURACY, walk=walk)}
        report = Report(TARGET, site.strategy, "heldout", drafts, draft_tokens=5, resampling=Resampling(resamples=100))
        (out / "heldout").mkdir()
        publish_table(out / "heldout" / PROMPTS, build_prompts_table(drafts))
        files = FileManifest.record(out / "heldout", (PROMPTS,)).digests
        publish_json(out / "heldout" / REPORT, {**report.to_json(), "files": files})
        return BuildResult(f"of {draft.path.name}")

    identity: dict[str, Any] = {
        "draft": draft.data_version,
        "draft_identity": draft.path.name,
        "heldout": [answers.data_version, "features"],
        "evals": {},
        "values": dict(accepted),
    }
    return site.artifacts.obtain(f"{site.strategy}_report", TARGET, identity, build)


def publish_weighted_draft(site: ServiceSite, name: str, plan: SlicePlan) -> Artifact:
    """A draft whose training tokens were made from conversations that were chosen by a plan."""

    def prepare(out: Path) -> BuildResult:
        turns = [Turn("user", f"question of {name}"), Turn("assistant", "")]
        save_plan(out / WEIGHTS_FILE, plan)
        return BuildResult(write_conversations(out / "train", [Conversation.of(turns)])["digest"])

    def publish(asset: str, identity: dict[str, Any], version: str) -> Artifact:
        return site.artifacts.obtain(asset, TARGET, identity, lambda out: BuildResult(version))

    prepared = site.artifacts.obtain("conversations", TARGET, {"for": name}, prepare)
    publish("responses", {"conversations": prepared.data_version}, f"answers of {name}")
    publish("tokenized_train", {"responses": f"answers of {name}"}, f"tokens of {name}")
    identity = {"name": name, "target": site.open().files.digest, "tokens": f"tokens of {name}"}
    return publish(f"{site.strategy}_draft", identity, f"weights of {name}")


def _walk(sample: str, mean: float) -> PromptAcceptance:
    total = round(mean * 20)
    accepted = [total // 20 + (place < total % 20) for place in range(20)]
    return PromptAcceptance.from_accepted_counts(sample, accepted, total + 20)
