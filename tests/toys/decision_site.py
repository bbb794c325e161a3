"""A registry whose drafts are in service and decided about: reports name the weights that their features are of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from service_site import PROMPT_COUNT, ServiceSite, make_walk

from draftworks.decision.deciding import Decider
from draftworks.decision.record import Decision
from draftworks.evaluation.ladder.prompt_acceptance import PromptAcceptance
from draftworks.storage.artifacts import Artifact, BuildResult
from draftworks.storage.identity import digest
from draftworks.storage.names import of_eval_set
from draftworks.targets.training_data import identify_eval_data

HOUR = {"seconds": 3600.0, "world_size": 2}


@dataclass(frozen=True)
class DecisionSite(ServiceSite):
    """A site whose target has `decision`.

    Attributes:
        spread: by which the prompts differ: half of them accept so much more than the mean, half so much less.
    """

    entry: Mapping[str, Any] = field(default_factory=lambda: {"decision": {}})
    spread: float = 0.0

    def tune(self, name: str, start: Artifact | None = None, **more: Any) -> Artifact:
        """A draft that was trained from the weights of another one, by default of that in service."""
        weights = self.open().register.require().draft.weights if start is None else start.data_version
        return self.publish_draft(name, start_from=weights, **more)

    def complete(self, draft: Artifact, accepted: Mapping[str, float] | float, answers: str = "first") -> str:
        """Report and export of a draft; returns its digest."""
        self.measure(draft, accepted, answers)
        self.publish_export(draft)
        return draft.path.name

    def measure(
        self,
        draft: Artifact,
        accepted: Mapping[str, float] | float,
        answers: str = "first",
        prompts: int = PROMPT_COUNT,
    ) -> Artifact:
        values = accepted if isinstance(accepted, Mapping) else dict.fromkeys(["heldout", *self.evals], accepted)
        return self.publish_report(draft, values, answers, prompts)

    def publish_conversations(self, eval_set: str = "heldout") -> None:
        """The conversations of an eval set, as they would be made of the files and settings of now."""
        service = self.open()
        vocab_size, digests = service.files.vocab_size, service.artifacts.digests
        identity = identify_eval_data(eval_set, service.target, vocab_size, service.registry, digests).to_json()
        built = BuildResult(digest(identity))
        self.artifacts.obtain(of_eval_set(eval_set).conversations, service.target.name, identity, lambda out: built)

    def load_draft(self, digest: str) -> Artifact:
        [found] = [each for each in self.artifacts.list_all("eagle3_draft", "small") if each.path.name == digest]
        return found

    def decide(self) -> Decision:
        return Decider.of(self.open()).decide()

    def name_eval_data(self, eval_set: str, target: str, answers: str) -> list[Any]:
        weights = self.open(target).files.digest
        version = f"{answers} by {weights}"
        identity = {"target": weights, "eval_data": answers}
        built = BuildResult(version, {"stream_versions": {"hf2": version}})
        self.artifacts.obtain(of_eval_set(eval_set).features, target, identity, lambda out: built)
        return [answers, {"hf2": version}]

    def make_walk(self, index: int, mean: float, weights: str) -> PromptAcceptance:
        return make_walk(index, mean + (self.spread if index % 2 else -self.spread), weights)
