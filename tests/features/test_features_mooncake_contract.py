"""Mooncake's stores keep the contract of feature stores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.register_assert_rewrite("store_harness", "store_contract", "store_keyed_contract", "mooncake_harness")

from mooncake_harness import MooncakeHarness  # noqa: E402
from mooncake_toys import running_mooncake  # noqa: E402
from store_contract import WritingContract  # noqa: E402
from store_keyed_contract import FreeingContract  # noqa: E402

from draftworks.mooncake.client import MooncakeClient  # noqa: E402

pytestmark = pytest.mark.mooncake


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeClient]:
    with running_mooncake(tmp_path_factory.mktemp("mooncake")) as service:
        client = MooncakeClient(service.address)
        yield client
        client.close()


class TestMooncakeFeatureStore(WritingContract):
    @pytest.fixture(params=[True, False], ids=["once", "kept"])
    def harness(self, client: MooncakeClient, request: pytest.FixtureRequest) -> Iterator[MooncakeHarness]:
        harness = MooncakeHarness(client.address, shared_client=client, consume_once=request.param)
        yield harness
        harness.clear()


class TestKeyedMooncakeStore(FreeingContract):
    @pytest.fixture
    def harness(self, client: MooncakeClient) -> Iterator[MooncakeHarness]:
        harness = MooncakeHarness(client.address, shared_client=client, keyed=True)
        yield harness
        harness.clear()
