"""The strategies that the entries of a registry name. Torch-free."""

from __future__ import annotations

import re

from draftworks.config.registry_files import TargetSpec
from draftworks.config.strategies import list_strategies
from draftworks.errors import DraftworksError
from draftworks.targets.registry import Registry

_OWN_KEY = re.compile(rb"^(strategies)[ \t]*:", re.MULTILINE)


def list_used_strategies(registry: Registry) -> list[str]:
    """Return the strategies that at least one target uses, sorted.

    An entry is parsed only if its text has the name of a strategy that none before it uses. One that cannot be loaded
    counts as using all that its text mentions: what exists then does not change when the mistake is put right.
    """
    names = b"|".join(re.escape(name.encode()) for name in list_strategies())
    mention = re.compile(rb"(?<![\w-])(%s)(?![\w-])" % names)
    found: set[str] = set()
    for target in registry.list_targets():
        mentioned = registry.find_in_target_file(target, mention)
        if not registry.find_in_target_file(target, _OWN_KEY):
            mentioned |= _list_default_strategies()
        if mentioned <= found:
            continue
        try:
            found.update(registry.load_target(target).strategies)
        except DraftworksError:
            found |= mentioned
    return sorted(found)


def _list_default_strategies() -> set[str]:
    """Return the strategies of an entry without the key `strategies`."""
    return set(TargetSpec.model_fields["strategies"].get_default(call_default_factory=True))


def describe_new_strategy(strategy: str) -> str:
    """Return what to do about a strategy that no entry named when the code location was loaded."""
    return f"strategy {strategy} is new to this code location: reload it (in the UI under Deployment)"
