"""All probes of an installation, and what they found with secrets masked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from draftworks.capture.software import ENGINE_SOFTWARE
from draftworks.config.launchers import LOCAL
from draftworks.errors import DraftworksError
from draftworks.preflight.findings import Finding
from draftworks.preflight.installation import deployment_probes, machine_probes
from draftworks.preflight.installation.deployment_probes import probe_dagster
from draftworks.preflight.installation.machine_probes import Probe, probe_versions, run_probes
from draftworks.storage.http_call import HttpClient, NoAnswerError
from draftworks.storage.words import mask_secrets
from draftworks.targets.registry import Registry

LIMIT_S = 14.0
"""For all probes together, which run at once."""
_SHARE_OF_ASKING = 0.85
"""Of this time a process that a probe starts may take so much: its own line says more than that the probe hangs."""


@dataclass(frozen=True)
class Installation:
    """What is examined.

    Attributes:
        env: environment of runs.
        checkout: folder of this project.
    """

    registry: Registry
    env: Mapping[str, str]
    checkout: Path

    def examine(self, limit_s: float = LIMIT_S) -> list[Finding]:
        """Run all probes and return their lines, without secrets."""
        lines = run_probes(self.list_probes(_SHARE_OF_ASKING * limit_s), limit_s)
        try:
            named = list(deployment_probes.find_named_variables(self.registry))
        except DraftworksError:
            named = []
        return [
            replace(
                line, text=mask_secrets(line.text, self.env, named), remedy=mask_secrets(line.remedy, self.env, named)
            )
            for line in lines
        ]

    def list_probes(self, ask_s: float) -> Sequence[Probe]:
        """Return all probes; those that start a process give it `ask_s` seconds."""
        registry = self.registry
        written = deployment_probes.list_written_folders(registry, self.env, self.checkout)
        return [
            Probe("versions", lambda: probe_versions(self.checkout)),
            Probe("registry", lambda: deployment_probes.probe_registry(registry)),
            *(Probe(deployment_probes.DISK, lambda each=each: deployment_probes.probe_disk(each)) for each in written),
            *(
                Probe(deployment_probes.PERMISSIONS, lambda each=each: deployment_probes.probe_permissions(each))
                for each in written
            ),
            Probe("gpu", lambda: machine_probes.probe_gpu(ask_s)),
            *(
                Probe(key, lambda each=each: machine_probes.probe_engine(registry, each, ask_s))
                for key, each in ENGINE_SOFTWARE.items()
            ),
            Probe("dagster", lambda: probe_dagster(registry.root, self.env, self.checkout, ask_s)),
            Probe("clocks", lambda: machine_probes.probe_clock(self._has_other_hosts())),
            *(
                Probe(deployment_probes.CLOCKS, lambda each=each: deployment_probes.probe_clock_of_folder(each))
                for each in written
            ),
            Probe("object storage", lambda: deployment_probes.probe_object_storage(registry, ask_s)),
            Probe("schedulers", lambda: deployment_probes.probe_schedulers(registry, ask_s)),
            Probe("secrets", lambda: deployment_probes.probe_variables(registry, self.env)),
            Probe("processes", machine_probes.probe_orphans),
            Probe("leftovers", lambda: deployment_probes.probe_leftovers(registry.resolve_var_folder())),
            Probe("stores", lambda: deployment_probes.probe_stores(registry.resolve_var_folder())),
        ]

    def _has_other_hosts(self) -> bool:
        deployment = self.registry.load_deployment()
        return deployment.launcher.kind != LOCAL or deployment.features.kind != "local"


def probe_ui_port(port: int, is_free: bool, host: str) -> Iterator[Finding]:
    """Yield whether the port of the UI is free, or the UI itself serves there."""
    if is_free:
        yield Finding("ok", f"{port} is free for the UI", "ports")
        return
    try:
        with HttpClient(f"http://{host}:{port}", timeout_s=2.0) as http:
            is_dagster = "dagster" in http.call("GET", "/server_info").text
    except NoAnswerError:
        is_dagster = False
    if is_dagster:
        yield Finding("ok", f"Dagster's UI serves at {host}:{port}", "ports")
    else:
        yield Finding("warning", f"{port} is in use by another server", "ports", f"draftworks ui --port {port + 1}")
