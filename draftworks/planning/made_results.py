"""Looks up by identity which results of a plan exist already. Nothing is read but records."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from draftworks.config.capture import CaptureSpec
from draftworks.config.data import ResponseSpec
from draftworks.config.run_files import TargetFiles
from draftworks.config.strategies import resolve_strategy
from draftworks.errors import DraftworksError
from draftworks.fleet.staleness import TrainedDraft
from draftworks.planning.subject import PlanSubject
from draftworks.storage.artifacts import Artifact
from draftworks.storage.identity import DigestNotCached, digest
from draftworks.storage.names import (
    FP8_GATE,
    RESPONSES,
    TOKENIZED_TRAIN,
    TRAINING_FEATURES,
    of_eval_set,
    of_strategy,
)
from draftworks.storage.records import (
    AnswersIdentity,
    DraftIdentity,
    EvalFeaturesIdentity,
    ExportIdentity,
    FeaturesIdentity,
    ReportIdentity,
)
from draftworks.targets.registry import HELDOUT
from draftworks.targets.training_data import identify_conversations, identify_eval_set, make_answers_identity

TRAIN = "train"
"""The part of the prepared conversations that is trained on."""
PLANNED = "planned"
"""In the summary of a feature set whose features stream to the trainer."""


@dataclass(frozen=True)
class Found:
    """What exists of a result.

    Attributes:
        exact: the result itself.
        partial: the largest result that differs in the choice of its data alone, so that this one goes on from it.
    """

    exact: Artifact | None = None
    partial: Artifact | None = None

    def count_samples(self, planned: float) -> float:
        """Return how many of the planned samples exist: data is chosen by hash, so a smaller choice is part of a larger."""
        if self.exact is not None:
            return planned
        return 0.0 if self.partial is None else min(planned, float(self.partial.summary.get("samples", 0)))


def list_taps(subject: PlanSubject) -> list[int]:
    """Return the hf_index of each tap that a capture for the target stores, ascending."""
    taps: set[int] = set()
    for name, entry in subject.target.strategies.items():
        strategy = resolve_strategy(name)
        options = strategy.parse_options(entry.options, where=f"target {subject.target.name}: {name}")
        taps.update(tap.hf_index for tap in strategy.taps(subject.shape.num_layers, options))
    return sorted(taps)


def find_conversations(subject: PlanSubject, name: str = HELDOUT) -> Artifact | None:
    """Return the prepared conversations of the training data and `heldout`, or of a named eval set."""
    return next(iter(_list_prepared(subject, name, same_choice=True)), None)


def find_same_data(subject: PlanSubject, name: str = HELDOUT) -> Artifact | None:
    """Return the newest conversations that were prepared from the same files, whichever of them were chosen."""
    return next(iter(_list_prepared(subject, name, same_choice=False)), None)


def find_answers(subject: PlanSubject, asset: str, part: str, settings: ResponseSpec, name: str = HELDOUT) -> Found:
    """Return what exists of the answers of a part of the conversations.

    Args:
        asset: that holds them; `name` is their eval set, or `heldout` for training data too.
    """
    chosen = find_conversations(subject, name)
    version = "" if chosen is None else chosen.data_version
    alike = _list_answers(subject, asset, part, settings, name)
    exact = next((each for each in alike if AnswersIdentity.of(each).conversations == version), None)
    return Found(exact=exact) if exact is not None else Found(partial=_choose_largest(alike))


def find_tokens(subject: PlanSubject, answers: Found) -> Artifact | None:
    """Return the tokenized training set that was made from answers."""
    if answers.exact is None:
        return None
    version = answers.exact.data_version
    found = subject.list_results(TOKENIZED_TRAIN)
    return next((each for each in found if each.identity.get("responses") == version), None)


def find_features(subject: PlanSubject, tokens: Artifact | None, capture: CaptureSpec) -> Found:
    """Return what exists of the stored training features: of the same answers to the same data, whichever was chosen.

    Those that were streamed are not stored.
    """
    if subject.files is None:
        return Found()
    partial: list[Artifact] = []
    taps, kept = list_taps(subject), capture.to_identity()
    answers = _list_answers(subject, RESPONSES, TRAIN, subject.target.responses, HELDOUT)
    versions = {each.data_version for each in answers}
    tokenized = subject.list_results(TOKENIZED_TRAIN)
    usable = {each.data_version for each in tokenized if each.identity.get("responses") in versions}
    for each in subject.list_results(TRAINING_FEATURES):
        found = FeaturesIdentity.of(each)
        if each.summary.get(PLANNED) or found.target != subject.files.digest or found.capture != kept:
            continue
        if tokens is not None and (found.tokens, found.taps) == (tokens.data_version, taps):
            return Found(exact=each)
        if found.tokens in usable and set(taps) <= set(found.taps or ()):
            partial.append(each)
    return Found(partial=_choose_largest(partial))


def find_planned_features(subject: PlanSubject, tokens: Artifact | None, capture: CaptureSpec) -> Artifact | None:
    """Return the plan of features that are captured while a draft is trained on them."""
    if subject.files is None or tokens is None:
        return None
    wanted = FeaturesIdentity(tokens.data_version, subject.files.digest, list_taps(subject), capture.to_identity())
    found = subject.list_results(TRAINING_FEATURES)
    return next((e for e in found if e.summary.get(PLANNED) and FeaturesIdentity.of(e) == wanted), None)


def find_eval_features(subject: PlanSubject, name: str, answers: Found) -> Artifact | None:
    """Return the captured features of an eval set."""
    if subject.files is None or answers.exact is None:
        return None
    wanted = {
        "eval_data": answers.exact.data_version,
        "target": subject.files.digest,
        "tokenizer": subject.files.tokenizer_digest,
        "capture": digest(subject.target.capture.as_plain().to_identity()),
    }
    streams = {f"hf{tap}" for tap in list_taps(subject)}
    for each in subject.list_results(of_eval_set(name).features):
        found = EvalFeaturesIdentity.of(each)
        known = set(each.summary.get("stream_versions", {}))
        if streams <= known and all(getattr(found, key) == value for key, value in wanted.items()):
            return each
    return None


def find_gate(subject: PlanSubject, storage: str) -> Artifact | None:
    """Return the comparison of fp8 features with plain ones for a storage and the target's weights."""
    if subject.files is None:
        return None
    wanted = (subject.files.digest, storage)
    found = subject.list_results(FP8_GATE)
    return next((e for e in found if (e.identity.get("target"), e.identity.get("storage")) == wanted), None)


