"""A registry whose target `small` has servers in production, and an observer with a clock of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from service_site import ServiceSite

from draftworks.production.observer import Observation, Observer
from draftworks.production.standing import ServerStanding, assess_all
from draftworks.storage.artifacts import ArtifactStore
from draftworks.targets.registry import Registry


@dataclass
class ObservedSite:
    """Servers of the target `small`, read at the time `now`.

    Attributes:
        site: with drafts that can be put into service.
        environment: has the servers' keys.
    """

    site: ServiceSite
    now: float = 1_000_000.0
    environment: dict[str, str] = field(default_factory=dict)

    @classmethod
    def make(cls, root: Path, servers: list[Mapping[str, Any]], **options: Any) -> ObservedSite:
        entry = {"servers": [{"strategy": "eagle3", **server} for server in servers], **options}
        return cls(ServiceSite(root, entry=entry))

    @property
    def registry(self) -> Path:
        return self.site.registry

    def change_entry(self, **changes: Any) -> None:
        path = self.registry / "targets" / "small.yaml"
        path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **changes}))

    def open(self) -> Observer:
        registry = Registry(self.registry)
        observer = Observer.of(registry.load_target("small"), registry.root, registry.resolve_var_folder())
        return Observer(observer.var, observer.target, observer.models, self.environment, lambda: self.now)

    def observe(self, after_s: float = 0.0) -> list[Observation]:
        self.now += after_s
        return self.open().observe()

    def assess(self) -> list[ServerStanding]:
        observer = self.open()
        artifacts = ArtifactStore(observer.var)
        return assess_all(observer.recall(), observer.target.observation, artifacts, "small")
