"""Which file system a path is on, and whether other hosts may mount it too. Standard library only, Linux."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

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
