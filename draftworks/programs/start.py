"""`draftworks run` and `draftworks ui`: check the arguments, then start Dagster with this checkout's settings."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from typer._click import globals as click

from draftworks.distributed import stop_signals
from draftworks.errors import ConfigError, DraftworksError

if TYPE_CHECKING:
    from draftworks.targets.registry import Registry


def shorten_paths(text: str, registry: Path) -> str:
    """Return a message with the registry's path as from the working folder, or, elsewhere, as its name alone."""
    full = Path(registry).resolve()
    if not full.is_dir():  # then the path itself is what is wrong
        return text
    try:
        short = str(full.relative_to(Path.cwd()))
    except ValueError:
        short = full.name
    for long in sorted({str(full), str(registry)} - {short, "."}, key=len, reverse=True):
        text = re.sub(rf"(?<![\w./-]){re.escape(long)}(?![\w-])", short.replace("\\", "/"), text)
    return text


CHECKOUT = Path(__file__).resolve().parents[2]
CHECKOUT_REGISTRY = CHECKOUT / "registry"
RegistryOption = Annotated[Path, typer.Option("--registry", help="The registry folder.")]
DAGSTER_HOME = "DAGSTER_HOME"
LOOPBACK = "127.0.0.1"
PORTS_TRIED = 100
LARGEST_PORT = 2**16 - 1
SIGNAL_EXIT_BASE = 128


def run(
    job: Annotated[
        str, typer.Argument(help="everything, prepare, train_eagle3 and its like, evaluate, serve, resolve ...")
    ],
    name: Annotated[str | None, typer.Argument(metavar="TARGET", help="The same as --target.")] = None,
    target: Annotated[str | None, typer.Option("--target", "-t", help="The registry's name of the model.")] = None,
    config: Annotated[list[Path] | None, typer.Option("--config", "-c", help="Run config (YAML); any number.")] = None,
    registry: RegistryOption = CHECKOUT_REGISTRY,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="Python file of a code location of your own, with its registry.")
    ] = None,
) -> None:
    """Run a job for one target, in a terminal or in CI. If it fails, the last lines say why; exit code not 0."""
    try:
        if name is not None and target is not None and name != target:
            raise ConfigError(f"a run is of one target: found {name} and --target {target}")
        target = target or name
        for path in [*(config or []), *([file] if file else [])]:
            if not path.is_file():
                raise ConfigError(f"{path}: no such file")
        if file is None:
            _require_job(job, target, registry)
            file = prepare_location(registry, target)
        elif registry != CHECKOUT_REGISTRY:
            raise ConfigError(
                f"--registry {registry}, --file {file}: expected one of them: a file has a registry of its own"
            )
    except (DraftworksError, OSError) as error:
        raise report_error(error) from None
    arguments = ["-m", "jobs.run", job]
    arguments += [] if target is None else ["--target", target]
    arguments += [word for path in config or [] for word in ("-c", str(path))]
    typer.echo(f"{job}{'' if target is None else f' of target {target}'}: starting; the first step follows in seconds")
    raise typer.Exit(run_in_process_group(arguments + ([] if file is None else ["-f", str(file)])))


def _require_job(job: str, target: str | None, registry: Path) -> None:
    from draftworks.programs.code_location import require_job  # half a second, see above
    from draftworks.targets.registry import Registry

    require_job(job, target, Registry(registry))


def prepare_location(root: Path, target: str | None) -> Path | None:
    """Return the Python file of a registry's code location; None for the checkout's, which is a module.

    Raises:
        ConfigError: the folder is no registry; its deployment, or the target's own entry, is missing or invalid.
    """
    from draftworks.programs.code_location import write_code_location
    from draftworks.targets.registry import Registry

    registry = Registry(root)
    registry.list_targets()
    registry.load_deployment()
    if target is not None:
        load_entry(registry, target)
    return None if is_of_checkout(root) else write_code_location(registry, CHECKOUT).definitions


def load_entry(registry: Registry, name: str) -> None:
    """Read all that a target's entry names in the registry. Raises ConfigError; other targets' entries do not matter."""
    target = registry.load_target(name)
    unknown = registry.find_unknown_names(target)
    if unknown:
        raise ConfigError("\n".join(unknown))
    for dataset in target.training_datasets:
        registry.load_dataset(dataset)
    for eval_set in target.evals:
        registry.load_dataset(registry.load_eval_set(eval_set).dataset)


def is_of_checkout(root: Path) -> bool:
    return root.resolve() == CHECKOUT_REGISTRY.resolve()


def ui(
    port: Annotated[int, typer.Option(help="Of the loopback interface.")] = 3000,
    registry: RegistryOption = CHECKOUT_REGISTRY,
) -> None:
    """Start the Dagster UI and daemon; Ctrl-C ends them."""
    workspace = CHECKOUT / "workspace.yaml"
    try:
        require_free_port(port)
        if not is_of_checkout(registry):
            from draftworks.programs.code_location import write_code_location
            from draftworks.targets.registry import Registry

            Registry(registry).list_targets()
            workspace = write_code_location(Registry(registry), CHECKOUT).workspace
    except (DraftworksError, OSError) as error:
        raise report_error(error) from None
    if importlib.util.find_spec("dagster_webserver") is None:
        raise report_error("the UI is not installed: pip install -e '.[ui]'")
    replace_process(["-m", "dagster", "dev", "-w", str(workspace), "-h", LOOPBACK, "-p", str(port)])


def run_in_process_group(arguments: list[str]) -> int:
    """Run Python in a process group of its own, pass SIGINT and SIGTERM on to it, and return its exit code.

    Ctrl-C at a terminal goes to the whole process group. In the same group, every step would get the signal twice, from
    the terminal and from its run, the second time while it saves; and Dagster's helpers would print tracebacks.
    """
    command = [*stop_signals.build_shim_command(), sys.executable, *arguments]
    held = subprocess.Popen(command, env=build_dagster_environment(), process_group=0)
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda received, _: held.send_signal(received))
    code = held.wait()
    return code if code >= 0 else SIGNAL_EXIT_BASE - code


def replace_process(arguments: list[str]) -> NoReturn:
    """Replace this process by Python with these arguments."""
    os.execve(sys.executable, [sys.executable, *arguments], build_dagster_environment())


def build_dagster_environment() -> dict[str, str]:
    """Return this process's environment, with this checkout's DAGSTER_HOME if none is set."""
    return {DAGSTER_HOME: str(CHECKOUT / ".dagster"), "PYTHONWARNINGS": "ignore", **os.environ}


def require_free_port(port: int) -> None:
    """Raise ConfigError if the port of the loopback interface is in use; the message names a free one."""
    if not 0 <= port <= LARGEST_PORT:
        raise ConfigError(f"port: expected 1 to {LARGEST_PORT}, found {port}")
    if is_port_free(port):
        return
    free = next((other for other in range(port + 1, port + PORTS_TRIED) if is_port_free(other)), None)
    remedy = "end it" if free is None else f"end it, or take another: draftworks ui --port {free}"
    raise ConfigError(f"port {port} of {LOOPBACK}: expected a free port, found a server (another `make ui`?): {remedy}")


def is_port_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: a port just left counts as free
        try:
            probe.bind((LOOPBACK, port))
        except (OSError, OverflowError):
            return False
    return True


def report_error(reason: object) -> typer.Exit:
    """Print an error and return the exit to raise, with code 1."""
    context = click.get_current_context(silent=True)
    registry = None if context is None else context.params.get("registry")
    text = str(reason) if registry is None else shorten_paths(str(reason), registry)
    typer.echo(f"error: {text}", err=True)
    return typer.Exit(1)
