"""Mooncake's store keeps the contract of feature stores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.register_assert_rewrite("store_harness", "store_contract", "store_keyed_contract", "mooncake_harness")

from mooncake_harness import MooncakeHarness  # noqa: E402
from mooncake_toys import running_mooncake  # noqa: E402
from store_keyed_contract import FreeingContract  # noqa: E402

pytestmark = pytest.mark.mooncake


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeHarness]:
    with running_mooncake(tmp_path_factory.mktemp("mooncake")) as service:
        harness = MooncakeHarness(service.address_file)
        client = harness.client()
        close, client.close = client.close, lambda: None  # for the stores that use it
        yield harness
        close()


class TestMooncakeFeatureStore(FreeingContract):
    @pytest.fixture
    def harness(self, shared: MooncakeHarness) -> Iterator[MooncakeHarness]:
        yield shared
        shared.clear()