def find_draft(
    subject: PlanSubject, strategy: str, tokens: Artifact | None, features: Artifact | None
) -> Artifact | None:
    """Return the draft that a training on these tokens and features would make."""
    if subject.files is None or tokens is None or features is None:
        return None
    versions = features.summary.get("stream_versions", {})
    read = _select_streams(subject, subject.files, strategy, versions)
    if read is None:
        return None
    made_from = (tokens.data_version, digest(read))
    for each in subject.list_results(of_strategy(strategy).draft):
        found = DraftIdentity.of(each)
        if (found.tokens, found.features) == made_from and _is_unchanged(subject, subject.files, each):
            return each
    return None


def find_report(subject: PlanSubject, strategy: str, draft: Artifact | None) -> Artifact | None:
    """Return the report of a draft with the settings of now."""
    if draft is None:
        return None
    target = subject.target
    for each in subject.list_results(of_strategy(strategy).report):
        found = ReportIdentity.of(each)
        evaluation = target.evaluation.to_identity((strategy,))
        same = (found.draft_identity, found.evaluation) == (draft.path.name, evaluation)
        if same and set(found.evals) == set(target.evals):
            return each
    return None


def find_export(subject: PlanSubject, strategy: str, draft: Artifact | None) -> Artifact | None:
    """Return the export of a draft in the formats of now."""
    if draft is None:
        return None
    settings = subject.target.strategies[strategy].export.model_dump()
    for each in subject.list_results(of_strategy(strategy).export):
        found = ExportIdentity.of(each)
        if (found.draft, found.settings) == (draft.path.name, settings):
            return each
    return None


def _select_streams(
    subject: PlanSubject, files: TargetFiles, strategy: str, versions: dict[str, str]
) -> dict[str, str] | None:
    """Return the versions of the streams that a strategy reads; None if one of them was not captured."""
    resolved = resolve_strategy(strategy)
    options = resolved.parse_options(subject.target.strategies[strategy].options, where=strategy)
    names = resolved.list_features(files.num_layers, options)
    return {name: versions[name] for name in names} if set(names) <= versions.keys() else None


def _is_unchanged(subject: PlanSubject, files: TargetFiles, draft: Artifact) -> bool:
    """Whether a training for the target would use now what the draft was trained with."""
    compared = TrainedDraft(draft, subject.target, files, subject.registry, subject.artifacts, subject.digests)
    try:
        return not compared.changes(new_rows=False)
    except (DigestNotCached, DraftworksError):
        return False


def _list_prepared(subject: PlanSubject, name: str, same_choice: bool) -> Iterator[Artifact]:
    """Yield prepared conversations of the same files, newest first."""
    version, remote = subject.find_data_version(name), subject.is_remote(name)
    if version is None and not remote:
        return  # its files were never read
    if name == HELDOUT:
        wanted = identify_conversations(subject.target, version, None)
    else:
        wanted = identify_eval_set(subject.target, subject.registry.load_eval_set(name), version, None)
    for each in subject.list_results(of_eval_set(name).conversations):
        found = type(wanted).of(each)
        same = replace(found, dataset=version, vocab_size=None) == wanted
        if (remote or found.dataset == version) and (same or not same_choice):
            yield each


def _list_answers(subject: PlanSubject, asset: str, part: str, settings: ResponseSpec, name: str) -> list[Artifact]:
    """Return the answers, newest first, to any choice of the conversations of the same files, with the same settings."""
    if subject.files is None:
        return []
    related = {each.data_version for each in _list_prepared(subject, name, same_choice=False)}
    wanted = make_answers_identity(subject.target, subject.files, "", part, settings)
    found = [(each, AnswersIdentity.of(each)) for each in subject.list_results(asset)]
    return [each for each, of in found if of.conversations in related and replace(of, conversations="") == wanted]


def _choose_largest(results: list[Artifact]) -> Artifact | None:
    return max(results, key=lambda each: each.summary.get("samples", 0), default=None)
