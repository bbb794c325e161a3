"""The drafts that `draftworks compare` is given: found by target and strategy, by digest, or by a folder of a report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from draftworks.errors import ConfigError, StoreError
from draftworks.evaluation.report.summary import REPORT, ReportSummary
from draftworks.storage.artifacts import RECORD, UNPUBLISHED, Artifact, ArtifactStore
from draftworks.storage.files import read_json
from draftworks.storage.names import of_strategy, require_name, strategy_of_draft
from draftworks.storage.records import DraftIdentity, ReportIdentity, explain_data_version, read_names
from draftworks.storage.words import list_names, suggest
from draftworks.targets.registry import HELDOUT

_REPORT_SUFFIX, _DRAFT_SUFFIX = "_report", "_draft"
_FORMS = "expected TARGET/STRATEGY, TARGET/STRATEGY/DIGEST, a digest, or the folder of a report"


@dataclass(frozen=True)
class ReportPlace:
    """A saved report of one draft.

    Attributes:
        folders: by eval set, the folder with its report.json.
        artifact: the result that it is; None for a folder that lies outside of a store of results.
        store: where the artifact is.
    """

    folders: Mapping[str, Path]
    artifact: Artifact | None = None
    store: ArtifactStore | None = None

    @cached_property
    def summaries(self) -> dict[str, ReportSummary]:
        """The report on each eval set. Raises StoreError if a file is damaged."""
        return {name: ReportSummary.load(folder) for name, folder in self.folders.items()}

    @property
    def created(self) -> float:
        if self.artifact is not None:
            return self.artifact.created
        return max(summary.created.timestamp() for summary in self.summaries.values())

    @property
    def answers(self) -> frozenset[tuple[str, str]]:
        """Eval sets with the version of their data."""
        if self.artifact is None:
            found = {name: summary.provenance.get("eval_tokens") for name, summary in self.summaries.items()}
        else:
            identity = ReportIdentity.of(self.artifact)
            found = dict[str, str | None]({name: measured.answers for name, measured in identity.evals.items()})
            found[HELDOUT] = None if identity.heldout is None else identity.heldout.answers
        return frozenset((name, version) for name, version in found.items() if version and name in self.folders)


@dataclass(frozen=True)
class ComparedDraft:
    """One of the two drafts of a comparison.

    Attributes:
        given: as the user named it.
        draft: its record; None where only a folder of a report is known.
        reports: newest first.
        store: the results that the draft is one of.
    """

    given: str
    target: str
    strategy: str
    draft: Artifact | None
    reports: tuple[ReportPlace, ...]
    store: ArtifactStore | None = None

    @property
    def made_from(self) -> DraftIdentity | None:
        return None if self.draft is None else DraftIdentity.of(self.draft)

    @property
    def weights_of_target(self) -> str | None:
        """Digest of the target's weights that the draft was trained for; None if it is not known."""
        made_from = self.made_from
        if made_from is not None:
            return made_from.target
        known = (summary.provenance for place in self.reports for summary in place.summaries.values())
        return next((found.get("trained_for_target_digest") for found in known), None)

    @property
    def name(self) -> str:
        digest = "" if self.draft is None else f"/{self.draft.path.name}"
        return f"{self.target}/{self.strategy}{digest}"


@dataclass(frozen=True)
class ReportPair:
    """The report of each draft by which the two are compared; None for a draft without one."""

    a: ReportPlace | None
    b: ReportPlace | None

    @property
    def eval_sets(self) -> tuple[str, ...]:
        """Names of the eval sets of either report, `heldout` first."""
        names = {name for place in (self.a, self.b) if place is not None for name in place.folders}
        return tuple(sorted(names, key=lambda name: (name != HELDOUT, name)))


