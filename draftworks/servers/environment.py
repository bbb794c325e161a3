"""Checks of the Python that an inference engine is installed in, made before Draftworks runs anything there. Torch-free."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import draftworks
from draftworks.errors import ConfigError

PROGRAM_LIBRARIES = {
    "dagster_pipes": "dagster-pipes",
    "pyarrow": "pyarrow",
    "tenacity": "tenacity",
    "xxhash": "xxhash",
}
"""Libraries that the programs that run a target import and that some engine does not install: distribution by module."""
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "DAGSTER_PIPES_")
"""Prefixes of the variables that describe the process group of a Draftworks process.

They are hidden from engines, which would take them for their own.
"""
_TIMEOUT_S = 60
_HARMLESS = ("distutils-precedence.pth", "_virtualenv.pth", "a1_coverage.pth")
"""Files of site-packages that add no folder to a Python's path."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineSoftware:
    """An engine as it is installed in a Python of its own.

    Attributes:
        name: for people, such as SGLang.
        key: key of the deployment with its Python and time limits.
        distributions: names under which it may be installed; the first that is there counts.
        versions: those that Draftworks was tested with.
        recipe: how an environment with it is made.
        captures: value of `capture.backend` that needs `PROGRAM_LIBRARIES` there.
    """

    name: str
    key: str
    distributions: tuple[str, ...]
    versions: tuple[str, ...]
    recipe: str
    captures: str

    def describe_python(self, python: Path) -> str:
        return f"{self.name}'s Python {python} ({self.key}.python of the deployment)"

    def require_version(self, python: Path) -> str:
        """Return the version of the engine that is installed in a Python's environment.

        Raises:
            ConfigError: the Python cannot be run, or has no such engine.
        """
        where = self.describe_python(python)
        result = self.run_python(python, _PRINT_VERSION, *self.distributions)
        if result.returncode != 0:
            reason = "".join(result.stderr.strip().splitlines()[-1:])
            raise ConfigError(f"{where} has no {self.name}: {reason}. Install it there")
        version = result.stdout.strip()
        self.check_version(version, where)
        return version

    def find_installed_version(self, python: Path) -> str | None:
        """Return the version of the engine in the folders of a Python's virtual environment, without starting it.

        Returns:
            An empty text if there is no such engine; None if that cannot be told so: the Python is in no virtual
            environment, or its environment has other folders too.
        """
        prefix = python.parent.parent
        folders = [each for each in prefix.glob("lib*/python3*/site-packages") if each.is_dir()]
        try:
            settings = (prefix / "pyvenv.cfg").read_text(encoding="utf-8")
        except (OSError, ValueError):
            return None
        alone = re.search(r"^include-system-site-packages\s*=\s*false\s*$", settings, re.IGNORECASE | re.MULTILINE)
        more = [path for folder in folders for path in folder.glob("*.pth") if path.name not in _HARMLESS]
        places = [*folders, Path.cwd(), *map(Path, filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))]
        names = [name.replace("-", "_") for name in self.distributions]
        found = [path for place in places for name in names for path in place.glob(f"{name}[-.]*info")]
        named = [match[1] for path in found if (match := re.fullmatch(r"[^-]+-([^-]+)\.dist-info", path.name))]
        if named:
            return named[0]
        return None if found or more or not alone or not folders else ""

    def check_version(self, version: str, where: str) -> None:
        """Log a warning if Draftworks was not tested with this version of the engine."""
        if version.partition("+")[0] not in self.versions:
            log.warning(
                "%s is %s %s; Draftworks was tested with %s. Another version may generate and serve; what it captures "
                "is used only after a comparison with the target's own weights",
                *(where, self.name, version, " and ".join(self.versions)),
            )

    def require_here(self) -> str:
        """Return the version of the engine in the running Python; raise ConfigError if it is not installed there."""
        where = f"this Python, {sys.executable},"
        found = [each.version for name in self.distributions for each in importlib.metadata.distributions(name=name)]
        if not found:
            raise ConfigError(
                f"backend {self.captures} runs {self.name} in the process that captures, but {where} has none. Run the program "
                f"with the Python of {self.name}'s environment ({self.key}.python of the deployment, as Dagster does), or "
                f"choose backend {self.captures}_server, which starts it as a process of its own"
            )
        self.check_version(found[0], where)
        return found[0]

    def build_program_environment(self, python: Path, folder: Path) -> dict[str, str]:
        """Return the environment variables that a Draftworks program needs to be run by the engine's Python.

        Args:
            folder: folder for a link to this package; created if absent.

        Raises:
            ConfigError: as `require_version`, or a library that Draftworks programs need is missing.
        """
        self.require_version(python)
        script = "import importlib.util as u, sys; print(*[m for m in sys.argv[1:] if u.find_spec(m) is None])"
        result = self.run_python(python, script, *PROGRAM_LIBRARIES)
        missing = [PROGRAM_LIBRARIES[module] for module in result.stdout.split()]
        if missing:
            raise ConfigError(
                f"{self.describe_python(python)} lacks {', '.join(missing)}, which a capture with backend {self.captures} "
                f"needs in addition to {self.name}. Install them there: {python} -m pip install --no-deps "
                f"{' '.join(missing)}"
            )
        return {"PYTHONPATH": str(link_package(folder))}

    def run_python(self, python: Path, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a script in the engine's Python: `words` are what follows `-c`.

        Raises:
            ConfigError: it cannot be run, or takes too long.
        """
        try:
            return subprocess.run(
                [python, "-c", *words], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            where = f"{self.describe_python(python)} cannot be run"
            raise ConfigError(f"{where}: {error}. {self.recipe}") from error


_PRINT_VERSION = """
import importlib.metadata as m, sys
found = [each.version for name in sys.argv[1:] for each in m.distributions(name=name)]
print(found[0] if found else m.version(sys.argv[1]))
"""


def link_package(folder: Path) -> Path:
    """Put a link to this package into `folder` and return `folder`, for use as an engine's PYTHONPATH.

    The folder has only this link, so that the engine sees none of the libraries that are installed beside this package.
    """
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "draftworks"
    link.unlink(missing_ok=True)
    link.symlink_to(Path(draftworks.__file__).resolve().parent, target_is_directory=True)
    return folder


def hide_process_group(environment: dict[str, str]) -> dict[str, str]:
    """Return the variables without those that describe the process group of a Draftworks process."""
    return {name: value for name, value in environment.items() if not name.startswith(LAUNCHER_VARIABLES)}


@contextmanager
def set_environment(environment: Mapping[str, str]) -> Iterator[None]:
    """Set the environment that an engine in this process and its processes inherit; on exit restore this process's environment and logging.

    Variables of a launcher's process group are hidden meanwhile.
    """
    hidden = [name for name in os.environ if name.startswith(LAUNCHER_VARIABLES)]
    before = {name: os.environ.pop(name, None) for name in {*hidden, *environment}}
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    os.environ.update(environment)
    try:
        yield
    finally:
        for name in environment:
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in before.items() if value is not None})
        root.handlers[:] = handlers
        root.setLevel(level)
