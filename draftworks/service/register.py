"""The draft in service of one target and strategy, replaced by compare-and-swap; safe across processes and hosts.

{var}/in_service/{target}/{strategy}/in_service.json    the record in service
{var}/in_service/{target}/{strategy}/history/, .lock/   see `draftworks.storage.event_log.NumberedRecord`
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from draftworks.errors import StoreError
from draftworks.storage.artifacts import RECORD
from draftworks.storage.event_log import HISTORY, NumberedRecord
from draftworks.storage.files import read_json
from draftworks.storage.names import require_name
from draftworks.storage.words import list_names

SCHEMA_VERSION = 1

Action = Literal["promote", "rollback", "canary", "end_canary"]
Share = Annotated[float, Field(gt=0, lt=1)]


@dataclass(frozen=True)
class Bundle:
    """The one object that has a draft, its flags and its promise, see `draftworks.bundle`.

    Attributes:
        digest: of its manifest: `sha256:` and 64 hexadecimal digits.
        path: folder of its OCI layout, relative to `var`.
    """

    digest: str
    path: str


@dataclass(frozen=True)
class ServedDraft:
    """An exported draft that servers load.

    Attributes:
        digest: identity of the draft, the name of its folder.
        path: folder of the export relative to `var`. It is named by the export's identity and is never changed.
        formats: content digest of each exported format, a subfolder of `path`.
        version: content digest of the export.
        weights: content digest of the draft's weights.
        target_digest: digest of the target's weights that the draft was trained for.
        report: identity of the report by which it was judged.
        bundle: None where the target's entry asks for none.
    """

    digest: str
    path: str
    formats: Mapping[str, str]
    version: str
    weights: str
    target_digest: str
    report: str
    bundle: Bundle | None = None


@dataclass(frozen=True)
class LostSlice:
    """A slice of the shared prompts in which a draft accepts clearly less, see `draftworks.service.rule`.

    Attributes:
        difference, low, high: of the new draft minus the reference, with the paired interval of this slice by itself.
        p_value: after Holm's correction over all slices of all eval sets.
    """

    column: str
    value: str
    prompts: int
    difference: float
    low: float
    high: float
    p_value: float


@dataclass(frozen=True)
class EvalFigures:
    """Figures of the rule of promotion on one eval set, see `draftworks.service.rule`.

    Attributes:
        verdict: `first`, `non_inferior`, `worse`, `slice_lost` or `undecided`.
        reference: digest of the draft that it was compared with.
        value, reference_value: accepted tokens per pass of both on the shared prompts.
        difference, low, high: of the new draft minus the reference, with the paired interval.
        carried: how far the reference itself is behind the best draft that was in service.
        slices: those that are lost.
    """

    eval_set: str
    verdict: str
    margin: float
    reason: str = ""
    reference: str | None = None
    value: float | None = None
    reference_value: float | None = None
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    carried: float = 0.0
    prompts: int = 0
    slices: tuple[LostSlice, ...] = ()


@dataclass(frozen=True)
class Canary:
    """A draft that gets a share of the requests, for callers that can route."""

    draft: ServedDraft
    share: Share


@dataclass(frozen=True)
class InService:
    """The draft that servers of a target are to use.

    Attributes:
        number: 1 for the first record of a target and strategy, then one more with each.
        draft: the draft in service.
        previous: digest of the draft that was in service before this record.
        rollback_to: number of the record whose draft a rollback puts into service; None if there is none.
        who, why: in the words of whoever asked for it.
        when: ISO 8601 in UTC.
        forced: whether a person overruled the rule.
        figures: what the rule found when the draft, or the canary, was promoted.
    """

    number: Annotated[int, Field(ge=1)]
    target: str
    strategy: str
    action: Action
    draft: ServedDraft
    previous: str | None
    rollback_to: int | None
    who: str
    when: str
    why: str
    forced: bool = False
    figures: tuple[EvalFigures, ...] = ()
    canary: Canary | None = None
    schema: int = field(default=SCHEMA_VERSION)

    def to_json(self) -> dict[str, Any]:
        """Return the record as a file holds it: the fields of its draft stand beside the others."""
        values = asdict(self)
        return {"schema": values.pop("schema"), **values.pop("draft"), **values}

    @classmethod
    def from_json(cls, values: Any, where: str) -> InService:
        """Return the record in a file's JSON. Raises StoreError if it is no valid record."""
        try:
            if values["schema"] != SCHEMA_VERSION:
                raise StoreError(f"{where}: expected schema {SCHEMA_VERSION}, found {values['schema']}")
            names = ServedDraft.__dataclass_fields__
            draft = {name: values[name] for name in names if name in values or name != "bundle"}
            rest = {name: value for name, value in values.items() if name not in names}
            found = _RECORD.validate_json(json.dumps({**rest, "draft": draft}), strict=True)
            _require_safe(found)
        except ValidationError as error:
            wrong = error.errors()[0]
            key = ".".join(map(str, wrong["loc"]))
            raise StoreError(f"{where}: not a record of a draft in service: {key}: {wrong['msg']}") from None
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StoreError(f"{where}: not a record of a draft in service: {error!r}") from None
        return found


_RECORD = TypeAdapter(InService)


