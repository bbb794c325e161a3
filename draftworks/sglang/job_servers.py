"""The servers of one job of several nodes: how its ranks find each other's, and the key that they share.

    {folder}/key                        API key, made anew for every job; only its owner may read it
    {folder}/{rank}-{slot}-{start}.json the address of a server that serves; another start of it has another name
    {folder}/wanted                     rank 0 has work for the servers of all ranks
    {folder}/over                       rank 0 has no more work for them

The folder lies on the file system that all nodes share. A listing is enough to see what has changed. Torch-free.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from draftworks.servers.start import make_key_file, read_key
from draftworks.storage.files import publish_file

_PREFIX = "servers-"
_WANTED, _OVER = "wanted", "over"


@dataclass(frozen=True)
class ServerAddress:
    """Where a server of the job is reached, and the folder that it writes hidden states to."""

    url: str
    spool: str


@dataclass(frozen=True)
class ServerSlot:
    """The place of one server in a job: the `number`-th of those that rank `rank` starts."""

    rank: int
    number: int


@dataclass(frozen=True)
class JobServers:
    """A job's servers, as one of its ranks sees them.

    Attributes:
        folder: shared by all ranks of the job, and used by no other job.
        host: address of this rank's node that the other nodes reach.
    """

    folder: Path
    host: str
    rank: int
    world_size: int

    @property
    def key_file(self) -> Path:
        return self.folder / "key"

    def read_key(self) -> str:
        return read_key(self.key_file)

    def list_peer_slots(self, per_rank: int) -> tuple[ServerSlot, ...]:
        """Return the places of other ranks' servers, of which each rank starts `per_rank`."""
        ranks = [rank for rank in range(self.world_size) if rank != self.rank]
        return tuple(ServerSlot(rank, number) for rank in ranks for number in range(per_rank))

    def publish(self, number: int, address: ServerAddress) -> None:
        """Let the other ranks find this rank's server `number`; it replaces what was published of it before.

        Raises:
            FileNotFoundError: rank 0 has removed the folder, as it does when the job's work is done.
        """
        before = self._list_files(ServerSlot(self.rank, number))
        name = f"{self.rank}-{number}-{secrets.token_hex(4)}.json"
        with publish_file(self.folder / name, self.folder / f".{name}") as staging:  # in an existing folder only
            staging.write_text(json.dumps(asdict(address)))
        _remove(before)

    def withdraw(self, number: int) -> None:
        """Let the other ranks use this rank's server `number` no more."""
        _remove(self._list_files(ServerSlot(self.rank, number)))

    def list_names(self) -> dict[ServerSlot, str]:
        """Return, for each server that is published, a name that changes with every start of it."""
        names = sorted(name for name in self._list_folder() or () if name.endswith(".json") and name[0] != ".")
        return {ServerSlot(*map(int, name.split("-")[:2])): name for name in names}

    def read_address(self, name: str) -> ServerAddress | None:
        """Return the address under a name of `list_names`; None if it was withdrawn meanwhile."""
        try:
            return ServerAddress(**json.loads((self.folder / name).read_text()))
        except FileNotFoundError:
            return None

    def request_service(self) -> None:
        """Let the ranks that only serve start their servers."""
        (self.folder / _WANTED).touch()

    def end_service(self) -> None:
        """Let the ranks that only serve end."""
        (self.folder / _OVER).touch()

    @property
    def is_requested(self) -> bool:
        return self._has(_WANTED)

    @property
    def is_over(self) -> bool:
        return self._has(_OVER)

    def _has(self, name: str) -> bool:
        # A listing: a client of a network file system may remember for long that a single file is not there.
        names = self._list_folder()
        return name == _OVER if names is None else name in names

    def _list_folder(self) -> list[str] | None:
        """Return the names in the folder; None if rank 0 has removed it, as it does at the end."""
        try:
            return os.listdir(self.folder)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ESTALE):
                return None
            raise

    def _list_files(self, slot: ServerSlot) -> list[Path]:
        return list(self.folder.glob(f"{slot.rank}-{slot.number}-*.json"))


def make_servers_folder(out: Path) -> Path:
    """Make the folder of a job's servers in its output folder, with a new key, and return its path."""
    folder = out.resolve() / f"{_PREFIX}{secrets.token_hex(8)}"
    folder.mkdir(mode=0o700)
    make_key_file(folder / "key")
    return folder


def remove_servers_folders(out: Path) -> None:
    """Remove what killed jobs with the same output folder have left."""
    for folder in out.glob(f"{_PREFIX}*"):
        shutil.rmtree(folder, ignore_errors=True)


def _remove(files: list[Path]) -> None:
    for file in files:
        file.unlink(missing_ok=True)
