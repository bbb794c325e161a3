"""The record of the draft in service, `in_service.json`, as it is written and validated. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from draftworks.errors import StoreError
from draftworks.storage.names import require_name

SCHEMA_VERSION = 1

Action = Literal["promote", "rollback", "canary", "end_canary"]
Share = Annotated[float, Field(gt=0, lt=1)]


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
    """

    digest: str
    path: str
    formats: Mapping[str, str]
    version: str
    weights: str
    target_digest: str
    report: str


@dataclass(frozen=True)
class LostSlice:
    """A slice of the shared prompts in which a draft accepts clearly less, see `draftworks.service.slice_rule`.

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
    """What the rule of promotion found on one eval set, see `draftworks.service.rule`.

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
            draft = {name: values[name] for name in names}
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

    def without_canary(self) -> InService:
        return replace(self, canary=None)


_RECORD = TypeAdapter(InService)


def _require_safe(found: InService) -> None:
    """Raise ValueError unless names and paths stay inside their folders and the time can be read."""
    drafts = [found.draft] if found.canary is None else [found.draft, found.canary.draft]
    for draft in drafts:
        parts = PurePosixPath(draft.path)
        if parts.is_absolute() or ".." in parts.parts or not parts.parts:
            raise ValueError(f"path {draft.path!r} is not inside the folder of results")
        for name in (found.target, found.strategy, draft.digest, *draft.formats):
            require_name(name)
    datetime.fromisoformat(found.when)
