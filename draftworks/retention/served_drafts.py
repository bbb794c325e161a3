"""What servers use, or may be told to use again: drafts, exports and reports of the records of service."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from draftworks.service.record import InService, ServedDraft
from draftworks.service.register import FOLDER, ServiceRegister
from draftworks.storage.asset_names import of_strategy

FORMER = 2
"""Drafts that were in service before the present one and are kept, so that a rollback finds them."""


@dataclass(frozen=True)
class ServedResults:
    """Folders of results by the reason why they stay.

    Attributes:
        whole: drafts that servers use or may be told to use again, their exports and reports.
        reports: of all drafts that were ever in service: later ones are compared with the best of them.
    """

    whole: dict[Path, str]
    reports: dict[Path, str]


def list_served(var: Path) -> ServedResults:
    """Return what stays for the draft in service, its canary and the last two before it, of each target and strategy.

    Raises:
        StoreError: a record cannot be read. What servers use is not known then.
    """
    whole: dict[Path, str] = {}
    reports: dict[Path, str] = {}
    for folder in sorted((var / FOLDER).glob("*/*/")):
        register = ServiceRegister(var, folder.parent.name, folder.name)
        history = register.read_history()
        for draft in choose_drafts(history):
            whole.update(dict.fromkeys(list_results(var, register, draft), "in service"))
        reports.update((locate_report(var, register, record.draft), "of a former draft") for record in history)
    return ServedResults(whole, reports)


def choose_drafts(history: tuple[InService, ...]) -> list[ServedDraft]:
    """Return the draft in service, its canary, and the last `FORMER` other drafts before it."""
    if not history:
        return []
    present = history[-1]
    drafts = {present.draft.digest: present.draft}
    for record in reversed(history):
        if len(drafts) <= FORMER:
            drafts.setdefault(record.draft.digest, record.draft)
    canary = [] if present.canary is None else [present.canary.draft]
    return [*drafts.values(), *canary]


def list_results(var: Path, register: ServiceRegister, draft: ServedDraft) -> list[Path]:
    """Return the folders of a draft, its export and its report."""
    made = var / of_strategy(register.strategy).draft / register.target / draft.digest
    return [made, var / draft.path, locate_report(var, register, draft)]


def locate_report(var: Path, register: ServiceRegister, draft: ServedDraft) -> Path:
    return var / of_strategy(register.strategy).report / register.target / draft.report
