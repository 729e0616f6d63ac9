import dataclasses

import pytest

from contract.load import ReplicaLoad


def test_a_replica_without_metrics_yet_is_idle_and_healthy_and_of_unknown_capacity():
    load = ReplicaLoad("a:8001")
    assert (load.running, load.waiting, load.kv_usage, load.outstanding) == (0, 0, 0.0, 0)
    assert load.healthy and (load.max_running, load.tokens_per_s) == (0, 0.0)


def test_a_snapshot_stays_what_it_was():
    load = ReplicaLoad("a:8001", running=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        load.running = 4
    assert dataclasses.replace(load, running=4) != load == ReplicaLoad("a:8001", running=3)
