"""The process that owns a Mooncake store's memory, and does nothing else.

Mooncake keeps objects in the memory of the peers that bring some. A producer that did would take with it, when it ends,
what no consumer has read yet. `python -m draftworks.mooncake.owner FOLDER` is started by `MooncakeService`, which has
written FOLDER/owner.json, and ends when that does.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from draftworks.distributed.stop_signals import die_with_parent
from draftworks.errors import DraftworksError, StoreLostError
from draftworks.mooncake.address import MooncakeAddress, OwnerRecord, build_alive_key, build_owner_key
from draftworks.mooncake.client import MooncakeClient
from draftworks.storage.files import publish_json, read_json

ORDER_FILE = "owner.json"
_POLL_S = 1.0


@dataclass(frozen=True)
class OwnerOrder:
    """What the service asks of the owner.

    Attributes:
        patience_s: seconds for which the master may not answer. After Mooncake's `client_ttl` it has given up this
            process's memory in any case.
    """

    address: MooncakeAddress
    incarnation: str
    segment_bytes: int
    lease_ttl_s: float
    patience_s: float
    metrics: str

    def write(self, folder: Path) -> None:
        publish_json(folder / ORDER_FILE, asdict(self))

    @classmethod
    def read(cls, folder: Path) -> OwnerOrder:
        fields = read_json(folder / ORDER_FILE)
        return cls(**{**fields, "address": MooncakeAddress(**fields["address"])})

    def ready_file(self, folder: Path) -> Path:
        return folder / f"ready.{self.incarnation}"


def serve(folder: Path) -> str:
    """Own the memory until the store is lost; return the reason."""
    order = OwnerOrder.read(folder)
    client = MooncakeClient(order.address, order.segment_bytes)
    host, pid = order.address.host, os.getpid()
    record = OwnerRecord(order.incarnation, order.segment_bytes, order.lease_ttl_s, order.metrics, host, pid)
    key = build_owner_key(order.address.store_id)
    alive = build_alive_key(order.address.store_id, order.incarnation)
    codes = client.put_small({key: record.to_bytes(), alive: b"1"})
    if any(codes):
        return f"{client.where}: nothing can be put into its segment of {order.segment_bytes} bytes: codes {codes}"
    publish_json(order.ready_file(folder), {"pid": pid})
    answered = time.monotonic()
    while True:
        time.sleep(_POLL_S)
        try:
            if not client.exist([key])[0]:
                return f"{client.where}: the master has forgotten this process's memory, or was started again"
            answered = time.monotonic()
        except StoreLostError as error:
            if time.monotonic() > answered + order.patience_s:
                return str(error)


if __name__ == "__main__":
    die_with_parent()
    try:
        reason = serve(Path(sys.argv[1]))
    except DraftworksError as error:
        reason = str(error)
    print(json.dumps({"ended": reason}), file=sys.stderr, flush=True)
    os._exit(3)  # the library's threads may be waiting for a master that is gone
