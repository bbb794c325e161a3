"""Check that two hosts see one folder, and what kind of file system a folder is on. Torch-free.

    {folder}/.shared/{id}.json                  the token, written by who starts a job
    {folder}/.shared/{id}.{host}.{pid}.json     an answer, written by a process of the job

The two hosts' clocks are compared through the times that the file server gives to the two files.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from uuid import uuid4

from draftworks.errors import ConfigError
from draftworks.storage.files import fsync

VARIABLE = "DRAFTWORKS_SHARED_FOLDER"
"""Environment variable of a job with the token, as JSON."""
PATIENCE_S = 15.0
"""How long a token may take to appear: clients of network file systems remember what is not there."""
MAX_SKEW_S = 5.0
REFUSED_SKEW_S = 60.0
"""Clocks that differ by more are an error. Which rank failed first is found by times, and servers refuse signatures and
tokens whose time is far from their own."""
KEPT_S = 24 * 3600.0
_POLL_S = 0.2

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FolderToken:
    """A token in a folder that the hosts of a job must share.

    Attributes:
        host: who wrote it.
        ahead_s: how far the clock of `host` is ahead of the file server's.
    """

    folder: str
    id: str
    secret: str
    host: str
    ahead_s: float

    @property
    def path(self) -> Path:
        return Path(self.folder) / ".shared" / f"{self.id}.json"

    def to_env(self) -> dict[str, str]:
        """Return the environment variable from which a job's processes know the token."""
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> FolderToken | None:
        """Return the token in an environment; None if it has none."""
        return cls(**json.loads(env[VARIABLE])) if VARIABLE in env else None


@dataclass(frozen=True)
class FolderAnswer:
    """Proof that a process of the job sees the folder, with the skew of its clock against the token's writer."""

    host: str
    skew_s: float


def write_folder_token(folder: Path) -> FolderToken:
    """Write a token for one job into `folder`, and remove tokens of jobs long past.

    Raises:
        ConfigError: the folder cannot be written.
    """
    folder = folder.resolve()
    secret, id = uuid4().hex, uuid4().hex
    try:
        (folder / ".shared").mkdir(parents=True, exist_ok=True)
        ahead_s = measure_clock_lead(folder / ".shared" / f"{id}.json", {"secret": secret})
    except OSError as error:
        raise ConfigError(
            f"{folder} on host {socket.gethostname()}: expected a folder that this user may write to, found: {error}"
        ) from error
    _sweep(folder / ".shared")
    return FolderToken(str(folder), id, secret, socket.gethostname(), ahead_s)


def check_shared_folder(token: FolderToken, patience_s: float = PATIENCE_S) -> FolderAnswer:
    """Check on the host of a job that it sees the folder of a token and may write there, and answer the token.

    A clock that differs by more than `MAX_SKEW_S` is logged as a warning: times in logs and records then mislead.

    Raises:
        ConfigError: this host does not see the folder, sees another one at its path, or cannot write to it; or its clock
            differs by more than `REFUSED_SKEW_S`.
    """
    host = socket.gethostname()
    _require_token(token, host, patience_s)
    try:
        answer_path = token.path.with_name(f"{token.id}.{host}.{os.getpid()}.json")
        ahead_s = measure_clock_lead(answer_path, {"host": host})
        answer = FolderAnswer(host, ahead_s - token.ahead_s)
    except OSError as error:
        raise ConfigError(
            f"{token.folder} on host {host}: expected a folder that this job may write to, as host {token.host} may, "
            f"found: {error}. Mount it writable on {host}, for the same user"
        ) from error
    skew = describe_skew(token, answer)
    if skew is not None and abs(answer.skew_s) > REFUSED_SKEW_S:
        raise ConfigError(f"{skew}, and run it again")
    if skew is not None:
        log.warning("%s", skew)
    return answer


def check_shared_folder_of_job(env: Mapping[str, str]) -> None:
    """Do the same for the token in a job's environment; nothing without one."""
    token = FolderToken.from_env(env)
    if token is not None:
        check_shared_folder(token)


def describe_skew(token: FolderToken, answer: FolderAnswer) -> str | None:
    """Return a sentence on two clocks that differ by more than `MAX_SKEW_S`; None if they agree."""
    if abs(answer.skew_s) <= MAX_SKEW_S:
        return None
    direction = "ahead of" if answer.skew_s > 0 else "behind"
    return (
        f"the clock of host {answer.host} is {abs(answer.skew_s):.0f} s {direction} that of {token.host}: times in logs and "
        "records of the two cannot be compared. Set the clocks by NTP"
    )


def _require_token(token: FolderToken, host: str, patience_s: float) -> None:
    deadline, found = time.monotonic() + patience_s, ""
    while True:
        try:
            if json.loads(token.path.read_text())["secret"] == token.secret:
                return
            found = f"another content in {token.path}"
        except (OSError, ValueError, KeyError, TypeError) as error:
            folder = "the folder is there, without that file" if Path(token.folder).is_dir() else "no such folder"
            found = f"{folder} ({error})"
        if time.monotonic() >= deadline:
            raise ConfigError(
                f"host {host} does not see the folder {token.folder} of host {token.host}: expected the file "
                f"{token.path} that {token.host} wrote for this job, found {found}. All hosts of a job need one file "
                f"system under this path: mount it on {host}, or set `var` in deployment.yaml to a folder that they share"
            )
        time.sleep(_POLL_S)


def measure_clock_lead(path: Path, value: object) -> float:
    """Write a JSON file to the disk; return how far this host's clock is ahead of the time that the file was given.

    What a slow file system takes does not count: it is the least difference that the times before and after allow.
    """
    before = time.time()
    path.write_text(json.dumps(value))
    fsync(path)
    after, given = time.time(), path.stat().st_mtime
    return max(before - given, 0.0) + min(after - given, 0.0)


def _sweep(folder: Path) -> None:
    for path in folder.iterdir():
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > KEPT_S:
                path.unlink()


MOUNTS = Path("/proc/self/mountinfo")
_SHARED = frozenset(
    (
        *("nfs", "nfs4", "cifs", "smb2", "smb3", "smbfs", "ncpfs", "afs", "9p", "virtiofs", "fuse"),
        *("lustre", "ceph", "glusterfs", "gpfs", "beegfs", "wekafs", "panfs", "pvfs2", "orangefs", "gfs2", "ocfs2"),
    )
)
_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True)
class Mount:
    """A mounted file system.

    Attributes:
        kind: as the kernel names it, such as "ext4" or "nfs4".
    """

    point: Path
    kind: str

    @property
    def is_shared(self) -> bool:
        """Whether the file system is one of a network or of a user-space program (`fuse`, `fuse.sshfs`).

        Locks and shared memory of such files do not reach from one host to another. `fuseblk` is a local disk.
        """
        return self.kind in _SHARED or self.kind.startswith("fuse.")


def find_mount(path: Path, mounts: Path = MOUNTS) -> Mount | None:
    """Return the mount that holds `path`, which need not exist; None where the system has no list of mounts."""
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    real, found = Path(os.path.realpath(path)), None
    for line in lines:
        mount = _parse(line)
        # Of two mounts on one point the later one hides the earlier.
        if mount and real.is_relative_to(mount.point) and (found is None or mount.point.is_relative_to(found.point)):
            found = mount
    return found


def _parse(line: str) -> Mount | None:
    before, separator, after = line.partition(" - ")
    fields, kinds = before.split(" "), after.split(" ")
    if not separator or len(fields) < 5:
        return None
    return Mount(Path(_OCTAL.sub(lambda found: chr(int(found[1], 8)), fields[4])), kinds[0])
