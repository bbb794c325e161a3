"""The workspace resource: the registry, the results made from it, and the folders of both."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import dagster as dg
from pydantic import Field

from draftworks.capture.software import ENGINE_SOFTWARE, EnginePython
from draftworks.config.capture import EngineInstallation, SGLangSpec, VLLMSpec
from draftworks.config.launchers import LauncherSpec
from draftworks.config.registry_files import CaptureSpec, DatasetSpec, TargetSpec
from draftworks.config.run_files import StoreSpec, TargetFiles
from draftworks.data.sources import digest_dataset
from draftworks.planning.identities import Results
from draftworks.preflight.examine import TARGET_CHECKS
from draftworks.storage.artifacts import ArtifactStore
from draftworks.storage.identity import FileDigests
from draftworks.storage.object_access import parse_object_url
from draftworks.storage.object_store import ObjectStore, Publication
from draftworks.targets.feature_stores import locate_feature_store
from draftworks.targets.registry import Registry
from draftworks.targets.training_data import digest_training_data
from draftworks.targets.weights import WEIGHT_CHECKS

Engine = TypeVar("Engine", bound=EngineInstallation)


class Workspace(dg.ConfigurableResource):
    """Access to a registry and to the results made from it; everything is read on first use."""

    registry_root: str = Field(description="Folder with targets/, datasets/ and deployment.yaml.")

    @cached_property
    def registry(self) -> Registry:
        return Registry(Path(self.registry_root))

    @cached_property
    def var(self) -> Path:
        return self.registry.resolve_var_folder()

    @cached_property
    def artifacts(self) -> ArtifactStore:
        return ArtifactStore(self.var, self.digests)

    @cached_property
    def digests(self) -> FileDigests:
        return FileDigests(self.var / "digests.json")

    @property
    def weight_checks(self) -> Path:
        """Folder of the verdicts of `check_target_weights`; keys are content."""
        return self.var / WEIGHT_CHECKS

    @property
    def target_checks(self) -> Path:
        """Folder of the verdicts of `examine_before_run`; keys are content."""
        return self.var / TARGET_CHECKS

    @cached_property
    def results(self) -> Results:
        return Results(self.registry, self.artifacts, self.digests)

    def resolve_target_files(self, target: str) -> TargetFiles:
        """Return files, digests and shape of a target as they are now."""
        return self.results.resolve_target_files(target)

    def resolve_launcher(self, target: str, program: str) -> LauncherSpec:
        """Return the launcher settings of one program's jobs for a target."""
        return self.registry.resolve_launcher(self.registry.load_target(target), program)

    def read_dataset_version(self, dataset: DatasetSpec) -> str:
        """Return the content digest of a data set's files as they are now."""
        return digest_dataset(dataset, self.registry.root, self.digests)

    def read_training_data_version(self, target: TargetSpec) -> str:
        """Return the content digest of the data that a target's drafts are trained on, as it is now."""
        if target.mix is None and not target.arrives:
            return self.read_dataset_version(self.registry.load_dataset(target.dataset))
        return digest_training_data(target, self.registry, self.digests)

    def locate_feature_store(self, files: TargetFiles) -> StoreSpec:
        """Return the feature store of a target's weights, shared by all runs, strategies and targets of these weights.

        Raises:
            StoreError: only an earlier version stored features of this target, under its name.
        """
        return locate_feature_store(self.registry, files)

    @cached_property
    def publication(self) -> Publication | None:
        """The object storage that exports and reports are copied to; None if the deployment names none.

        Raises:
            ConfigError: obstore is not installed, or the environment lacks the keys.
        """
        deployment = self.registry.load_deployment()
        if deployment.publish is None:
            return None
        url = deployment.publish.url
        return Publication(ObjectStore.open(url, deployment.object_storage.select(parse_object_url(url).bucket)))

    @property
    def sglang(self) -> SGLangSpec:
        """Settings of SGLang. Links in the path of its Python are not resolved: a virtual environment is found by
        that path."""
        return self._with_absolute_python(self.registry.load_deployment().sglang)

    @property
    def vllm(self) -> VLLMSpec:
        """Settings of vLLM, as those of `sglang`."""
        return self._with_absolute_python(self.registry.load_deployment().vllm)

    def _with_absolute_python(self, engine: Engine) -> Engine:
        return engine.model_copy(update={"python": os.path.abspath(self.registry.root / engine.python)})

    def find_python(self, capture: CaptureSpec) -> EnginePython | None:
        """Return the interpreter of programs that load a target's engine; None for the current one."""
        installed = {"sglang": self.sglang, "vllm": self.vllm}
        inside = capture.inside
        return None if inside is None else EnginePython(Path(installed[inside].python), ENGINE_SOFTWARE[inside])

    @property
    def loop_cache(self) -> Path:
        """Folder of measurements of rung 4; keys are content, so all targets, drafts and reports share it."""
        return self.var / "loop_cache"

    @property
    def rival_cache(self) -> Path:
        """Folder of walks of what proposes without a model; shared in the same way."""
        return self.var / "rival_cache"

    def locate_answers(self, files: TargetFiles) -> Path:
        """Return the folder of answers of a target's weights, one record per conversation, for all runs."""
        return self.var / "answers" / files.digest

    def locate_run_folder(self, run_id: str, step: str) -> Path:
        """Return the folder of run file, messages and log of a launched job."""
        return self.var / "runs" / run_id / step
