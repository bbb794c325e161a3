"""What each asset looks at while a run in this process makes it: results of other assets, the target's files, the data set."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import dagster as dg
import pytest

from draftworks.planning.identities import Results
from draftworks.storage.artifacts import ArtifactStore
from draftworks.storage.names import DATASET, TARGET_MODEL
from draftworks.targets import training_data
from spec_assets import common, recipes, reports


@contextmanager
def recorded_reads() -> Iterator[dict[str, set[str]]]:
    """Names of what was read, by name of the asset that read it. Checks are no assets, and a step reads what it made itself."""
    found: dict[str, set[str]] = defaultdict(set)
    at_work: list[str] = []
    begin, translate_errors = common.end_with_run_process, common.translate_errors

    def begun(context: dg.AssetExecutionContext) -> None:
        begin(context)
        at_work.append(context.op_execution_context.op_handle.name)

    @contextmanager
    def until_the_end() -> Iterator[None]:
        try:
            with translate_errors():
                yield
        finally:
            at_work.clear()

    def record(name: str) -> None:
        for reader in at_work:
            if name != reader:
                found[reader].add(name)

    def noted(method: Callable[..., Any], name: str | None = None) -> Callable[..., Any]:
        def call(self: Any, first: Any, *rest: Any, **options: Any) -> Any:
            record(first if name is None else name)
            return method(self, first, *rest, **options)

        return call

    def unnoted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            asleep = at_work.copy()
            at_work.clear()
            try:
                return function(*args)
            finally:
                at_work.extend(asleep)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "end_with_run_process", begun)
        patch.setattr(common, "translate_errors", until_the_end)
        for name in ("load_current", "find", "list_all"):
            patch.setattr(ArtifactStore, name, noted(getattr(ArtifactStore, name)))
        patch.setattr(Results, "resolve_target_files", noted(Results.resolve_target_files, TARGET_MODEL))
        patch.setattr(training_data, "digest_dataset", noted(training_data.digest_dataset, DATASET))
        # Words of the model card on a draft's age. They decide no result: a report whose draft has aged is not made again.
        patch.setattr(reports, "list_draft_changes", unnoted(reports.list_draft_changes))
        # Figures of a plan. They decide nothing: a recipe is what the registry says, whatever was made or measured.
        patch.setattr(recipes, "describe_plans", unnoted(recipes.describe_plans))
        yield found
