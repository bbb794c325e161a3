"""A draft with all that decides whether it may be put into service: report, export, serving check. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from draftworks.config.registry_files import TargetSpec
from draftworks.config.run_files import TargetFiles
from draftworks.errors import DraftworksError, StoreError
from draftworks.export.conventions import GATE_MEANINGS
from draftworks.service.register import ServedDraft
from draftworks.storage.artifacts import Artifact, ArtifactStore
from draftworks.storage.names import of_strategy, require_name
from draftworks.storage.records import DraftIdentity, ExportIdentity, ReportIdentity, choose_name, read_names
from draftworks.storage.words import suggest_or_list
from draftworks.targets.registry import HELDOUT


class RefusedError(DraftworksError):
    """A draft may not be put into service. Nothing is changed."""


@dataclass(frozen=True)
class Candidate:
    """A draft that may be put into service, if the rule of promotion accepts it.

    Attributes:
        report: the newest report of it.
        eval_sets: those that it has to be measured on.
    """

    draft: Artifact
    report: Artifact
    served: ServedDraft
    eval_sets: tuple[str, ...]


def find_candidate(
    artifacts: ArtifactStore, target: TargetSpec, files: TargetFiles, strategy: str, digest: str | None = None
) -> Candidate:
    """Return a draft of a target with its report and export, after all checks but the comparison with other drafts.

    Args:
        digest: name of the draft, or its begin; the newest one by default.

    Raises:
        RefusedError: there is no such draft, it is of another target or strategy, or was trained for other weights; it is
            not measured on every eval set, not exported, or an export or the serving check has failed or is missing.
    """
    names = of_strategy(strategy)
    where = f"target {target.name}, {strategy}"
    if strategy not in target.strategies:
        raise RefusedError(
            f"{where}: the target does not use this strategy; {suggest_or_list(strategy, target.strategies)}"
        )
    draft = _find_draft(artifacts, target.name, strategy, digest)
    where = f"{where}, draft {draft.path.name}"
    made_for = DraftIdentity.of(draft).target
    if made_for != files.digest:
        raise RefusedError(
            f"{where}: was trained for the weights {made_for}, the target's are {files.digest}. Train a draft for these: "
            f"draftworks run everything --target {target.name}"
        )
    report = _find_report(artifacts, target, strategy, draft, where)
    export = next(
        (one for one in artifacts.list_all(names.export, target.name) if _is_export_of(one, draft, files)), None
    )
    if export is None:
        raise RefusedError(f"{where}: expected an export of it, found none. {_run(target.name, f'train_{strategy}')}")
    failed = find_failed_gates(export)
    if failed:
        raise RefusedError(f"{where}: gates of its export failed: {'; '.join(failed)}. Export it again")
    damage = export.find_damage(artifacts.digests.of_file)
    if damage is not None:
        raise RefusedError(f"{where}: its export is damaged: {damage}. {_run(target.name, f'train_{strategy}')}")
    _require_served(artifacts, target, strategy, export, where)
    formats = {name: made["digest"] for name, made in export.summary["formats"].items()}
    path = export.path.relative_to(artifacts.root).as_posix()
    served = ServedDraft(
        draft.path.name, path, formats, export.data_version, draft.data_version, files.digest, report.path.name
    )
    return Candidate(draft, report, served, (HELDOUT, *target.evals))


def find_failed_gates(export: Artifact) -> list[str]:
    """Return a description of each gate of an export that failed or was not looked at."""
    made = export.summary["formats"]
    if not made:
        return ["nothing was exported"]
    failed = []
    for name, result in made.items():
        found = {one["name"]: one for one in result["gates"]}
        for gate in GATE_MEANINGS:
            if gate not in found or not found[gate]["passed"]:
                failed.append(f"{name}: {gate}: {found[gate]['description'] if gate in found else 'not checked'}")
    return failed


def _find_draft(artifacts: ArtifactStore, target: str, strategy: str, digest: str | None) -> Artifact:
    asset = of_strategy(strategy).draft
    if digest is None:
        draft = artifacts.find(asset, target)
        if draft is None:
            raise RefusedError(
                f"target {target} has no {strategy} draft yet: run draftworks run everything --target {target}"
            )
        return draft
    try:
        require_name(digest)
    except ValueError as error:
        raise RefusedError(f"draft: {error}") from None
    known = artifacts.list_all(asset, target)
    try:
        name = choose_name(digest, read_names(known))
    except StoreError as error:
        for asset_of, target_of in sorted(path.parts[-3:-1] for path in artifacts.root.glob(f"*_draft/*/{digest}/")):
            reason = f"draft {digest} is an {asset_of} of target {target_of}, not of {target}, {strategy}"
            raise RefusedError(reason) from None
        raise RefusedError(f"target {target}, {strategy}: {error}") from None
    return next(each for each in known if each.path.name == name)


def _find_report(artifacts: ArtifactStore, target: TargetSpec, strategy: str, draft: Artifact, where: str) -> Artifact:
    wanted = [HELDOUT, *target.evals]
    measured = f"{_run(target.name, 'evaluate')}"
    for report in artifacts.list_all(of_strategy(strategy).report, target.name):
        identity = ReportIdentity.of(report)
        if identity.draft_identity == draft.path.name:
            missing = [name for name in wanted if name != HELDOUT and name not in identity.evals]
            if missing:
                raise RefusedError(f"{where}: its newest report is not about {', '.join(missing)}. {measured}")
            return report
    raise RefusedError(f"{where}: expected a report of it, found none. {measured}")


def _is_export_of(export: Artifact, draft: Artifact, files: TargetFiles) -> bool:
    identity = ExportIdentity.of(export)
    return (identity.draft, identity.weights) == (draft.path.name, draft.data_version) and (
        identity.target is not None and identity.target[0] == files.digest
    )


def _require_served(artifacts: ArtifactStore, target: TargetSpec, strategy: str, export: Artifact, where: str) -> None:
    """Raise RefusedError if the entry asks for a serving check that this export has not passed."""
    serving = target.evaluation.serving
    made = export.summary["formats"]
    if not serving.prompts or not any("SGLang" in result["commands"] for result in made.values()):
        return
    if serving.format is not None and serving.format not in made:
        return  # the strategy has no serving asset for this target
    digests = {result["digest"] for result in made.values()}
    for found in artifacts.list_all(of_strategy(strategy).serving, target.name):
        if found.identity.get("export") in digests:
            walk = found.summary["walk"]
            if not walk["agrees"]:
                raise RefusedError(
                    f"{where}: a live server accepts {walk['difference']:+.3f} tokens per pass against the walk, which is "
                    f"more than {walk['allowed']:.3f}. Look at the asset {found.asset}"
                )
            return
    raise RefusedError(
        f"{where}: expected a serving check (evaluation.serving.prompts), found none of this export. "
        f"{_run(target.name, 'serve')}"
    )


def _run(target: str, job: str) -> str:
    return f"Run it: draftworks run {job} --target {target}"
