"""Checks of the Python that SGLang is installed in, made before Draftworks runs anything there. Torch-free."""

from __future__ import annotations

import logging
import os
import re
import subprocess
from pathlib import Path

import draftworks
from draftworks.errors import ConfigError

SGLANG_VERSIONS = ("0.5.23",)
"""Versions whose internal types the capture hook reads and whose numbers were compared with those of transformers."""
FIRST_CAPTURING = (0, 5, 23)
"""First version with an option to return the hidden states of given layers (`--return-aux-hidden-state-layer-ids`)."""
PROGRAM_LIBRARIES = {"dagster_pipes": "dagster-pipes", "pyarrow": "pyarrow", "tenacity": "tenacity"}
"""Libraries that the programs that run a target import and SGLang does not install: distribution by module name."""
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "DAGSTER_PIPES_")
"""Prefixes of the variables that describe the process group of a Draftworks process.

They are hidden from SGLang, which would take them for its own.
"""
_TIMEOUT_S = 60
_HARMLESS = ("distutils-precedence.pth", "_virtualenv.pth", "a1_coverage.pth")
"""Files of site-packages that add no folder to a Python's path."""

log = logging.getLogger(__name__)


def require_version(python: Path) -> str:
    """Return the version of SGLang that is installed in a Python's environment.

    Raises:
        ConfigError: the Python cannot be run, or has no SGLang.
    """
    where = _describe_python(python)
    result = _run_python(python, "import importlib.metadata as m; print(m.version('sglang'))")
    if result.returncode != 0:
        reason = "".join(result.stderr.strip().splitlines()[-1:])
        raise ConfigError(f"{where} has no SGLang: {reason}. Install it there")
    version = result.stdout.strip()
    check_version(version, where)
    return version


def find_installed_version(python: Path) -> str | None:
    """Return the version of SGLang in the folders of a Python's virtual environment, without starting it.

    Returns:
        An empty text if there is no SGLang; None if that cannot be told so: the Python is in no virtual environment, or
        its environment has other folders too.
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
    found = [path for place in places for path in place.glob("sglang*") if path.suffix in (".dist-info", ".egg-info")]
    named = [match[1] for path in found if (match := re.fullmatch(r"sglang-([^-]+)\.dist-info", path.name))]
    if named:
        return named[0]
    return None if found or more or not alone or not folders else ""


def check_version(version: str, where: str) -> None:
    """Log a warning if the capture hook was not tested with this version of SGLang."""
    if version not in SGLANG_VERSIONS:
        log.warning(
            "%s is SGLang %s; Draftworks was tested with %s. Another version may generate and serve; what it captures "
            "is used only after a comparison with the target's own weights",
            *(where, version, " and ".join(SGLANG_VERSIONS)),
        )


def require_capturing(version: str, where: str) -> None:
    """Raise ConfigError if this version of SGLang cannot return hidden states; it can still answer and serve."""
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if numbers is not None and tuple(map(int, numbers.groups())) < FIRST_CAPTURING:
        expected = ".".join(map(str, FIRST_CAPTURING))
        raise ConfigError(
            f"{where} is SGLang {version}, which cannot return hidden states: expected {expected} or later. Install "
            "that, or set capture.backend to hf"
        )


def build_program_environment(python: Path, folder: Path) -> dict[str, str]:
    """Return the environment variables that a Draftworks program needs to be run by SGLang's Python.

    Args:
        folder: folder for a link to this package; created if absent.

    Raises:
        ConfigError: as `require_version`, or a library that Draftworks programs need is missing.
    """
    require_version(python)
    script = "import importlib.util as u, sys; print(*[m for m in sys.argv[1:] if u.find_spec(m) is None])"
    result = _run_python(python, script, *PROGRAM_LIBRARIES)
    missing = [PROGRAM_LIBRARIES[module] for module in result.stdout.split()]
    if missing:
        raise ConfigError(
            f"{_describe_python(python)} lacks {', '.join(missing)}, which a capture with backend sglang needs in "
            f"addition to SGLang. Install them there: {python} -m pip install --no-deps {' '.join(missing)}"
        )
    return {"PYTHONPATH": str(link_package(folder))}


def require_cpu_speculation(python: Path) -> None:
    """Raise ConfigError unless this Python has the project's platform plug-in, with which SGLang speculates without a GPU."""
    script = "import importlib.util as u; print(u.find_spec('draftworks_sglang_cpu.speculation') is not None)"
    if _run_python(python, script).stdout.strip() != "True":
        raise ConfigError(
            f"{_describe_python(python)} cannot speculate on a CPU: expected a GPU, or this project's platform "
            "plug-in for SGLang. `make sglang-env` creates an environment with it; on a machine with a GPU set "
            "evaluation.serving.device"
        )


def link_package(folder: Path) -> Path:
    """Put a link to this package into `folder` and return `folder`, for use as SGLang's PYTHONPATH.

    The folder has only this link, so that SGLang sees none of the libraries that are installed beside this package.
    """
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "draftworks"
    link.unlink(missing_ok=True)
    link.symlink_to(Path(draftworks.__file__).resolve().parent, target_is_directory=True)
    return folder


def _describe_python(python: Path) -> str:
    return f"SGLang's Python {python} (sglang.python of the deployment)"


def _run_python(python: Path, *words: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run([python, "-c", *words], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        where = f"{_describe_python(python)} cannot be run"
        raise ConfigError(f"{where}: {error}. `make sglang-env` creates an environment for CPU") from error
