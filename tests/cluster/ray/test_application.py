"""The configuration that Serve gets, and the resources that an engine's manifest asks for."""

from __future__ import annotations

import inspect
import pkgutil

import pytest
import yaml

from cluster.ray import application
from cluster.ray.application import checked, configuration, options
from cluster.ray.policy import TokensPolicy
from cluster.ray.replica import TritonReplica
from contract import manifest as manifests
from contract.errors import InvalidArgument, NotFound
from tests.fakes.manifests import manifest

ARGUMENTS = {"register": "gateway:9000", "token_file": "/run/token"}


def test_gpus_are_those_of_all_ranks_and_a_cpu_engine_has_none():
    server = checked({**ARGUMENTS, "cpus": 4})
    for kind, recipe, gpus in (("trtllm", {"tp": 4}, 4), ("llmapi", {"tp": 2, "pp": 2}, 4), ("cpu", {"tp": 1}, 0)):
        actor = options(server, manifest(kind=kind, recipe=recipe))["ray_actor_options"]
        assert (actor["num_gpus"], actor["num_cpus"]) == (gpus, 4)
    actor = options(server, manifest(kind="cpu", recipe={}, memory_bytes=123))["ray_actor_options"]
    assert actor["memory"] == 123


def test_serve_waits_longer_than_a_drain_takes():
    server = checked({**ARGUMENTS, "drain_s": 100})
    assert options(server, manifest(recipe={}))["graceful_shutdown_timeout_s"] >= 110
    assert server.variables()["TRIDENT_DRAIN_S"] == "100"


def test_a_change_of_the_number_leaves_the_arguments_as_they_are():
    server = checked({**ARGUMENTS, "environ": {"TRIDENT_LOG_LEVEL": "error"}})
    few, many = (configuration(server, *bounds, ["http://g/metrics"], "") for bounds in ((1, 1), (2, 5)))
    [one], [other] = few["applications"], many["applications"]
    assert one["args"] == other["args"] and one["deployments"] != other["deployments"]
    assert checked(one["args"]) == server
    assert other["deployments"][0]["autoscaling_config"]["max_replicas"] == 5


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"register": ""}, "register: must have at least 1 character"),
        ({"drain_s": -1}, "drain_s: must be greater than or equal to 0, got -1"),
        ({"colour": "red"}, "colour: is not known: must be one of engine, register, "),
        ({"cpus": "x"}, "cpus: must be a valid number, .*got 'x'"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(change, problem):
    with pytest.raises(InvalidArgument, match=f"args: {problem}"):
        checked({**ARGUMENTS, **change})


def test_an_engine_that_is_not_there_is_refused_before_any_replica_starts(tmp_path):
    with pytest.raises(NotFound, match="there is no engine"):
        manifests.load(checked({**ARGUMENTS, "environ": {"TRIDENT_ENGINES_DIR": str(tmp_path)}}).folder)


def test_the_file_for_a_cluster_names_what_is_there():
    [app] = yaml.safe_load(application.FILE.read_text("utf-8"))["applications"]
    checked(app["args"])
    [deployment] = app["deployments"]
    policy = deployment["autoscaling_config"]["policy"]
    for name in (app["import_path"], policy["policy_function"]):
        pkgutil.resolve_name(name)
    inspect.signature(TokensPolicy).bind(**policy["policy_kwargs"])
    assert app["name"] == application.APPLICATION and deployment["name"] == TritonReplica.__name__


def test_the_example_reads_the_load_of_every_gateway_that_its_replicas_register_at():
    [app] = yaml.safe_load(application.FILE.read_text("utf-8"))["applications"]
    policy = app["deployments"][0]["autoscaling_config"]["policy"]["policy_kwargs"]
    gateways = app["args"]["register"].rpartition(":")[0]
    assert gateways.startswith("dns:///") and [url.rpartition(":")[0] for url in policy["gateways"]] == [gateways]
