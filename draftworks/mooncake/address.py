"""Where a Mooncake store is, what its owner says of it, and where its library is; nothing else imports that library."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from types import ModuleType

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


_QUIET = {"GLOG_minloglevel": "2", "MC_LOG_LEVEL": "ERROR"}
"""Variables by which Mooncake's programs and its library log errors only."""


class Code(IntEnum):
    """Codes that Mooncake 0.3.13 returns; what is not negative is a success, or a number of bytes."""

    NO_SPACE = -200
    INVALID = -600
    TAKEN_OVER = -601
    UNFINISHED = -703
    ABSENT = -704
    LEASED = -706
    LEASE_EXPIRED = -707
    TRANSFER_FAILED = -800
    RPC_FAILED = -900
    RPC_TIMEOUT = -901


def load_library(timeout_s: float) -> ModuleType:
    """Return the module `mooncake.store`, quiet unless the environment says otherwise.

    Args:
        timeout_s: seconds that it waits for a master or peer that is stopped, in stores that are set up from now on.

    Raises:
        ConfigError: Mooncake or one of its system libraries is not installed.
    """
    os.environ.update(build_environment())
    os.environ["MC_STORE_CLIENT_SETUP_RETRIES"] = "1"  # MooncakeClient makes the attempts
    os.environ["MC_RPC_TIMEOUT_MS"] = str(max(1, round(timeout_s * 1000)))
    os.environ["MC_TCP_PROGRESS_TIMEOUT_SEC"] = os.environ["MC_TCP_STATUS_TIMEOUT_SEC"] = str(max(1, round(timeout_s)))
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as error:
        raise ConfigError(
            f"the feature store of kind mooncake needs the library Mooncake, which cannot be imported: {error}. Install "
            "draftworks[mooncake], and of the system libibverbs1 libnl-3-200 libnl-route-3-200"
        ) from error


def find_master_program() -> Path:
    """Return the path of the program `mooncake_master`, which is in Mooncake's package. Raises ConfigError without it."""
    found = importlib.util.find_spec("mooncake")
    for folder in found.submodule_search_locations or () if found is not None else ():
        program = Path(folder) / "mooncake_master"
        if os.access(program, os.X_OK):
            return program
    raise ConfigError("mooncake_master is not installed in this environment. Install draftworks[mooncake]")


def build_environment() -> dict[str, str]:
    """Return this process's environment with Mooncake's log limited to errors, unless it is configured there."""
    return {**_QUIET, **os.environ}
