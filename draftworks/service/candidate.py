"""A draft with all that decides whether it may be put into service, and how far it has come: accepted, promoted, confirmed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from draftworks.config.registry_files import TargetSpec
from draftworks.config.run_files import TargetFiles
from draftworks.errors import DraftworksError, StoreError
from draftworks.evaluation.report.served import list_served, name_engine
from draftworks.export.conventions import GATE_MEANINGS, SERVER_COMMANDS
from draftworks.service.register import EvalFigures, InService, ServedDraft, ServiceRegister
from draftworks.service.swap_record import find_swap
from draftworks.storage.artifacts import Artifact, ArtifactStore
from draftworks.storage.event_log import MAX_RECORD_BYTES
from draftworks.storage.files import publish_json, read_json
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
    wanted = {SERVER_COMMANDS[engine] for engine in serving.engines}
    if not serving.prompts or not any(wanted & result["commands"].keys() for result in made.values()):
        return
    if serving.format is not None and serving.format not in made:
        return  # the strategy has no serving asset for this target
    digests = {result["digest"] for result in made.values()}
    for found in artifacts.list_all(of_strategy(strategy).serving, target.name):
        if found.identity.get("export") in digests:
            for one in list_served(found.summary):
                walk = one["walk"]
                if not walk["agrees"]:
                    raise RefusedError(
                        f"{where}: a live server ({name_engine(one)}) accepts {walk['difference']:+.3f} tokens per pass against "
                        f"the walk, which is more than {walk['allowed']:.3f}. Look at the asset {found.asset}"
                    )
            return
    raise RefusedError(
        f"{where}: expected a serving check (evaluation.serving.prompts), found none of this export. "
        f"{_run(target.name, 'serve')}"
    )


def _run(target: str, job: str) -> str:
    return f"Run it: draftworks run {job} --target {target}"


ACCEPTED, DELIVERIES = "accepted.json", "deliveries"


class State(StrEnum):
    """The states of a draft, in their order."""

    ACCEPTED = "accepted"
    """The rule accepts it; it is not in service yet."""
    PROMOTED = "promoted"
    """It is in service."""
    CONFIRMED = "confirmed"
    """A server has said that it uses it."""


@dataclass(frozen=True)
class Accepted:
    """A draft that the rule has accepted, while the record of `number` was in service (0: none)."""

    number: int
    digest: str
    figures: tuple[dict[str, Any], ...]

    @classmethod
    def of(cls, current: InService | None, digest: str, figures: Sequence[EvalFigures]) -> Accepted:
        return cls(0 if current is None else current.number, digest, tuple(asdict(one) for one in figures))


@dataclass(frozen=True)
class Attempt:
    """One attempt to tell a server; `detail` is what it said, or what went wrong."""

    when: str
    seconds: float
    outcome: str
    detail: str


@dataclass(frozen=True)
class Delivery:
    """The outcome of telling servers about one record.

    Attributes:
        told: whether an attempt succeeded.
        confirmed: whether the server has answered with the digest of the draft.
    """

    number: int
    digest: str
    told: bool
    confirmed: bool
    attempts: tuple[Attempt, ...]


def read_states(register: ServiceRegister) -> dict[str, State]:
    """Return the state of the draft in service, and of one that was accepted since, by digest."""
    found: dict[str, State] = {}
    current = register.find()
    if current is not None:
        delivery, swapped = find_delivery(register, current), find_swap(register, current)
        by_server = swapped is not None and swapped.outcome.serves
        confirmed = by_server or (delivery is not None and delivery.confirmed)
        found[current.draft.digest] = State.CONFIRMED if confirmed else State.PROMOTED
    accepted = find_accepted(register)
    if accepted is not None and accepted.number == (0 if current is None else current.number):
        found.setdefault(accepted.digest, State.ACCEPTED)
    return found


def find_accepted(register: ServiceRegister) -> Accepted | None:
    try:
        values = read_json(register.folder / ACCEPTED, MAX_RECORD_BYTES)
        return Accepted(int(values["number"]), str(values["digest"]), tuple(values["figures"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{register.folder / ACCEPTED}: cannot be read ({error}). Remove the file") from None


def save_accepted(register: ServiceRegister, accepted: Accepted) -> None:
    register.folder.mkdir(parents=True, exist_ok=True)
    publish_json(register.folder / ACCEPTED, asdict(accepted))


def forget_accepted(register: ServiceRegister) -> None:
    (register.folder / ACCEPTED).unlink(missing_ok=True)


def find_delivery(register: ServiceRegister, record: InService) -> Delivery | None:
    """Return the outcome of telling servers about a record; None if nobody has been told."""
    path = register.folder / DELIVERIES / f"{record.number:08}.json"
    try:
        values = read_json(path, MAX_RECORD_BYTES)
        attempts = tuple(Attempt(**each) for each in values.pop("attempts"))
        found = Delivery(**values, attempts=attempts)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{path}: cannot be read ({error}). Remove the file") from None
    return found if found.digest == record.draft.digest else None


def save_delivery(register: ServiceRegister, delivery: Delivery) -> None:
    publish_json(register.folder / DELIVERIES / f"{delivery.number:08}.json", json.loads(json.dumps(asdict(delivery))))
