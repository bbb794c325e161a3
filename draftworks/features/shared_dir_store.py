"""A feature store in a folder that several machines share (NFS, Lustre): one file per sample and generation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from draftworks.errors import StoreError
from draftworks.features.contracts import FeatureHandle, FeatureStore, SampleRef, StoredFile
from draftworks.features.leases import LeaseTable
from draftworks.features.sample_file import SampleHeader, read_sample_header, read_tensor, write_sample
from draftworks.features.sample_folder import SampleFolder, SampleLocation, age_s, file_size, remove, sample_key
from draftworks.features.sealing import AuthPolicy
from draftworks.features.specs import fill_in_ref, require_all_features, require_spec
from draftworks.storage.files import fsync, open_regular

if TYPE_CHECKING:
    from torch import Tensor


class SharedDirFeatureStore(FeatureStore):
    """Samples that any number of processes on any number of machines put and get. Thread-safe.

    `put` publishes a whole sample at once and supersedes earlier generations of it. Leases belong to the process: with
    `retain_on_release=False` the last release here frees the file, whoever else has read it. Tensors are copies in
    memory, valid beyond their lease.

    Args:
        root: created if absent. Its file system must have hard links.
        retain_on_release: keep a sample when its last lease is released, to be read again (evaluation, epochs).
        policy: with a secret, every file must be sealed with it, and a store that was made otherwise is refused.
        max_hold_age_s: leases older than this are dropped by `gc`.
        staging_age_s: a staging file not written to for this long counts as a crashed writer's.
        max_sample_age_s: unleased samples older than this are removed by `gc`; None keeps them.
    """

    lease_bound = False

    def __init__(
        self,
        root: Path,
        retain_on_release: bool = False,
        policy: AuthPolicy | None = None,
        max_hold_age_s: float = 3600.0,
        staging_age_s: float = 3600.0,
        max_sample_age_s: float | None = None,
    ) -> None:
        self.retain_on_release = retain_on_release
        self._policy = policy or AuthPolicy()
        self._folder = SampleFolder(root, self._policy)
        self._staging_age_s = staging_age_s
        self._max_sample_age_s = max_sample_age_s
        self._leases = LeaseTable(max_hold_age_s)
        self._aborts: Counter[str] = Counter()
        self._lock = RLock()

    @property
    def root(self) -> Path:
        return self._folder.root

    @property
    def uri(self) -> str:
        """The same on every machine, wherever each mounts the folder."""
        return f"disagg://{self._folder.store_id}"

    def put(self, ref: SampleRef, tensors: Mapping[str, Tensor]) -> SampleRef:
        """Publish all features of a sample; the returned ref's keys are `{file name}/{feature}`.

        Raises:
            StoreError: not the features that the ref names, the disk refuses, or the sample was aborted meanwhile.
        """
        require_all_features(ref, tensors)
        _require_safe_names(ref, tensors)
        place = self._publish(ref.sample_id, tensors)
        self._folder.remove_below(place.sample_key, self._folder.newest(place.sample_key))
        keys = {name: f"{place.file_name}/{name}" for name in tensors}
        return fill_in_ref(ref, tensors, self.uri, keys)

    def get(self, ref: SampleRef) -> tuple[dict[str, Tensor], FeatureHandle]:
        """Return tensors by feature name; StoreError also if the ref is of another store or was superseded."""
        place = self._place_of(ref)
        with self._lock:
            handle = self._leases.grant(ref.sample_id, place.generation, [place])
        try:
            return self._read(ref, place), handle
        except BaseException:
            with self._lock:
                self._leases.end(handle)
            raise

    def release(self, handle: FeatureHandle) -> None:
        """Return the lease. Without `retain_on_release`, the last one of a generation frees its file and older ones."""
        with self._lock:
            lease = self._leases.end(handle)
            if lease is None or self.retain_on_release or any(map(self._leases.holds, lease.holds)):
                return
            self._folder.remove_below(sample_key(lease.sample_id), lease.generation + 1)

    def abort(self, sample_id: str) -> None:
        """Fail a put of the sample that is under way, and void its leases, so that releasing them frees nothing.

        What is published stays, and can be read again.
        """
        with self._lock:
            self._aborts[sample_key(sample_id)] += 1
            self._leases.void(sample_id)

    def gc(self) -> int:
        """Drop old leases; remove crashed staging files, superseded generations, and samples beyond their age.

        A staging file is judged by its age, not by its writer: processes of other machines, or of containers that share
        this host's name, cannot be checked.
        """
        with self._lock:
            self._leases.expire()
        crashed = [path for path in self._folder.staging_files() if age_s(path) > self._staging_age_s]
        places = self._folder.places()
        newest: dict[str, int] = {}
        for place in places:
            newest[place.sample_key] = max(place.generation, newest.get(place.sample_key, 0))
        superseded = {place for place in places if place.generation < newest[place.sample_key]}
        expired = {place for place in places if self._expired(place)}
        return sum(map(remove, crashed)) + sum(remove(self._folder.path(place)) for place in superseded | expired)

    def health(self) -> dict[str, Any]:
        places = self._folder.places()
        with self._lock:
            leases = len(self._leases)
        return {
            "root": str(self.root),
            "uri": self.uri,
            "samples": len({place.sample_key for place in places}),
            "bytes": sum(file_size(self._folder.path(place)) for place in places),
            "staging_files": len(self._folder.staging_files()),
            "leases": leases,
            "sealed_by": self._policy.kind,
            "retain_on_release": self.retain_on_release,
        }

    def find_newest_file(self, sample_id: str) -> str | None:
        """Return the name of the newest file of a sample, the prefix of its keys; None if there is none."""
        key = sample_key(sample_id)
        newest = self._folder.newest(key)
        return SampleLocation(key, newest).file_name if newest else None

    def remove_file(self, file_name: str) -> int:
        """Remove a file that `find_newest_file` named, and older ones of its sample; return the bytes freed."""
        place = _parse_place(file_name)
        return self._folder.remove_below(place.sample_key, place.generation + 1)

    def list_files(self, besides: Collection[str]) -> list[StoredFile]:
        """Return the newest file of each sample, by name, without those whose `sample_key` is in `besides`."""
        newest: dict[str, SampleLocation] = {}
        for place in self._folder.places():
            if place.sample_key not in besides:
                newest[place.sample_key] = max(
                    place, newest.get(place.sample_key, place), key=lambda one: one.generation
                )
        found: list[StoredFile] = []
        for place in newest.values():
            with suppress(FileNotFoundError):
                stat = self._folder.path(place).stat()
                found.append(StoredFile((place.file_name,), stat.st_size, stat.st_mtime))
        return found

    def set_aside(self, file_name: str) -> Path:
        """Rename such a file, so that its sample is gone for every process; return the new path, for its removal.

        If this process ends before, `gc` removes it as it does what crashed writers left.
        """
        place = _parse_place(file_name)
        aside = self._folder.set_aside(place)
        self._folder.remove_below(place.sample_key, place.generation)
        return aside

    def find_absent(self, sample_ids: Iterable[str]) -> list[str]:
        """Return the sample ids that have no file, in the order given, by one listing of the folder."""
        present = {place.sample_key for place in self._folder.places()}
        return [sample_id for sample_id in sample_ids if sample_key(sample_id) not in present]

    def _publish(self, sample_id: str, tensors: Mapping[str, Tensor]) -> SampleLocation:
        key = sample_key(sample_id)
        aborts = self._aborts[key]
        while True:
            place = self._folder.next_place(key)
            try:
                with self._folder.stage() as staged:
                    write_sample(staged, sample_id, place.generation, tensors, self._policy)
                    fsync(staged)
                    with self._lock:
                        if self._aborts[key] != aborts:
                            raise StoreError(f"sample {sample_id} was aborted while it was being put")
                        if self._folder.publish(staged, self._folder.path(place)):
                            return place
            except (OSError, SafetensorError) as error:
                raise StoreError(
                    f"sample {sample_id} cannot be written to {self._folder.path(place)}: {error}"
                ) from error

    def _place_of(self, ref: SampleRef) -> SampleLocation:
        if ref.feature_store_uri != self.uri:
            raise StoreError(
                f"sample {ref.sample_id} is in the store {ref.feature_store_uri or 'of nobody'}, "
                f"expected {self.uri} ({self.root})"
            )
        places = {SampleLocation.parse(key.partition("/")[0]) for key in ref.feature_keys.values()}
        place = places.pop() if len(places) == 1 else None
        if place is None or place.sample_key != sample_key(ref.sample_id):
            raise StoreError(
                f"sample {ref.sample_id}: expected feature keys of one file of this sample, "
                f"{sample_key(ref.sample_id)}.g<generation>.safetensors/<feature>, "
                f"found {sorted(ref.feature_keys.values())}"
            )
        return place

    def _read(self, ref: SampleRef, place: SampleLocation) -> dict[str, Tensor]:
        path = self._folder.path(place)
        try:
            with open_regular(path) as stream:
                # Opened first: on a network file system a listing may be older than the file.
                if self._folder.newest(place.sample_key) > place.generation:
                    raise StoreError(self._absent(place))
                header = read_sample_header(stream, path, self._policy)
                stored = {name: key.partition("/")[2] for name, key in ref.feature_keys.items()}
                _require_agreement(ref, place, header, stored)
                return {name: read_tensor(stream, header, at) for name, at in stored.items()}
        except FileNotFoundError as error:
            raise StoreError(f"sample {ref.sample_id}: {self._absent(place)}") from error
        except StoreError as error:
            raise StoreError(f"sample {ref.sample_id}: {error}") from error
        except OSError as error:
            raise StoreError(f"sample {ref.sample_id}: {path} cannot be read: {error}") from error

    def _absent(self, place: SampleLocation) -> str:
        where = f"generation {place.generation} in {self.root}"
        newest = self._folder.newest(place.sample_key)
        if newest not in (0, place.generation):
            return (
                f"{where} is superseded by generation {newest}, which was put later. Use the ref that this put returned"
            )
        kept = "removed by hand or by gc" if self.retain_on_release else "released for the last time, or removed by gc"
        return f"{where} is gone ({place.file_name}): {kept}. Put it again"

    def _expired(self, place: SampleLocation) -> bool:
        if self._max_sample_age_s is None or self._leases.holds(place):
            return False
        return age_s(self._folder.path(place)) > self._max_sample_age_s


def _parse_place(file_name: str) -> SampleLocation:
    place = SampleLocation.parse(file_name)
    if place is None:
        raise StoreError(f"{file_name!r} is not the file of a sample")
    return place


def _require_safe_names(ref: SampleRef, tensors: Mapping[str, Tensor]) -> None:
    """Raise StoreError unless safetensors can carry the tensors' names."""
    bad = [name for name in tensors if not name.isprintable() or name == "__metadata__"]
    if bad:
        raise StoreError(f"sample {ref.sample_id}: features cannot be named {bad}")


def _require_agreement(ref: SampleRef, place: SampleLocation, header: SampleHeader, stored: Mapping[str, str]) -> None:
    """Raise StoreError unless the file is this sample's and has the ref's features in their shapes and dtypes."""
    if (header.sample_id, header.generation) != (ref.sample_id, place.generation):
        raise StoreError(
            f"{header.path} holds sample {header.sample_id!r} of generation {header.generation}, expected "
            f"{ref.sample_id!r} of generation {place.generation}: it was renamed"
        )
    for name, at in stored.items():
        record = header.tensors.get(at)
        if record is None:
            raise StoreError(f"{header.path} has no feature {at}, it has {sorted(header.tensors)}")
        require_spec(ref.feature_specs.get(name), record.shape, record.dtype, f"{header.path}, feature {name}")