def _require_safe(found: InService) -> None:
    """Raise ValueError unless names and paths stay inside their folders and the time can be read."""
    drafts = [found.draft] if found.canary is None else [found.draft, found.canary.draft]
    for draft in drafts:
        for path in [draft.path] if draft.bundle is None else [draft.path, draft.bundle.path]:
            parts = PurePosixPath(path)
            if parts.is_absolute() or ".." in parts.parts or not parts.parts:
                raise ValueError(f"path {path!r} is not inside the folder of results")
        for name in (found.target, found.strategy, draft.digest, *draft.formats):
            require_name(name)
    datetime.fromisoformat(found.when)


FOLDER, REGISTER = "in_service", "in_service.json"


class ConflictError(StoreError):
    """Another draft is in service than the one that was to be replaced. Nothing is changed."""


@dataclass(frozen=True)
class ServiceRegister:
    """The records of one target and strategy.

    Attributes:
        var: folder of all results.
    """

    var: Path
    target: str
    strategy: str

    @property
    def folder(self) -> Path:
        return self.var / FOLDER / require_name(self.target) / require_name(self.strategy)

    def find(self) -> InService | None:
        """Return the record in service, by one read; None if no draft was ever promoted.

        Raises:
            StoreError: the file is damaged, or of another target.
        """
        return self._record.find()

    def require(self) -> InService:
        """Return the record in service. Raises StoreError if there is none."""
        found = self.find()
        if found is None:
            raise StoreError(
                f"target {self.target} has no {self.strategy} draft in service: run draftworks promote {self.target} "
                f"{self.strategy}"
            )
        return found

    def read_history(self) -> tuple[InService, ...]:
        """Return every record that was ever in service, oldest first, the present one last.

        Raises:
            StoreError: one is damaged, or gone.
        """
        found = self._record.read_history()
        missing = set(range(1, found[-1].number if found else 1)) - {record.number for record in found}
        if missing:
            raise StoreError(
                f"{self.folder / HISTORY}: expected a record of each number up to {found[-1].number}, found none of "
                f"{list_names(sorted(missing))}. Restore the folder from a backup"
            )
        return found

    def replace(self, expected: str | None, make: Callable[[InService | None], InService | None]) -> InService | None:
        """Replace the record if the draft in service is still the expected one; return the record that is then there.

        Args:
            expected: digest of the draft that is replaced; None if there is to be none.
            make: returns the new record from the present one, or None to leave it as it is. It is called under the
                lease, and an error of it leaves everything as it is.

        Raises:
            ConflictError: another draft is in service.
        """

        def make_expected(current: InService | None) -> InService | None:
            if (found := None if current is None else current.draft.digest) != expected:
                raise ConflictError(
                    f"target {self.target}, {self.strategy}: expected {_name(expected)} in service, found {_name(found)}: "
                    "another process has replaced it, nothing is changed. Look at it (draftworks in-service "
                    f"{self.target} {self.strategy}) and ask again"
                )
            return make(current)

        busy = f"the draft in service of {self.target}, {self.strategy} is being replaced by another process: waiting"
        return self._record.replace(make_expected, busy)

    @property
    def _record(self) -> NumberedRecord[InService]:
        remedy = "Nothing is changed; restore the file from a backup"
        return NumberedRecord(self.folder, REGISTER, self._parse, "the record of a draft in service", remedy)

    def _parse(self, values: Any, where: str) -> InService:
        found = InService.from_json(values, where)
        if (found.target, found.strategy) != (self.target, self.strategy):
            raise StoreError(
                f"{where}: expected a record of {self.target}, {self.strategy}, found one of {found.target}, "
                f"{found.strategy}: was the file copied? Nothing is changed"
            )
        return found


def _name(digest: str | None) -> str:
    return "no draft" if digest is None else f"draft {digest}"


def resolve_draft(var: Path, target: str, strategy: str, export_format: str | None = None) -> Path:
    """Return the folder of the draft in service in one export format; the only format by default.

    Raises:
        StoreError: no draft is in service, its folder is gone, or it was not exported in that format.
    """
    return locate_format(var, ServiceRegister(var, target, strategy).require().draft, export_format)


def locate_format(var: Path, draft: ServedDraft, export_format: str | None = None) -> Path:
    """Return the folder of one export format of a draft, see `resolve_draft`."""
    folder = require_present(var, draft)
    if export_format is None and len(draft.formats) == 1:
        [export_format] = draft.formats
    if export_format is None or export_format not in draft.formats:
        found = "none given" if export_format is None else f"found {export_format}"
        raise StoreError(f"draft {draft.digest}: format: expected one of {', '.join(sorted(draft.formats))}, {found}")
    return folder / export_format


def require_present(var: Path, draft: ServedDraft) -> Path:
    """Return the folder of a draft's export. Raises StoreError if it is not there any more, or is another one."""
    folder = var / draft.path
    try:
        version = read_json(folder / RECORD)["data_version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(
            f"draft {draft.digest}: its export {folder} is not there any more, or not complete ({error}): was it pruned?"
        ) from None
    if version != draft.version:
        raise StoreError(f"draft {draft.digest}: {folder}: expected the export {draft.version}, found {version}")
    return folder
