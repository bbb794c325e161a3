"""What is wrong with a cluster or the way to it is one error, with the server's words, before a job exists."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_kubernetes import RUNTIMES, write_kubeconfig
from kubernetes_toys import KubernetesBench, kubernetes_bench

from draftworks.config.launchers import KubernetesLauncherSpec
from draftworks.errors import ConfigError, DraftworksError, LauncherError
from resources.kubernetes_scheduler import make_scheduler


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[KubernetesBench]:
    with kubernetes_bench(tmp_path) as bench:
        yield bench


def forbid(bench: KubernetesBench) -> None:
    bench.cluster.forbidden.add(("POST", "trainjobs"))


def remove_namespace(bench: KubernetesBench) -> None:
    bench.cluster.namespaces.clear()


def remove_trainer(bench: KubernetesBench) -> None:
    bench.cluster.without_trainer = True


def remove_runtime(bench: KubernetesBench) -> None:
    bench.cluster.store.objects.pop((RUNTIMES, "draftworks"))


def misspell(bench: KubernetesBench) -> None:
    bench.settings["overrides"] = {"spec": {"trainer": {"numNode": 2}}}


def send_another_token(bench: KubernetesBench) -> None:
    write_kubeconfig(Path(bench.settings["kubeconfig"]), bench.address, token="old")


def weaken_runtime(bench: KubernetesBench) -> None:
    bench.settings["grace_s"] = 600


@pytest.mark.parametrize(
    ("spoil", "kind", "words"),
    [
        (
            forbid,
            ConfigError,
            'User "system:serviceaccount:drafts:dagster" cannot post resource "trainjobs".*access.yaml',
        ),
        (remove_namespace, ConfigError, 'namespace drafts: cannot create TrainJob .*namespaces "drafts" not found'),
        (
            remove_trainer,
            ConfigError,
            "has no ClusterTrainingRuntime draftworks. Is Kubeflow Trainer 2.2 or later installed there?",
        ),
        (
            remove_runtime,
            ConfigError,
            "has no ClusterTrainingRuntime draftworks. deploy/kubernetes/training-runtime.yaml",
        ),
        (misspell, ConfigError, 'unknown field "spec.trainer.numNode"'),
        (send_another_token, LauncherError, "Unauthorized .*Renew the credentials"),
        (weaken_runtime, ConfigError, "terminationGracePeriodSeconds of at least launcher.grace_s, 600"),
    ],
    ids=["forbidden", "no-namespace", "no-trainer", "no-runtime", "misspelt", "old-token", "short-grace"],
)
def test_a_refused_job_is_one_error_with_the_servers_words(
    bench: KubernetesBench, spoil: Callable[[KubernetesBench], None], kind: type[DraftworksError], words: str
) -> None:
    spoil(bench)
    with pytest.raises(kind) as caught:
        bench.make_scheduler().create(bench.request())
    assert re.search(words, str(caught.value))
    assert "\n" not in str(caught.value)
    assert not bench.cluster.store.list("trainjobs")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (remove_trainer, "Is Kubeflow Trainer 2.2 or later installed there?"),
        (remove_runtime, "has no ClusterTrainingRuntime draftworks"),
        (send_another_token, "Unauthorized .*Renew the credentials"),
        (lambda bench: bench.settings.update(volumes={"/data": "shared"}), "none holds the folder of the run"),
    ],
    ids=["no-trainer", "no-runtime", "old-token", "no-volume"],
)
def test_a_check_finds_what_is_known_before_a_job_exists(
    bench: KubernetesBench, spoil: Callable[[KubernetesBench], None], words: str
) -> None:
    bench.make_scheduler().check(bench.request())
    spoil(bench)
    with pytest.raises(DraftworksError, match=words):
        bench.make_scheduler().check(bench.request())
    assert not [verb for verb, _, _ in bench.cluster.calls if verb != "GET"]


def test_a_runtime_that_may_not_be_read_is_not_checked(bench: KubernetesBench) -> None:
    bench.cluster.forbidden.add(("GET", RUNTIMES))
    scheduler = bench.make_scheduler()
    scheduler.end(scheduler.create(bench.request()), 0.0)


def test_a_server_that_is_not_there_is_told_with_its_address(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
        path = write_kubeconfig(tmp_path / "kubeconfig", address)
        scheduler = make_scheduler(KubernetesLauncherSpec(image="i", kubeconfig=str(path)))
        with pytest.raises(
            LauncherError, match=f"{address}, namespace drafts: .* API server cannot be reached: .*refused"
        ):
            scheduler.find("dw-1")


@pytest.mark.parametrize(
    ("content", "context", "words"),
    [
        (None, None, "No configuration found|Invalid kube-config"),
        ("[", None, "expected the node content"),
        ("- 1", None, ""),
        ("ok", "other", "other"),
    ],
    ids=["missing", "not-yaml", "a-list", "no-such-context"],
)
def test_a_kubeconfig_that_cannot_be_used_is_named(
    tmp_path: Path, content: str | None, context: str | None, words: str
) -> None:
    path = tmp_path / "kubeconfig"
    if content == "ok":
        write_kubeconfig(path, "http://127.0.0.1:9")
    elif content is not None:
        path.write_text(content)
    spec = KubernetesLauncherSpec(image="i", kubeconfig=str(path), context=context)
    with pytest.raises(ConfigError, match=f"launcher.kubeconfig: {path} cannot be used: .*") as caught:
        make_scheduler(spec)
    assert re.search(words, str(caught.value))


def test_the_namespace_is_the_contexts_unless_it_is_given(bench: KubernetesBench) -> None:
    bench.cluster.namespaces |= {"other", "default"}
    found = [bench.make_scheduler().create(bench.request(name="dw-1"))]
    found += [bench.make_scheduler(namespace="other").create(bench.request(name="dw-2"))]
    write_kubeconfig(Path(bench.settings["kubeconfig"]), bench.address, namespace=None)
    found += [bench.make_scheduler().create(bench.request(name="dw-3"))]
    assert [id.split("/")[0] for id in found] == ["drafts", "other", "default"]


def test_without_the_client_one_error_names_the_extra_and_the_module_loads() -> None:
    code = (
        "import sys; sys.modules['kubernetes'] = None\n"
        "from draftworks.config.launchers import KubernetesLauncherSpec\n"
        "from resources.kubernetes_scheduler import make_scheduler\n"
        "make_scheduler(KubernetesLauncherSpec(image='i'))"
    )
    root = Path(__file__).parents[2]
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=False)
    assert ended.returncode == 1
    assert "ConfigError: launcher.kind: kubernetes needs the official client" in ended.stderr
    assert "pip install -e '.[kubernetes]'" in ended.stderr
