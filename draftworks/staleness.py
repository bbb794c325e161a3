"""Which reports of a target were made from something else than what is there now. Torch-free, reads records only.

Dagster's own staleness is not transitive and is never shown for many targets at once, so this compares the
identities that results carry, at any number of targets.
"""

from __future__ import annotations

from dataclasses import dataclass

from draftworks.artifacts import Artifact, ArtifactStore
from draftworks.identity import digest
from draftworks.registry import HELDOUT
from draftworks.runs import TargetFiles
from draftworks.specs import TargetSpec


@dataclass(frozen=True)
class Subject:
    """What an evaluation of a target would measure now.

    Attributes:
        files: the target itself.
        drafts: the newest of each strategy that has one.
        responses: the newest of each eval set; None where it was never made.
        sources: content digests of the files behind the named eval sets.
    """

    files: TargetFiles
    drafts: dict[str, Artifact]
    responses: dict[str, Artifact | None]
    sources: dict[str, str]

    @property
    def identity(self) -> str:
        """Equal for two evaluations that would come to the same."""
        made = [
            {name: _version(artifact) for name, artifact in group.items()} for group in (self.drafts, self.responses)
        ]
        return digest([self.files.digest, self.files.tokenizer_digest, self.sources, made])

    def changes(self, artifacts: ArtifactStore) -> list[str]:
        """What is not as it was for the newest reports, in words; empty when every report is of what is there."""
        found: list[str] = []
        for name in self.responses:
            found += self._changes_of_eval_set(name, artifacts)
        for strategy, draft in self.drafts.items():
            report = artifacts.find(f"{strategy}_report", self.files.name)
            if report is None or report.identity["draft"] != draft.data_version:
                found.append(f"{strategy} draft")
        return list(dict.fromkeys(found))

    def _changes_of_eval_set(self, name: str, artifacts: ArtifactStore) -> list[str]:
        # Records of an earlier version lack some keys: what they were made from is then another thing, as it should be.
        target, found = self.files.name, []
        features = artifacts.find(f"{name}_eval_features", target)
        if features is not None and features.identity.get("target") != self.files.digest:
            found.append("weights of the target")
        if features is not None and features.identity.get("tokenizer") != self.files.tokenizer_digest:
            found.append("tokenizer or chat template")
        versions = [_version(self.responses[name]), _version(features)]
        reports = [artifacts.find(f"{strategy}_report", target) for strategy in self.drafts]
        if any(report is not None and _measured_on(report, name) != versions for report in reports):
            found.append(f"eval set {name}")
        prepared = artifacts.find(f"{name}_set", target) if name in self.sources else None
        if prepared is not None and prepared.identity.get("dataset") != self.sources[name]:
            found.append(f"eval set {name}")
        return found


def published_drafts(artifacts: ArtifactStore, target: TargetSpec) -> dict[str, Artifact]:
    """The newest draft of every strategy that the target uses, where there is one."""
    found = {strategy: artifacts.find(f"{strategy}_draft", target.name) for strategy in target.strategies}
    return {strategy: draft for strategy, draft in found.items() if draft is not None}


def _version(artifact: Artifact | None) -> str | None:
    return None if artifact is None else artifact.data_version


def _measured_on(report: Artifact, name: str) -> list[str] | None:
    """Versions of the responses and features of an eval set that a report is of."""
    return report.identity["heldout"] if name == HELDOUT else report.identity.get("evals", {}).get(name)
