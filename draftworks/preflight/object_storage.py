"""Checks of the deployment's object storage: its library and keys, and whether the server lets this user write. Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from draftworks.config.deployment import DeploymentSpec
from draftworks.errors import ConfigError, DraftworksError
from draftworks.preflight.findings import Findings
from draftworks.storage.object_access import parse_object_url
from draftworks.storage.object_store import ObjectStore
from draftworks.targets.registry import Registry

FEATURES, PUBLISH = "features.url", "publish.url"
"""Keys of the deployment that name a place in object storage."""


def check_object_storage(registry: Registry, findings: Findings) -> None:
    """Check the library and the keys of the deployment's object storage. Nothing is sent."""
    deployment = registry.load_deployment()
    for key, url in list_storage_places(deployment):
        try:
            _open(deployment, url)
        except ConfigError as error:
            findings.error(_describe(key, error))


def find_storage_problems(
    registry: Registry, keys: Collection[str] = (FEATURES, PUBLISH), longest_wait_s: float | None = None
) -> list[str]:
    """Write a small object to places of the deployment, and remove it; return what went wrong, keys that are missing too.

    Args:
        longest_wait_s: for a server that does not answer, where the deployment waits longer.
    """
    deployment, found = registry.load_deployment(), list[str]()
    for key, url in list_storage_places(deployment):
        try:
            if key in keys:
                _open(deployment, url, longest_wait_s).require_writable()
        except DraftworksError as error:
            found.append(_describe(key, error))
    return found


def list_storage_places(deployment: DeploymentSpec) -> Iterator[tuple[str, str]]:
    """Yield each key of the deployment that names a place in object storage, with its URL."""
    if deployment.features.url is not None:
        yield FEATURES, deployment.features.url
    if deployment.publish is not None:
        yield PUBLISH, deployment.publish.url


def _open(deployment: DeploymentSpec, url: str, longest_wait_s: float | None = None) -> ObjectStore:
    access = deployment.object_storage.select(parse_object_url(url).bucket)
    if longest_wait_s is not None and access.retry_s > longest_wait_s:
        access = access.model_copy(update={"retry_s": longest_wait_s})
    return ObjectStore.open(url, access)


def _describe(key: str, error: DraftworksError) -> str:
    return f"deployment: {key}: {error}"