def find_compared_draft(text: str, artifacts: ArtifactStore) -> ComparedDraft:
    """Return the draft that a user names, with its reports.

    Args:
        text: TARGET/STRATEGY (the newest draft), TARGET/STRATEGY/DIGEST, a digest or its begin, or a folder: of a draft or a
            report among results, or one with `report.json`, or with a folder per eval set.

    Raises:
        ConfigError: no draft is of that name, or several are.
        StoreError: its record is damaged.
    """
    folder = Path(text)
    if folder.is_dir() and (found := _find_in_folder(text, folder)) is not None:
        return found
    parts = text.split("/")
    try:
        names = [require_name(part) for part in parts]
    except ValueError as error:
        raise ConfigError(f"{text}: {_FORMS}, found no such folder, and {error}") from None
    if len(names) == 1:
        return _find_by_digest(text, artifacts)
    if len(names) > 3:
        raise ConfigError(f"{text}: {_FORMS}")
    target, strategy = names[:2]
    asset = of_strategy(strategy).draft
    if len(names) == 2:
        draft = artifacts.find(asset, target)
        if draft is None:
            raise ConfigError(
                f"{text}: target {target} has no {strategy} draft yet; {_suggest_drafts(text, artifacts)}"
            )
        return _of_draft(text, draft, artifacts)
    return _of_draft(text, _choose(text, artifacts.list_all(asset, target), artifacts), artifacts)


def choose_reports(a: ComparedDraft, b: ComparedDraft) -> ReportPair:
    """Return the newest reports on equal eval data; the newest of each draft if no two of them have any in common."""
    pairs = [(left, right) for left in a.reports for right in b.reports if left.answers & right.answers]
    newest = (a.reports[0] if a.reports else None, b.reports[0] if b.reports else None)
    found = max(pairs, key=lambda pair: sorted(one.created for one in pair), default=newest)
    return ReportPair(*found)


def _find_in_folder(text: str, folder: Path) -> ComparedDraft | None:
    """Return the draft of a folder; None if the folder has neither a record of a result nor a report."""
    folder = folder.resolve()
    if (folder / RECORD).is_file():
        return _find_in_result(text, folder)
    if (folder / REPORT).is_file():
        within = folder.parent
        if (within / RECORD).is_file() and _read_asset(within).endswith(_REPORT_SUFFIX):
            whole = _find_in_result(text, within)
            kept = [replace(one, folders={folder.name: folder}) for one in whole.reports if folder.name in one.folders]
            return replace(whole, reports=tuple(kept))
        return _of_loose_reports(text, {ReportSummary.load(folder).eval_set: folder})
    found = _list_eval_sets(folder)
    return _of_loose_reports(text, found) if found else None


def _find_in_result(text: str, folder: Path) -> ComparedDraft:
    asset, artifacts = _read_asset(folder), ArtifactStore(folder.parents[2])
    if folder.parents[1].name == asset:
        found = next((one for one in artifacts.list_all(asset, folder.parent.name) if one.path == folder), None)
        if found is None:
            raise StoreError(f"{folder}: its record cannot be read: {RECORD}")
        if asset.endswith(_DRAFT_SUFFIX):
            return _of_draft(text, found, artifacts)
        if asset.endswith(_REPORT_SUFFIX):
            return _of_report(text, found, artifacts)
    elif asset.endswith(_REPORT_SUFFIX):
        return _of_loose_reports(text, _list_eval_sets(folder))
    raise ConfigError(f"{text}: {_FORMS}, found a folder of {asset}")


