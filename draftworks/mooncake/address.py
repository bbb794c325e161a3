"""Where a Mooncake store is, and what its owner says of it."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from draftworks.errors import ConfigError, StoreError
from draftworks.storage.files import parse_json

_STORE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
SCHEMA = 1
ADDRESS_FILE = "address.json"
"""In the folder of a service, while it runs."""


@dataclass(frozen=True)
class MooncakeAddress:
    """How a process reaches a Mooncake store.

    Attributes:
        master: `host:port` of mooncake_master.
        store_id: first part of all keys: letters, digits, `.`, `_` and `-`.
        host: the address by which other processes reach this one.
        protocol: `tcp` or `rdma`.
        devices: names of RDMA devices, separated by commas; empty for tcp.
        timeout_s: seconds until a call that has no answer counts as failed, beside the time its bytes need.
    """

    master: str
    store_id: str
    host: str = "127.0.0.1"
    protocol: str = "tcp"
    devices: str = ""
    timeout_s: float = 30.0

    def __post_init__(self) -> None:
        require_store_id(self.store_id)
        host, colon, port = self.master.rpartition(":")
        if not (host and colon and port.isdigit() and 0 < int(port) < 1 << 16):
            raise ConfigError(f"Mooncake's master: expected host:port, found {self.master!r}")

    @property
    def uri(self) -> str:
        return f"mooncake://{self.store_id}"

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def read(cls, path: Path) -> MooncakeAddress:
        """Read an address that a service wrote. Raises StoreError if the service does not run."""
        try:
            return cls(**parse_json(path.read_text()))
        except FileNotFoundError as error:
            raise StoreError(
                f"{path}: expected the address of a running Mooncake service, found none. Start it"
            ) from error
        except (OSError, ValueError, TypeError) as error:
            raise StoreError(f"{path} is no address of a Mooncake service: {error}. Start the service again") from error


@dataclass(frozen=True)
class OwnerRecord:
    """What the owner of a store's memory says of itself, in an object of the store.

    The object is in the owner's own memory, so that reading it proves that master and owner live, which neither
    Mooncake's health check nor the existence of a key does. A new start has a new `incarnation`: then everything of
    before is lost.

    Attributes:
        metrics: `host:port` of the master's HTTP server, which lists keys.
        lease_ttl_s: seconds for which Mooncake keeps an object after it was read or looked up.
    """

    incarnation: str
    segment_bytes: int
    lease_ttl_s: float
    metrics: str
    host: str
    pid: int

    def to_bytes(self) -> bytes:
        return json.dumps({"schema": SCHEMA, **asdict(self)}, sort_keys=True).encode()

    @classmethod
    def from_bytes(cls, content: bytes, where: str) -> OwnerRecord:
        try:
            fields = parse_json(content.decode())
            schema = fields.pop("schema")
        except (ValueError, KeyError, AttributeError) as error:
            raise StoreError(f"{where}: the record of the memory's owner cannot be read: {error}") from error
        if schema != SCHEMA:
            raise StoreError(f"{where}: the memory's owner is of schema {schema}, expected {SCHEMA}. Use one version")
        return cls(**fields)


def build_owner_key(store_id: str) -> str:
    """Return the key of the `OwnerRecord`."""
    return f"{store_id}/owner"


def build_alive_key(store_id: str, incarnation: str) -> str:
    """Return the key of an empty mark: where it is, the master has not been started again, and still knows the owner."""
    return f"{store_id}/alive/{incarnation}"


def require_store_id(store_id: str) -> None:
    if not _STORE_ID.fullmatch(store_id):
        raise ConfigError(
            f"the name of a Mooncake store: expected up to 64 letters, digits, '.', '_' or '-', found {store_id!r}"
        )
