"""A real Postgres for tests, from the packages that `make .cluster/ready` unpacked: on loopback, in a folder of its own."""

from __future__ import annotations

import os
import platform
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ports import reserve_port
from waiting import wait_until

PACKAGES = Path(__file__).resolve().parents[2] / ".cluster" / "root"
USER, DATABASE, PASSWORD = "draftworks", "draftworks", "a password: @/%"
SERVANT = "nobody"
"""Postgres refuses to run as root: where the tests do, it runs as this user."""


@dataclass
class PostgresServer:
    """A server that can be killed and started again on the same port, with the same data.

    Attributes:
        folder: data, log and password file.
        programs: `/usr` of the packages' programs and libraries.
    """

    folder: Path
    programs: Path
    port: int
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def start(self) -> None:
        """Start it, and return when it answers."""
        options = {"listen_addresses": "127.0.0.1", "port": self.port, "unix_socket_directories": "", "fsync": "off"}
        words = [word for name, value in options.items() for word in ("-c", f"{name}={value}")]
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                [self.locate("postgres"), "-D", self.folder / "data", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.client_environment,
                start_new_session=True,
                **_as_servant(),
            )
        process = self.process
        wait_until(
            lambda: self.run("pg_isready", check=False).returncode == 0,
            lambda: f"Postgres: {(self.folder / 'server.log').read_text()[-2000:]}",
            possible=lambda: process.poll() is None,
        )

    def kill(self) -> None:
        """End all its processes at once, as a crash of its machine would."""
        if self.process is not None:
            # The server's own children have sessions of their own; they end when they notice that it is gone.
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None

    def stop(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGINT)  # a fast shutdown: it waits for nobody
            self.process.wait()
            self.process = None

    def run(self, program: str, *words: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run one of its clients (psql, pg_dump ...) against its database."""
        return subprocess.run(
            [self.locate(program), *words], check=check, capture_output=True, text=True, env=self.client_environment
        )

    @property
    def variables(self) -> dict[str, str]:
        """What `deploy/dagster.yaml` reads from the environment."""
        values = {"HOST": "127.0.0.1", "PORT": str(self.port), "USER": USER, "PASSWORD": PASSWORD, "DB": DATABASE}
        return {f"DAGSTER_PG_{name}": value for name, value in values.items()}

    def locate(self, program: str) -> Path:
        """Return the path of one of the packages' programs."""
        found = sorted(self.programs.glob(f"lib/postgresql/*/bin/{program}"))
        if not found:
            raise FileNotFoundError(f"{program} is not in {self.programs}: run `make .cluster/ready`")
        return found[-1]

    @property
    def client_environment(self) -> dict[str, str]:
        """Variables with which its programs find their libraries, and its clients the server and database."""
        libraries = self.programs / "lib" / f"{platform.machine()}-linux-gnu"
        client = {"PGHOST": "127.0.0.1", "PGPORT": str(self.port), "PGUSER": USER, "PGPASSWORD": PASSWORD}
        return {**os.environ, **client, "PGDATABASE": DATABASE, "LD_LIBRARY_PATH": str(libraries), "LC_ALL": "C.UTF-8"}

    def _create(self) -> None:
        """Make its data folder, and the user and database of Dagster."""
        secret = self.folder / "password"
        secret.write_text(PASSWORD)
        for path in (self.folder, secret) if os.geteuid() == 0 else ():
            shutil.chown(path, SERVANT)
        access = ["--auth=scram-sha-256", f"--username={USER}", f"--pwfile={secret}", "--encoding=UTF8", "--no-sync"]
        made = subprocess.run(
            [self.locate("initdb"), "-D", self.folder / "data", *access],
            capture_output=True,
            text=True,
            cwd=self.folder,
            env=self.client_environment,
            **_as_servant(),
        )
        if made.returncode:
            raise RuntimeError(f"initdb: {made.stderr[-2000:]}")
        self.start()
        self.run("createdb", "--maintenance-db=postgres", DATABASE)


@contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    """A server with an empty database, ended and removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="postgres-"))
    try:
        server = PostgresServer(folder, _find_programs(folder), reserve_port())
        server._create()
        try:
            yield server
        finally:
            try:
                server.stop()
            finally:
                server.kill()
    finally:
        shutil.rmtree(folder)


def _find_programs(folder: Path) -> Path:
    """Return `usr` of the packages; a copy in `folder` where the user that runs the server cannot reach them."""
    programs = PACKAGES / "usr"
    if os.geteuid() != 0 or all(parent.stat().st_mode & 0o001 for parent in programs.parents):
        return programs
    for part in ("lib", "share/postgresql"):
        if (programs / part).is_dir():
            shutil.copytree(programs / part, folder / "usr" / part, symlinks=True)
    return folder / "usr"


def _as_servant() -> dict[str, int | Sequence[int]]:
    """Options of a process that must not be root's."""
    if os.geteuid() != 0:
        return {}
    user = pwd.getpwnam(SERVANT)
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
