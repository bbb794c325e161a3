"""The walks of two saved reports, prompt by prompt, on the prompts that are the same in both. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from draftworks.config.run_files import TOKENS_FOLDER
from draftworks.data.tokenized import TokenizedSet
from draftworks.errors import StoreError
from draftworks.evaluation.ladder.positions import PromptsByPosition
from draftworks.evaluation.ladder.prompt_acceptance import PromptAcceptance
from draftworks.evaluation.ladder.statistics import Resampling
from draftworks.evaluation.report.findings import WALK
from draftworks.evaluation.report.summary import REPORT, TRAINED, read_report, report_file_errors, require_prompts_file
from draftworks.evaluation.report.tables import PromptsByRung, read_prompts, select_walk_by_position
from draftworks.storage.artifacts import Artifact, ArtifactStore
from draftworks.storage.names import of_eval_set
from draftworks.storage.records import ReportIdentity
from draftworks.targets.registry import HELDOUT


@dataclass(frozen=True)
class MeasuredWalk:
    """The parts of a saved report that are compared with another one.

    Attributes:
        prompts: walk of the trained draft; empty if it was not measured.
        draft_tokens: tokens proposed per pass.
        answers: content version of the eval data; None if the report does not name it.
        tokens: eval data of the walk; None if it is not there any more.
        by_position: the walk in every range of places in the text; empty in a report from before there were any.
    """

    prompts: tuple[PromptAcceptance, ...]
    draft_tokens: int
    resampling: Resampling
    answers: str | None = None
    tokens: TokenizedSet | None = None
    by_position: PromptsByPosition = field(default_factory=dict)

    @classmethod
    def of(cls, artifacts: ArtifactStore, report: Artifact, eval_set: str) -> MeasuredWalk:
        """Read them from a saved report, with its eval data.

        Raises:
            StoreError: the report or its eval data is missing or damaged.
        """
        return cls.read(report.path / eval_set, _find_eval_tokens(artifacts, report, eval_set))

    @classmethod
    def read(cls, folder: Path, tokens: Path | None) -> MeasuredWalk:
        """Read them from the folder of a report on one eval set.

        Args:
            tokens: folder of the eval data, if that is there.

        Raises:
            StoreError: a file of the report or of the eval data is missing or damaged.
        """
        values = read_report(folder)
        with report_file_errors(folder / REPORT):
            draft_tokens, resampling = values["draft_tokens"], Resampling(**values["resampling"])
            answers = values["provenance"].get("eval_tokens")
        opened = None if tokens is None else TokenizedSet.open(tokens)
        prompts = _read_prompts(folder)
        return cls(
            prompts.get((TRAINED, WALK), ()),
            draft_tokens,
            resampling,
            answers if opened is None else opened.digest,
            opened,
            select_walk_by_position(prompts, TRAINED),
        )


@dataclass(frozen=True)
class WalkPair:
    """Two walks on the prompts whose tokens are the same in both reports.

    Attributes:
        new, old: the prompts of each; those without a pass in one of them are in no comparison.
        shared: ids of the prompts that have a pass in both.
    """

    new: tuple[PromptAcceptance, ...]
    old: tuple[PromptAcceptance, ...]

    @property
    def shared(self) -> frozenset[str]:
        return frozenset(_ids_with_a_pass(self.new) & _ids_with_a_pass(self.old))


def pair_walks(new: MeasuredWalk, old: MeasuredWalk) -> WalkPair:
    """Return both walks on the prompts with the same tokens and loss mask.

    Where the eval data of one is gone, the prompts are the same if both name the same version of it, else none is.
    """
    if new.tokens is not None and old.tokens is not None:
        same = find_identical_samples(new.tokens, old.tokens)
    elif new.answers is not None and new.answers == old.answers:
        same = {prompt.sample_id for prompt in new.prompts}
    else:
        same = set[str]()
    kept = [tuple(prompt for prompt in one.prompts if prompt.sample_id in same) for one in (new, old)]
    return WalkPair(*kept)


def read_walk(folder: Path) -> tuple[PromptAcceptance, ...]:
    """Return the walk of the trained draft in a saved report, prompt by prompt; empty if it was not measured.

    Raises:
        StoreError: missing, damaged, altered, or of another schema.
    """
    return _read_prompts(folder).get((TRAINED, WALK), ())


def _read_prompts(folder: Path) -> PromptsByRung:
    path = require_prompts_file(folder)
    with report_file_errors(path):
        return read_prompts(path)


def find_identical_samples(left: TokenizedSet, right: TokenizedSet) -> set[str]:
    """Return the ids of the samples that have the same tokens and the same loss mask in both sets."""
    rows = {row.sample_id: row for row in left}
    return {
        row.sample_id
        for row in right
        if (twin := rows.get(row.sample_id)) is not None
        and np.array_equal(row.input_ids, twin.input_ids)
        and np.array_equal(row.loss_mask, twin.loss_mask)
    }


def _find_eval_tokens(artifacts: ArtifactStore, report: Artifact, eval_set: str) -> Path:
    """Return the tokenized answers that a report was measured on, which need not be the newest ones."""
    identity, asset = ReportIdentity.of(report), of_eval_set(eval_set).responses
    measured = identity.heldout if eval_set == HELDOUT else identity.evals.get(eval_set)
    wanted = None if measured is None else measured.answers
    for responses in artifacts.list_all(asset, report.target):
        if responses.data_version == wanted:
            return responses.path / TOKENS_FOLDER
    raise StoreError(f"{report.path}: the {asset} {wanted} that it was measured on are not there any more")


def _ids_with_a_pass(prompts: Sequence[PromptAcceptance]) -> set[str]:
    return {prompt.sample_id for prompt in prompts if prompt.passes}
