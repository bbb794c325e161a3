"""How far a draft has come: accepted by the rule, promoted, confirmed by the server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from draftworks.errors import StoreError
from draftworks.service.register import MAX_BYTES, EvalFigures, InService, ServiceRegister
from draftworks.storage.files import publish_json, read_json

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
        delivery = find_delivery(register, current)
        confirmed = delivery is not None and delivery.confirmed
        found[current.draft.digest] = State.CONFIRMED if confirmed else State.PROMOTED
    accepted = find_accepted(register)
    if accepted is not None and accepted.number == (0 if current is None else current.number):
        found.setdefault(accepted.digest, State.ACCEPTED)
    return found


def find_accepted(register: ServiceRegister) -> Accepted | None:
    try:
        values = read_json(register.folder / ACCEPTED, MAX_BYTES)
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
        values = read_json(path, MAX_BYTES)
        attempts = tuple(Attempt(**each) for each in values.pop("attempts"))
        found = Delivery(**values, attempts=attempts)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{path}: cannot be read ({error}). Remove the file") from None
    return found if found.digest == record.draft.digest else None


def save_delivery(register: ServiceRegister, delivery: Delivery) -> None:
    publish_json(register.folder / DELIVERIES / f"{delivery.number:08}.json", json.loads(json.dumps(asdict(delivery))))
