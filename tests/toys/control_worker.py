"""A worker on "another host": leases tasks of a control server, commits and acknowledges their samples.

    python control_worker.py HOST:PORT COUNT

Writes the number of each task that it has done on a line of its own, until COUNT are done by anybody.
"""

from __future__ import annotations

import os
import sys

from dataflow_toys import TOKEN, refs_of

from draftworks.stream.control_client import RemoteMetadataStore
from draftworks.stream.controller import DataFlowController


def work(address: str, count: int) -> None:
    controller = DataFlowController("run", RemoteMetadataStore(address, TOKEN, retry_s=600.0), lease_s=10.0)
    step = 0
    while controller.count_tasks().done < count:
        for lease in controller.lease_tasks(f"worker {os.getpid()}", 1):
            controller.commit_samples(refs_of(lease.task), [lease])
            step += 1
            controller.ack(lease.task.sample_ids, step)
            print(lease.task.task_id, flush=True)


if __name__ == "__main__":
    work(sys.argv[1], int(sys.argv[2]))
