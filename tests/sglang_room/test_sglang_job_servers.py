"""Ranks of a job find each other's servers by files in a folder that they share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from draftworks.sglang.job_servers import (
    JobServers,
    ServerAddress,
    ServerSlot,
    make_servers_folder,
    remove_servers_folders,
)


@pytest.fixture
def first(tmp_path: Path) -> JobServers:
    return JobServers(make_servers_folder(tmp_path), "127.0.0.1", rank=0, world_size=3)


def read_urls(servers: JobServers) -> dict[ServerSlot, str]:
    addresses = {slot: servers.read_address(name) for slot, name in servers.list_names().items()}
    return {slot: address.url for slot, address in addresses.items() if address is not None}


def test_every_job_has_a_folder_and_a_key_of_its_own_which_only_the_owner_reads(tmp_path: Path, first):
    second = replace(first, folder=make_servers_folder(tmp_path))
    assert first.read_key() != second.read_key()
    assert first.folder.stat().st_mode & 0o777 == 0o700
    assert first.key_file.stat().st_mode & 0o777 == 0o600
    remove_servers_folders(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_was_started_again_has_a_new_name_and_one_address(first):
    other = replace(first, rank=2)
    first.publish(0, ServerAddress("http://a:1", "/spool"))
    first.publish(1, ServerAddress("http://a:2", "/spool"))
    before = other.list_names()
    assert read_urls(other) == {ServerSlot(0, 0): "http://a:1", ServerSlot(0, 1): "http://a:2"}
    first.publish(0, ServerAddress("http://a:3", "/spool"))
    assert read_urls(other) == {ServerSlot(0, 0): "http://a:3", ServerSlot(0, 1): "http://a:2"}
    assert other.list_names()[ServerSlot(0, 0)] != before[ServerSlot(0, 0)]
    assert other.read_address(before[ServerSlot(0, 0)]) is None
    first.withdraw(0)
    first.withdraw(0)
    assert read_urls(other) == {ServerSlot(0, 1): "http://a:2"}


def test_peers_are_the_servers_of_other_ranks(first):
    slots = [ServerSlot(0, 0), ServerSlot(0, 1), ServerSlot(2, 0), ServerSlot(2, 1)]
    assert list(replace(first, rank=1).list_peer_slots(2)) == slots


def test_ranks_that_only_serve_learn_when_to_begin_and_when_to_end(first):
    assert (first.is_requested, first.is_over) == (False, False)
    first.request_service()
    assert (first.is_requested, first.is_over) == (True, False)
    first.end_service()
    assert first.is_over


def test_nothing_is_published_in_a_folder_that_rank_0_has_removed(tmp_path: Path, first):
    remove_servers_folders(tmp_path)
    with pytest.raises(FileNotFoundError):
        first.publish(0, ServerAddress("http://a:1", "/spool"))
    first.withdraw(0)
    assert (first.list_names(), first.is_over, first.is_requested) == ({}, True, False)
    assert list(tmp_path.iterdir()) == []
