"""Staleness of reports: changes of target, eval data or draft since the newest report. Torch-free, reads records only.

Dagster's own staleness is not transitive and is not shown for many targets at once, so this module compares the
identities of results.
"""

from __future__ import annotations

from dataclasses import dataclass

from draftworks.config.registry_files import TargetSpec
from draftworks.config.run_files import TargetFiles
from draftworks.storage.artifacts import Artifact, ArtifactStore
from draftworks.storage.identity import digest
from draftworks.storage.names import of_eval_set, of_strategy
from draftworks.storage.records import ConversationsIdentity, EvalFeaturesIdentity, EvalSetIdentity, ReportIdentity
from draftworks.targets.registry import HELDOUT


@dataclass(frozen=True)
class Subject:
    """What an evaluation of a target would measure now.

    Attributes:
        files: the target itself.
        drafts: the newest of each strategy that has one.
        responses: the newest of each eval set; None where it was never made.
        sources: by eval set, what its conversations would be made from; those of a set that is not looked at are left out.
    """

    files: TargetFiles
    drafts: dict[str, Artifact]
    responses: dict[str, Artifact | None]
    sources: dict[str, ConversationsIdentity | EvalSetIdentity]

    @property
    def identity(self) -> str:
        """Digest that is equal for two evaluations with equal results."""
        drafts = {name: [draft.data_version, draft.path.name] for name, draft in self.drafts.items()}
        made = [drafts, {name: _version(artifact) for name, artifact in self.responses.items()}]
        sources = {name: source.to_json() for name, source in self.sources.items()}
        return digest([self.files.digest, self.files.tokenizer_digest, sources, made])

    def changes(self, artifacts: ArtifactStore) -> list[str]:
        """Return, in words, what has changed since the newest reports; empty if nothing has."""
        found: list[str] = []
        for name in self.responses:
            found += self._changes_of_eval_set(name, artifacts)
        for strategy, draft in self.drafts.items():
            report = artifacts.find(of_strategy(strategy).report, self.files.name)
            if report is None or not _is_of(report, draft):
                found.append(f"{strategy} draft")
        return list(dict.fromkeys(found))

    def _changes_of_eval_set(self, name: str, artifacts: ArtifactStore) -> list[str]:
        # Records of an earlier version lack some keys: what they were made from is then another thing, as it should be.
        target, found = self.files.name, []
        features = artifacts.find(of_eval_set(name).features, target)
        captured = None if features is None else EvalFeaturesIdentity.of(features)
        if captured is not None and captured.target != self.files.digest:
            found.append("weights of the target")
        if captured is not None and captured.tokenizer != self.files.tokenizer_digest:
            found.append("tokenizer or chat template")
        reports = [artifacts.find(of_strategy(strategy).report, target) for strategy in self.drafts]
        if any(report and not is_measured_on(report, name, self.responses[name], features) for report in reports):
            found.append(f"eval set {name}")
        prepared = artifacts.find(of_eval_set(name).conversations, target) if name in self.sources else None
        if prepared is not None and not is_made_from(prepared, self.sources[name]):
            found.append(f"eval set {name}")
        return found


def find_published_drafts(artifacts: ArtifactStore, target: TargetSpec) -> dict[str, Artifact]:
    """The newest draft of every strategy that the target uses, where there is one."""
    found = {strategy: artifacts.find(of_strategy(strategy).draft, target.name) for strategy in target.strategies}
    return {strategy: draft for strategy, draft in found.items() if draft is not None}


def _version(artifact: Artifact | None) -> str | None:
    return None if artifact is None else artifact.data_version


def _is_of(report: Artifact, draft: Artifact) -> bool:
    """Whether a report is of this draft: equal weights are not enough, since drafts with other options may share
    them."""
    of = ReportIdentity.of(report)
    return (of.draft, of.draft_identity) == (draft.data_version, draft.path.name)


def is_made_from(prepared: Artifact, source: ConversationsIdentity | EvalSetIdentity) -> bool:
    """Whether conversations were made from these files with these settings."""
    return type(source).of(prepared) == source


def is_measured_on(report: Artifact, name: str, responses: Artifact | None, features: Artifact | None) -> bool:
    """Whether a report was measured on these answers and on these features, as far as its draft reads them."""
    of = ReportIdentity.of(report)
    measured = of.heldout if name == HELDOUT else of.evals.get(name)
    if measured is None or responses is None or features is None:
        return False
    known, streams = features.summary.get("stream_versions", {}), measured.streams
    return measured.answers == responses.data_version and isinstance(streams, dict) and streams.items() <= known.items()