def _read_asset(folder: Path) -> str:
    try:
        return str(read_json(folder / RECORD)["asset"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{folder / RECORD}: not the record of a result: {error!r}") from None


def _of_draft(text: str, draft: Artifact, artifacts: ArtifactStore) -> ComparedDraft:
    strategy = strategy_of_draft(draft.asset)
    reports = artifacts.list_all(of_strategy(strategy).report, draft.target)
    of_it = [one for one in reports if _is_report_of(one, draft)]
    return ComparedDraft(text, draft.target, strategy, draft, tuple(_place(one, artifacts) for one in of_it), artifacts)


def _of_report(text: str, report: Artifact, artifacts: ArtifactStore) -> ComparedDraft:
    strategy = report.asset.removesuffix(_REPORT_SUFFIX)
    drafts = artifacts.list_all(of_strategy(strategy).draft, report.target)
    draft = next((one for one in drafts if _is_report_of(report, one)), None)
    return ComparedDraft(text, report.target, strategy, draft, (_place(report, artifacts),), artifacts)


def _is_report_of(report: Artifact, draft: Artifact) -> bool:
    """Whether a report is of a draft: by its identity; early reports name its weights only."""
    identity = ReportIdentity.of(report)
    if identity.draft_identity is None:
        return identity.draft == draft.data_version
    return identity.draft_identity == draft.path.name


def _of_loose_reports(text: str, folders: Mapping[str, Path]) -> ComparedDraft:
    """Return the draft of report folders that are no results here, such as copies of another machine's."""
    place = ReportPlace(folders)
    if not folders:
        raise ConfigError(f"{text}: expected the folder of a report, found none of an eval set in it")
    first = next(iter(place.summaries.values()))
    return ComparedDraft(text, first.target, first.strategy, None, (place,))


def _place(report: Artifact, artifacts: ArtifactStore) -> ReportPlace:
    return ReportPlace(_list_eval_sets(report.path), report, artifacts)


def _list_eval_sets(folder: Path) -> dict[str, Path]:
    return {path.parent.name: path.parent for path in sorted(folder.glob(f"*/{REPORT}"))}


def _find_by_digest(text: str, artifacts: ArtifactStore) -> ComparedDraft:
    return _of_draft(text, _choose(text, list(_iterate_drafts(artifacts)), artifacts), artifacts)


def _iterate_drafts(artifacts: ArtifactStore) -> Iterator[Artifact]:
    for folder in sorted(artifacts.root.glob(f"*{_DRAFT_SUFFIX}/*/")):
        yield from artifacts.list_all(folder.parent.name, folder.name)


def _choose(text: str, known: Sequence[Artifact], artifacts: ArtifactStore) -> Artifact:
    """Return the draft of a digest or its begin, the last part of `text`. Two targets may have drafts of one digest."""
    given = text.split("/")[-1]
    exact = [one for one in known if one.path.name == given]
    found = exact or [one for one in known if one.path.name.startswith(given)]
    if len(found) == 1:
        return found[0]
    if not found:
        hint = explain_data_version(given, read_names(known))
        if hint is not None:
            raise ConfigError(f"{text}: {hint}")
        raise ConfigError(f"{text}: no draft is of that name; {_list_drafts(artifacts)}")
    names = list_names(f"{one.target}/{strategy_of_draft(one.asset)}/{one.path.name}" for one in found)
    raise ConfigError(f"{text}: several drafts are of that name: {names}")


def _suggest_drafts(text: str, artifacts: ArtifactStore) -> str:
    """Return the newest drafts whose TARGET/STRATEGY is close to a text; where none is, the begin of the list."""
    pairs = {
        f"{path.parent.name}/{strategy_of_draft(path.parents[1].name)}"
        for path in artifacts.root.glob(f"*{_DRAFT_SUFFIX}/*/*/")
    }
    return suggest(text, sorted(pairs)) or _list_drafts(artifacts)


def _list_drafts(artifacts: ArtifactStore) -> str:
    """Return the begin of the list of drafts, from the names of folders."""
    found = [
        f"{path.parent.name}/{strategy_of_draft(path.parents[1].name)}/{path.name}"
        for path in sorted(artifacts.root.glob(f"*{_DRAFT_SUFFIX}/*/*/"))
        if path.suffix not in UNPUBLISHED and (path / RECORD).is_file()
    ]
    return f"there are: {list_names(found, 8)}" if found else "there is none at all"
