"""The bundle of a draft that is, or may be, in service: kept with the other results, found by the record."""

from __future__ import annotations

from pathlib import Path

from draftworks.bundle.description import BundleSubject, describe_bundle
from draftworks.bundle.layout import list_export_files, write_layout
from draftworks.bundle.reading import read_bundle
from draftworks.config.registry_files import TargetSpec
from draftworks.config.run_files import TargetFiles
from draftworks.errors import DraftworksError, StoreError
from draftworks.service.candidate import RefusedError
from draftworks.service.register import Bundle, ServedDraft, require_present
from draftworks.storage.artifacts import Artifact, ArtifactStore, BuildResult
from draftworks.storage.files import remove
from draftworks.storage.identity import digest
from draftworks.storage.names import of_strategy
from draftworks.targets.registry import Registry

OCI = "oci"
"""The layout in the folder of a stored bundle."""
REVISION = 1
"""Of how bundles are written: it is raised when equal drafts get other bundles."""


def find_subject(
    artifacts: ArtifactStore,
    registry: Registry,
    target: TargetSpec,
    files: TargetFiles,
    strategy: str,
    served: ServedDraft,
) -> BundleSubject:
    """Return a draft with all that its bundle is made from.

    Raises:
        RefusedError: it was trained for other weights than the target has.
        StoreError: its export or its report is not there any more.
    """
    names, where = of_strategy(strategy), f"target {target.name}, {strategy}, draft {served.digest}"
    if served.target_digest != files.digest:
        raise RefusedError(
            f"{where}: was trained for the weights {served.target_digest}, the target's are {files.digest}: a bundle says of "
            "which target it is"
        )
    require_present(artifacts.root, served)
    found = (
        _require(artifacts, names.draft, target.name, served.digest, where),
        _require(artifacts, names.report, target.name, served.report, where),
        _require(artifacts, names.export, target.name, Path(served.path).name, where),
    )
    datasets = [registry.load_dataset(name) for name in dict.fromkeys(target.training_datasets)]
    return BundleSubject(*found, files, datasets)


def store_bundle(artifacts: ArtifactStore, subject: BundleSubject) -> Bundle:
    """Return the stored bundle of a draft, made now unless there is an intact one.

    Raises:
        StoreError: a file of the export is not as its record says, or the report is damaged.
    """
    asset = of_strategy(subject.made_from.strategy).bundle
    description = describe_bundle(subject)

    def build(out: Path) -> BuildResult:
        remove(out / OCI)  # of an attempt that was killed
        (out / OCI).mkdir()
        written = write_layout(out / OCI, list_export_files(subject.export), description, link=True)
        return BuildResult(written.digest, {"files": written.files, "bytes": written.nbytes}, own_digests=(OCI,))

    identity = {
        "draft": subject.draft.path.name,
        "report": subject.report.path.name,
        "export": subject.export.path.name,
        "files": digest(subject.export.files),
        "description": digest(description),
        "revision": REVISION,
    }
    stored = artifacts.obtain(asset, subject.target.name, identity, build, still_good=_is_whole)
    path = (stored.path / OCI).relative_to(artifacts.root).as_posix()
    return Bundle(stored.data_version, path)


def _is_whole(stored: Artifact) -> bool:
    """Whether a stored bundle is as its record says, by the sizes of its large files."""
    try:
        read_bundle(stored.path / OCI, stored.data_version, whole=False)
    except DraftworksError:
        return False
    return True


def _require(artifacts: ArtifactStore, asset: str, target: str, name: str, where: str) -> Artifact:
    found = next((one for one in artifacts.list_all(asset, target) if one.path.name == name), None)
    if found is None:
        raise StoreError(
            f"{where}: its {asset} {name} is not there any more: was it pruned? Run draftworks run everything --target {target}"
        )
    return found
