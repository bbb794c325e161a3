"""What a survey looks at: the folder of results, the feature stores, the names in the registry. Torch-free."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from draftworks.config.retention import RetentionSpec
from draftworks.config.run_files import StoreSpec
from draftworks.errors import ConfigError
from draftworks.targets.feature_stores import list_stores
from draftworks.targets.registry import Registry


@dataclass(frozen=True)
class Place:
    """What a survey looks at.

    Attributes:
        targets: names in the registry. Results of other targets are in use only if they are pinned or in service.
        stores: feature stores.
        now: seconds since the epoch.
    """

    var: Path
    settings: RetentionSpec
    targets: frozenset[str]
    stores: tuple[StoreSpec, ...] = ()
    now: float = field(default_factory=time.time)

    @classmethod
    def of(cls, registry: Registry) -> Place:
        """Return the place of a registry as it is now.

        Raises:
            ConfigError: `deployment.yaml` cannot be read, or the registry has no targets, which would leave nothing in use.
        """
        targets = frozenset(registry.list_targets())
        if not targets:
            raise ConfigError(
                f"{registry.root}: expected a registry with targets, found none, so nothing would be in use"
            )
        settings = registry.load_deployment().retention
        return cls(registry.resolve_var_folder(), settings, targets, tuple(list_stores(registry)))

    def is_old(self, newest: float, days: float | None = None) -> bool:
        return newest <= self.now - (self.settings.keep_days if days is None else days) * 86400
