"""Which file system a path is on."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftworks.storage.shared_folder import Mount, find_mount

LINES = """\
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 27 0:25 / /data rw,relatime shared:1 master:2 - nfs4 server:/data rw
31 30 0:26 / /data/local rw - xfs /dev/vdb rw
32 27 0:27 / /with\\040space rw - fuse.sshfs host:/ rw
33 27 0:28 / /again rw - ext4 /dev/vdc rw
34 27 0:29 / /again rw - lustre host:/l rw
35 27 0:30 / /disk rw - fuseblk /dev/sdb1 rw
a line of another kind
"""


@pytest.mark.parametrize(
    ("path", "point", "kind", "shared"),
    [
        ("/home/x", "/", "ext4", False),
        ("/data", "/data", "nfs4", True),
        ("/data/a/b", "/data", "nfs4", True),
        ("/database", "/", "ext4", False),
        ("/data/local/x", "/data/local", "xfs", False),
        ("/with space/x", "/with space", "fuse.sshfs", True),
        ("/again/x", "/again", "lustre", True),
        ("/disk/x", "/disk", "fuseblk", False),
    ],
)
def test_the_innermost_and_last_mount_holds_a_path(
    path: str, point: str, kind: str, shared: bool, tmp_path: Path
) -> None:
    (tmp_path / "mounts").write_text(LINES)
    mount = find_mount(Path(path), tmp_path / "mounts")
    assert mount == Mount(Path(point), kind)
    assert mount.is_shared == shared


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smb3", "lustre", "9p", "ceph", "fuse", "fuse.glusterfs"])
def test_file_systems_of_several_hosts_are_shared(kind: str) -> None:
    assert Mount(Path("/"), kind).is_shared


def test_links_are_followed_and_this_machine_has_mounts(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("/proc/self")
    found = find_mount(link / "anything")
    assert found is not None
    assert found.kind == "proc"


def test_no_list_of_mounts_is_no_mount(tmp_path: Path) -> None:
    assert find_mount(tmp_path, tmp_path / "absent") is None
