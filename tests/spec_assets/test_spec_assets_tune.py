"""A tune begins with the weights of the draft that its run names, and is named after them."""

from __future__ import annotations

import pytest

from draftworks.config.strategies import resolve_strategy
from draftworks.errors import ConfigError
from draftworks.programs.program import ProgramContext
from draftworks.programs.train import train
from draftworks.storage.artifacts import ArtifactStore
from draftworks.storage.records import DraftIdentity
from resources.workspace import Workspace
from spec_assets.draft_inputs import DraftConfig, build_train_run, resolve_draft_inputs

EAGLE3 = resolve_strategy("eagle3")


def test_a_tune_begins_with_the_old_weights_and_its_identity_names_them(finished_site, tmp_path):
    workspace = Workspace(registry_root=str(finished_site.registry))
    before = ArtifactStore(finished_site.var).load_current("eagle3_draft", "small")
    target = workspace.registry.load_target("small")
    plain = resolve_draft_inputs(workspace, EAGLE3, target, DraftConfig())
    assert plain.to_identity(EAGLE3) == DraftIdentity.of(before)
    config = DraftConfig(start_from=before.path.name, training={"max_steps": 0})
    tuned = resolve_draft_inputs(workspace, EAGLE3, target, config)
    identity = tuned.to_identity(EAGLE3)
    assert identity.start_from == before.data_version
    run = build_train_run(tmp_path / "tuned", "eagle3", tuned, workspace.locate_feature_store(tuned.files))
    assert train(run, ProgramContext())["weights_digest"] == before.data_version


def test_a_tune_of_a_draft_that_is_not_there_or_has_other_options_is_refused(finished_site):
    workspace = Workspace(registry_root=str(finished_site.registry))
    digest = ArtifactStore(finished_site.var).load_current("eagle3_draft", "small").path.name
    target = workspace.registry.load_target("small")
    with pytest.raises(ConfigError, match=f"start_from: target small, eagle3: no draft '0123'; there is: {digest}"):
        resolve_draft_inputs(workspace, EAGLE3, target, DraftConfig(start_from="0123"))
    with pytest.raises(ConfigError, match="start_from: target small, eagle3: no draft '../..'"):
        resolve_draft_inputs(workspace, EAGLE3, target, DraftConfig(start_from="../.."))
    other = DraftConfig(start_from=digest, options={"feedback": "post_norm"})
    with pytest.raises(ConfigError, match="small: eagle3: start_from: .*feedback: expected post_norm, found pre_norm"):
        resolve_draft_inputs(workspace, EAGLE3, target, other)
