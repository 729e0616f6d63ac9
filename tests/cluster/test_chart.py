"""The Helm chart renders what its cases say, obeys laws that no schema knows, and refuses odd values by name."""

import copy
import http.server
import json
import re
import subprocess
import threading
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="`make check` installs what the chart needs")
from cluster import chart  # noqa: E402
from cluster.scaling import rules as scaling_rules  # noqa: E402
from cluster.scaling import settings as scaler_settings  # noqa: E402
from contract.errors import InvalidArgument  # noqa: E402
from gateway.config import configuration  # noqa: E402
from gateway.config import pools as gateway_pools  # noqa: E402
from gateway.config import settings as gateway_settings  # noqa: E402
from server import settings as server_settings  # noqa: E402

needs_helm = pytest.mark.skipif(not chart.HELM.is_file(), reason="helm is not installed: `make check` installs it")
CASES = sorted(path.parent.name for path in chart.CASES.glob("*/values.yaml"))
VALUES = yaml.safe_load((chart.CHART / "values.yaml").read_text("utf-8"))
SCHEMA = json.loads((chart.CHART / "values.schema.json").read_text("utf-8"))
WORKLOADS = ("Deployment", "StatefulSet")


class UniqueKeys(yaml.SafeLoader):
    """Refuses a mapping with a key twice, of which YAML keeps the last."""

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"a key twice: {keys}"
        return super().construct_mapping(node, deep)


def golden(case):
    text = (chart.CASES / case / "rendered.yaml").read_text("utf-8")
    return [document for document in yaml.load_all(text, UniqueKeys) if document]


def pods(documents):
    """Return (workload, pod template) of all workloads."""
    return [(each, each["spec"]["template"]) for each in documents if each["kind"] in WORKLOADS]


def containers(pod):
    return [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]


def selected(documents, labels):
    return [pod for _, pod in pods(documents) if labels.items() <= pod["metadata"]["labels"].items()]


def environment(container):
    return {each["name"]: each.get("value", "from-a-secret") for each in container.get("env", ())}


def assert_laws(documents):
    names = [(each["kind"], each["metadata"]["name"]) for each in documents]
    assert len(names) == len(set(names))
    assert not any(kind == "Secret" for kind, _ in names), "secrets are given by reference"
    assert all(len(name) <= (52 if kind == "StatefulSet" else 63) for kind, name in names)
    workloads = {each["metadata"]["name"]: each for each, _ in pods(documents)}
    gateway = next(
        pod for each, pod in pods(documents) if each["metadata"]["labels"]["app.kubernetes.io/component"] == "gateway"
    )
    longest_s = int(environment(gateway["spec"]["containers"][0])["TRIDENT_GATEWAY_REQUEST_TIMEOUT_S"])
    for workload, pod in pods(documents):
        assert_pod(pod)
        assert len(selected(documents, workload["spec"]["selector"]["matchLabels"])) == 1
        for variable in ("TRIDENT_GATEWAY_DRAIN_S", "TRIDENT_DRAIN_S"):
            drain = environment(pod["spec"]["containers"][0]).get(variable)
            if drain is not None:
                stop = pod["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
                assert stop[0] == "sleep"
                assert pod["spec"]["terminationGracePeriodSeconds"] >= int(stop[1]) + int(drain) + 15
                assert int(drain) > longest_s
    scaled = set()
    for each in documents:
        spec = each.get("spec", {})
        if each["kind"] in ("ScaledObject", "HorizontalPodAutoscaler"):
            scaled.add(spec["scaleTargetRef"]["name"])
            assert workloads[spec["scaleTargetRef"]["name"]]["kind"] == spec["scaleTargetRef"]["kind"]
        if each["kind"] == "ScaledObject":
            assert spec["minReplicaCount"] <= spec["maxReplicaCount"]
            assert spec["fallback"]["behavior"] == "currentReplicasIfHigher"
            assert spec["fallback"]["replicas"] >= max(1, spec["minReplicaCount"])
        if each["kind"] == "Service":
            for pod in selected(documents, spec["selector"]) or pytest.fail(
                f"{each['metadata']['name']} selects nothing"
            ):
                assert {port["targetPort"] for port in spec["ports"]} <= ports(pod)
        if each["kind"] in ("PodDisruptionBudget", "InferencePool"):
            assert len(selected(documents, spec["selector"]["matchLabels"])) == 1
        if each["kind"] == "InferencePool":
            picker = spec["endpointPickerRef"]
            service = next(e for e in documents if e["metadata"]["name"] == picker["name"] and e["kind"] == "Service")
            assert picker["port"]["number"] in {port["port"] for port in service["spec"]["ports"]}
        if each["kind"] == "ServiceMonitor":
            services = [e for e in documents if e["kind"] == "Service"]
            found = [e for e in services if spec["selector"]["matchLabels"].items() <= e["metadata"]["labels"].items()]
            assert found and all(spec["jobLabel"] in e["metadata"]["labels"] for e in found)
            assert all(spec["endpoints"][0]["port"] in {p["name"] for p in e["spec"]["ports"]} for e in found)
        if each["kind"] == "NetworkPolicy":
            matched = selected(documents, spec["podSelector"]["matchLabels"])
            assert matched
            for rule in spec["ingress"]:
                assert {port["port"] for port in rule["ports"]} <= ports(matched[0])
    assert all(("replicas" in each["spec"]) != (name in scaled) for name, each in workloads.items())
    assert_addresses(documents)


def assert_addresses(documents):
    """Every address of another program is a rendered Service with that port."""
    services = {
        (each["metadata"]["name"], port["port"])
        for each in documents
        if each["kind"] == "Service"
        for port in each["spec"]["ports"]
    }
    values = [value for _, pod in pods(documents) for each in containers(pod) for value in environment(each).values()]
    found = [re.fullmatch(r"dns:///([a-z0-9-]+):(\d+)", value) for value in values if value.startswith("dns:")]
    for each in documents:
        if each["kind"] == "ScaledObject":
            address = each["spec"]["triggers"][0]["metadata"]["scalerAddress"]
            found.append(re.fullmatch(r"([a-z0-9-]+)\.llm:(\d+)", address))
    assert found and all((match[1], int(match[2])) in services for match in found)


def ports(pod):
    return {port["name"] for container in pod["spec"]["containers"] for port in container["ports"]}


def assert_pod(pod):
    spec = pod["spec"]
    assert spec["securityContext"]["runAsNonRoot"] and spec["automountServiceAccountToken"] is False
    volumes = {volume["name"] for volume in spec["volumes"]} | {"engines"}
    for container in containers(pod):
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert {mount["name"] for mount in container.get("volumeMounts", ())} <= volumes
        variables = environment(container)
        assert len(variables) == len(container.get("env", ())), "a variable twice"
        assert "memory" in container["resources"]["limits"]
    for container in spec["containers"]:
        for probe in ("readinessProbe", "livenessProbe"):
            handler = container[probe].get("httpGet") or container[probe].get("grpc") or container[probe]["tcpSocket"]
            assert handler["port"] in ports(pod) or isinstance(handler["port"], int)


def test_a_pool_mounts_its_volumes_where_its_engine_is_made_too():
    pod = next(pod for workload, pod in pods(golden("full")) if workload["metadata"]["name"].endswith("llama-8b"))
    mounted = {each["name"]: [mount["name"] for mount in each["volumeMounts"]] for each in containers(pod)}
    assert "ca" in mounted["prepare"] and "ca" in mounted["replica"]


@pytest.mark.parametrize("case", CASES)
def test_a_golden_file_obeys_the_laws(case):
    assert_laws(golden(case))


@pytest.mark.parametrize("case", CASES)
def test_every_program_accepts_its_environment(case, tmp_path):
    (tmp_path / "file").write_text("0123456789abcdef0123456789abcdef")
    programs = 0
    for _, pod in pods(golden(case)):
        for container in pod["spec"]["containers"]:
            variables = environment(container)
            assert list(gateway_settings.unknown(variables)) == []
            known = [kind for kind in (server_settings, scaler_settings) for kind in variables_of(kind)]
            assert [name for name in variables if not name.startswith("TRIDENT_GATEWAY_") and name not in known] == []
            for name in variables:
                if name.endswith(("_FILE", "_TOKENIZER")) or name == "TRIDENT_GATEWAY_CONFIG":
                    variables[name] = str(tmp_path / "file")
                if name == "TRIDENT_GATEWAY_REDIS":
                    variables[name] = "redis://redis/0"
            for settings_of in (server_settings, scaler_settings, gateway_settings):
                settings_of.Settings.from_environment(variables)
            programs += 1
    assert programs >= 2


@pytest.mark.parametrize("case", ["default", "cpu"])
def test_the_gateways_accept_their_configuration(case, tmp_path):
    documents = golden(case)
    (text,) = [each["data"]["gateway.toml"] for each in documents if "gateway.toml" in each.get("data", {})]
    assert gateway_rules(text, documents, tmp_path).policy.models.keys() == set(POOLS_OF[case])


POOLS_OF = {"default": ["demo"], "cpu": ["smollm2"]}


def gateway_rules(text, documents, folder):
    """Return what a gateway of the rendered documents reads from its configuration file."""
    (folder / "gateway.toml").write_text(text, "utf-8")
    gateway = next(pod for _, pod in pods(documents) if pod["spec"]["containers"][0]["name"] == "gateway")
    variables = {
        name: value
        for name, value in environment(gateway["spec"]["containers"][0]).items()
        if not name.endswith("_FILE") and name != "TRIDENT_GATEWAY_CONFIG"
    }
    settings = gateway_settings.Settings.from_environment(variables)
    return configuration.read(folder / "gateway.toml", variables, gateway_pools.of(settings))


def variables_of(module):
    return [module.Settings.variable(name) for name in module.Settings.model_fields] + ["HF_TOKEN"]


def test_the_scaler_may_tell_the_gateways_what_it_decides():
    documents = golden("full")
    (pod,) = [pod for each, pod in pods(documents) if each["metadata"]["name"] == "trident-scaler"]
    (container,) = pod["spec"]["containers"]
    variables, mounts = environment(container), {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    (secret,) = [each for each in pod["spec"]["volumes"] if "secret" in each]
    folder, _, _ = variables["TRIDENT_SCALER_ADMIN_TOKEN_FILE"].rpartition("/")
    assert mounts[secret["name"]] == folder
    port = int(variables["TRIDENT_SCALER_CONSOLES"].rpartition(":")[2])
    policies = {each["metadata"]["name"]: each["spec"] for each in documents if each["kind"] == "NetworkPolicy"}
    assert {"port": port} in [to for rule in policies["trident-scaler"]["egress"] for to in rule["ports"]]
    sources = [rule["from"] for rule in policies["trident-gateway"]["ingress"] if rule["ports"] == [{"port": "http"}]]
    assert "scaler" in str(sources)


def test_the_scaler_accepts_the_rules_of_its_pools(tmp_path):
    (rules,) = [each["data"]["rules.toml"] for each in golden("full") if "rules.toml" in each.get("data", {})]
    (tmp_path / "rules.toml").write_text(rules)
    pool = scaling_rules.read(str(tmp_path / "rules.toml")).of("llama-70b")
    assert (pool.min_replicas, pool.max_replicas, pool.warm_replicas, pool.time_of_day) == (2, 16, 1, False)


@needs_helm
@pytest.mark.slow
def test_the_chart_is_valid_and_renders_as_its_golden_files(capsys):
    assert chart.main([]) == 0, capsys.readouterr().err


@pytest.mark.slow
def test_a_misspelt_field_is_found_in_every_kind():
    kinds = {each["kind"]: each for each in golden("full")} | {each["kind"]: each for each in golden("cpu")}
    assert len(kinds) >= 10
    for kind, document in kinds.items():
        broken = copy.deepcopy(document)
        where = broken if "spec" not in broken else broken["spec"]
        where["replcas"] = 3
        assert list(chart.problems(broken)), kind


def test_values_and_schema_name_the_same():
    def closed(schema):
        """Return the part of a schema that names all properties."""
        if "$ref" in schema:
            return closed(SCHEMA["definitions"][schema["$ref"].rsplit("/", 1)[1]])
        if schema.get("additionalProperties") is False and "properties" in schema:
            return schema
        return next((found for part in schema.get("allOf", ()) if (found := closed(part))), None)

    def keys(schema, values, path=""):
        if (named := closed(schema)) is None:
            assert "properties" not in schema, path
            return
        left_out = {"global", "name", "engine"} if path in ("", "/poolDefaults") else set()
        assert named["properties"].keys() - left_out == values.keys(), path
        for name, value in values.items():
            keys(named["properties"][name], value, f"{path}/{name}")

    keys(SCHEMA, VALUES)


def test_the_schema_names_every_rule_of_the_law():
    scaling = SCHEMA["definitions"]["pool"]["properties"]["scaling"]
    names = scaling["propertyNames"]["enum"]
    assert set(names) == scaling_rules.PoolRules.model_fields.keys()
    assert all(any(re.search(pattern, name) for pattern in scaling["patternProperties"]) for name in names)


def rendered(values, release="trident", tmp=Path("/tmp")):
    file = tmp / "values.json"
    file.write_text(json.dumps(values, ensure_ascii=False), "utf-8")
    return chart.render(file, release)


POOL = {"name": "demo", "engine": "demo"}
REFUSED = [
    ({"pools": []}, "/pools"),
    ({"pools": [POOL, POOL]}, "pools: demo: name must be unique"),
    ({"pools": [{"name": "x" * 21, "engine": "demo"}]}, "/pools/0/name"),
    ({"pools": [{"name": "a_b", "engine": "demo"}]}, "/pools/0/name"),
    ({"pools": [{"name": "a", "engine": "../etc"}]}, "/pools/0/engine"),
    ({"pools": [{"name": "a"}]}, "engine"),
    ({"pools": [POOL | {"replicas": {"min": 3, "max": 2}}]}, "pools: demo: replicas.max must be at least"),
    ({"pools": [POOL | {"replicas": {"min": -1}}]}, "/pools/0/replicas/min"),
    ({"pools": [POOL | {"drainSeconds": 60}]}, "pools: demo: drainSeconds must be more than"),
    ({"pools": [POOL | {"drainSeconds": 1_000_000}]}, "/pools/0/drainSeconds"),
    ({"pools": [POOL | {"kind": "trtllm"}]}, "pools: demo: gpus must be at least 1"),
    ({"pools": [POOL | {"gpus": 1}]}, "pools: demo: gpus must be 0"),
    ({"pools": [POOL | {"kind": "tpu"}]}, "/pools/0/kind"),
    ({"pools": [POOL | {"env": {"TRIDENT_DRAIN_S": 3}}]}, "pools: demo.env.TRIDENT_DRAIN_S"),
    # Ports that Services, probes and policies name.
    ({"pools": [POOL | {"env": {"TRIDENT_GRPC_PORT": 9101}}]}, "pools: demo.env.TRIDENT_GRPC_PORT"),
    ({"gateway": {"env": {"TRIDENT_GATEWAY_HTTP_PORT": 9100}}}, "gateway.env.TRIDENT_GATEWAY_HTTP_PORT"),
    ({"keda": {"enabled": True, "env": {"TRIDENT_SCALER_GRPC_PORT": 1}}}, "keda.env.TRIDENT_SCALER_GRPC_PORT"),
    ({"pools": [POOL | {"engines": {"size": "lots"}}]}, "/pools/0/engines/size"),
    ({"poolDefaults": {"name": "x"}}, "/poolDefaults"),
    ({"gateway": {"requestTimeoutSeconds": 900}}, "gateway.drainSeconds: must be more than"),
    ({"gateway": {"autoscaling": {"min": 9}}}, "gateway.autoscaling.max: must be at least"),
    ({"gateway": {"config": "[admission]", "configSecret": "x"}}, "gateway.config: must be empty"),
    ({"gateway": {"env": {"lower case": 1}}}, "/gateway/env"),
    ({"gateway": {"secretEnv": [{"name": "A", "secret": "s", "key": "k"}] * 2}}, "gateway.secretEnv: A"),
    ({"gateway": {"config": {"a": 1}}}, "/gateway/config"),
    ({"images": {"gateway": "no-tag"}}, "/images/gateway"),
    ({"keda": {"enabled": True}, "pools": [POOL | {"replicas": {"min": 0, "max": 0}}]}, "at least 1 with keda"),
    ({"inferencePool": {"enabled": True}}, "networkPolicy.proxies: must name"),
    ({"pools": [POOL | {"scaling": {"min_replicas": 2}}]}, "pools: demo: scaling.min_replicas"),
    ({"pools": [POOL | {"scaling": {"warm_replicas": "two"}}]}, "/pools/0/scaling/warm_replicas"),
    ({"pools": [POOL | {"scaling": {"warm": 2}}]}, "warm_replicas"),  # one of those that it names
    ({"pools": [POOL | {"scaling": {"warm_replicas": 1.5}}]}, "/pools/0/scaling/warm_replicas"),
    ({"pools": [POOL | {"scaling": {"start_s": 3_000_000}}]}, "/pools/0/scaling/start_s"),
    ({"pools": [POOL | {"scaling": {"time_of_day": 1}}]}, "/pools/0/scaling/time_of_day"),
    ({"pools": [POOL | {"scaling": {"wait_s": {}}}]}, "/pools/0/scaling/wait_s"),
    ({"pools": [POOL | {"scaling": {"wait_s": {"10": 5}}}]}, "/pools/0/scaling/wait_s"),
    ({"pools": [POOL | {"scaling": {"cost_per_hour": 5}}]}, "pools: demo: scaling.replica_hour must be set"),
    ({"pools": [POOL | {"scaling": {"cost_per_hour": 5, "replica_hour": 6}}]}, "pools: demo: scaling.cost_per_hour"),
    ({"pools": [POOL | {"scaling": {"least_headroom": 0.5}}]}, "pools: demo: scaling.most_headroom must be at least"),
    ({"gateway": {"resources": {"requests": None}}}, "requests"),  # the HorizontalPodAutoscaler needs them
    ({"poolDefaults": {"replicas": None}}, "replicas"),  # null takes a default away
    ({"pools": [POOL | {"replicas": None}]}, "/pools/0/replicas"),
    ({"keda": None}, "keda"),
    ({"pools": [POOL | {"volumes": [{"name": "state"}]}]}, "/pools/0/volumes/0/name"),
    ({"gatway": {}}, "gatway"),
]


@needs_helm
@pytest.mark.slow
@pytest.mark.parametrize(("values", "told"), REFUSED)
def test_odd_values_are_refused_by_name(values, told, tmp_path):
    with pytest.raises(InvalidArgument) as caught:
        rendered(values, tmp=tmp_path)
    assert told in str(caught.value)


LESS = st.sampled_from([0, 0.3, 1, 2.5, 10])
SECONDS = st.sampled_from([0, 0.1, 90, 86_400, 86_401])
STEPS = st.sampled_from([0, 1, 1.5, 10_000, 10_001])
MONEY = st.sampled_from([0, 0.1, 0.7, 2, 1e9, 2e9])
SCALING = st.fixed_dictionaries(
    {},
    optional={
        "warm_replicas": STEPS,
        **dict.fromkeys(("step_up", "step_down"), STEPS),
        **dict.fromkeys(("least_headroom", "most_headroom"), LESS),
        **dict.fromkeys(("up_cooldown_s", "down_cooldown_s", "zero_after_s", "start_s", "slow_start_s"), SECONDS),
        **dict.fromkeys(("tokens_per_s", "replica_hour", "cost_per_hour"), MONEY),
        "time_of_day": st.sampled_from([True, False, 1]),
        "wait_s": st.dictionaries(st.sampled_from(["0", "5", "9", "10", "a"]), SECONDS, max_size=3),
    },
)


@needs_helm
@pytest.mark.slow
@settings(
    max_examples=40,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(scaling=SCALING, least=st.integers(0, 3))
@example(scaling={"wait_s": {"5": 30, "0": 1.5}, "replica_hour": 0.1, "cost_per_hour": 0.7, "step_up": 2}, least=3)
def test_the_chart_takes_the_rules_that_the_scaler_takes(scaling, least, tmp_path):
    bounds = {"min": least, "max": 4}
    try:
        rules = {"min_replicas": least, "max_replicas": 4, **scaling}
        expected = scaling_rules.Rules.model_validate({"pools": {"demo": rules}})
    except ValueError:
        expected = None
    values = {"pools": [POOL | {"replicas": bounds, "scaling": scaling}], "keda": {"enabled": True}}
    try:
        text = rendered(values, tmp=tmp_path)
    except InvalidArgument as error:
        assert expected is None and "scaling" in str(error)
        return
    (found,) = [each["data"]["rules.toml"] for each in chart.documents(text) if "rules.toml" in each.get("data", {})]
    (tmp_path / "rules.toml").write_text(found)
    assert expected is not None and scaling_rules.read(str(tmp_path / "rules.toml")) == expected


POOL_NAME = st.from_regex(r"[a-z]([-a-z0-9]{0,18}[a-z0-9])?", fullmatch=True)
COUNT = st.integers(0, 1000)
TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["C"]), max_size=30)
ODD_POOL = st.fixed_dictionaries(
    {"name": POOL_NAME, "engine": st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,80}", fullmatch=True)},
    optional={
        "kind": st.sampled_from(["cpu", "trtllm"]),
        "gpus": st.integers(0, 8),
        "model": st.sampled_from(["", "one", "org/two-3.5"]),
        "replicas": st.fixed_dictionaries({"min": COUNT, "max": COUNT}),
        "drainSeconds": st.integers(500, 86_400),
        "startSeconds": st.integers(10, 86_400),
        "preStopSeconds": st.integers(1, 3600),
        "maxUnavailable": st.one_of(COUNT, st.integers(0, 100).map("{}%".format)),
        "prepare": st.lists(TEXT.filter(bool), max_size=3),
        "env": st.dictionaries(
            st.from_regex(r"TRIDENT_X[A-Z0-9_]{0,20}", fullmatch=True),
            st.one_of(TEXT, st.integers(-(2**31), 2**31), st.booleans()),
            max_size=3,
        ),
        "engines": st.fixed_dictionaries({"claim": st.sampled_from(["", "shared"])}),
        "resources": st.fixed_dictionaries(
            {"limits": st.dictionaries(st.sampled_from(["cpu", "example/fpga"]), COUNT)}
        ),
        "volumes": st.sampled_from([[], [{"name": "mine", "emptyDir": {}}]]),
        "nodeSelector": st.dictionaries(st.sampled_from(["a", "b"]), st.sampled_from(["true", "1", "null", ": #"])),
    },
)
ODD_VALUES = st.fixed_dictionaries(
    {"pools": st.lists(ODD_POOL, min_size=1, max_size=3)},
    optional={
        "gateway": st.fixed_dictionaries(
            {},
            optional={
                "config": TEXT,
                "replicas": st.integers(1, 1000),
                "maxUnavailable": COUNT,
                "autoscaling": st.fixed_dictionaries({"enabled": st.booleans()}),
                "service": st.fixed_dictionaries({"annotations": st.dictionaries(st.just("a/b"), TEXT)}),
            },
        ),
        "networkPolicy": st.fixed_dictionaries(
            {"enabled": st.booleans(), "proxies": st.sampled_from([[], [{"podSelector": {}}]])}
        ),
        **{name: st.fixed_dictionaries({"enabled": st.booleans()}) for name in ("keda", "inferencePool", "monitoring")},
    },
)
# Helm allows 53 characters with dots; a service's name may have none.
RELEASE = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,20}[a-z0-9])?(\.[a-z0-9]([-a-z0-9]{0,26}[a-z0-9])?)?", fullmatch=True)


@needs_helm
@pytest.mark.slow
@settings(
    max_examples=25,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(values=ODD_VALUES, release=RELEASE)
@example(values={"pools": [POOL | {"replicas": {"min": 0, "max": 0}}]}, release="r")
@example(values={"pools": [{"name": "p" * 20, "engine": "demo"}], "keda": {"enabled": True}}, release="1" * 53)
@example(values={"pools": [POOL | {"drainSeconds": 86_400}]}, release="a.b")
def test_odd_values_render_valid_or_are_refused_by_name(values, release, tmp_path):
    try:
        text = rendered(values, release, tmp_path)
    except InvalidArgument as error:
        assert re.search(
            r"pools: \S+: (name|replicas\.max|drainSeconds|gpus) must|/pools/\d/|networkPolicy.proxies: must",
            str(error),
        ), error
        return
    documents = [document for document in yaml.load_all(text, UniqueKeys) if document]
    assert [problem for each in documents for problem in chart.problems(each)] == []
    assert_laws(documents)
    rules = next(each["data"]["gateway.toml"] for each in documents if "gateway.toml" in each.get("data", {}))
    if not values.get("gateway", {}).get("config"):
        models = gateway_rules(rules, documents, tmp_path).policy.models
        assert models.keys() == {pool.get("model") or pool["name"] for pool in values["pools"]}
    for pool in values["pools"]:
        pod = next(pod for each, pod in pods(documents) if each["metadata"]["name"].endswith(f"-pool-{pool['name']}"))
        variables = environment(pod["spec"]["containers"][0])
        for name, value in pool.get("env", {}).items():
            assert variables[name] == (value if isinstance(value, str) else json.dumps(value))


@needs_helm
@pytest.mark.slow
def test_two_releases_of_long_names_share_no_name(tmp_path):
    first, second = (rendered({}, "a" * 52 + end, tmp_path) for end in "bc")
    names = [{(d["kind"], d["metadata"]["name"]) for d in chart.documents(text)} for text in (first, second)]
    assert not names[0] & names[1]


class Api(http.server.BaseHTTPRequestHandler):
    """Tells helm ``kinds``, and of each workload that it runs with ``replicas``; None: that there is none."""

    replicas: int | None = None
    kinds: dict[str, set[str]] = {}  # by version

    def do_GET(self):
        found = self.found(self.path.partition("?")[0].strip("/").split("/"))
        data = json.dumps(found or {"kind": "Status", "reason": "NotFound", "code": 404}).encode()
        self.send_response(200 if found else 404)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def found(self, parts):
        kinds = self.kinds
        match parts:
            case ["version"]:
                return {"major": "1", "minor": "37", "gitVersion": "v1.37.0"}
            case ["api"]:
                return {"kind": "APIVersions", "versions": ["v1"]}
            case ["apis"]:
                versions = [{"groupVersion": one, "version": one.split("/")[1]} for one in kinds if "/" in one]
                groups = [{"name": one["groupVersion"].split("/")[0], "versions": [one]} for one in versions]
                return {"kind": "APIGroupList", "groups": groups}
            case ["api" | "apis", *version] if "/".join(version) in kinds:
                resources = [
                    {"name": f"{kind.lower()}s", "kind": kind, "namespaced": True, "verbs": ["get"]}
                    for kind in kinds["/".join(version)]
                ]
                return {"kind": "APIResourceList", "groupVersion": "/".join(version), "resources": resources}
            case ["apis", "apps", "v1", "namespaces", "llm", plural, name] if self.replicas is not None:
                kind = {"deployments": "Deployment", "statefulsets": "StatefulSet"}[plural]
                own = {"meta.helm.sh/release-name": "trident", "meta.helm.sh/release-namespace": "llm"}
                labels = {"app.kubernetes.io/managed-by": "Helm"}
                of = {"name": name, "namespace": "llm", "annotations": own, "labels": labels}
                return {"apiVersion": "apps/v1", "kind": kind, "metadata": of, "spec": {"replicas": self.replicas}}
        return None

    def log_message(self, *_):
        pass


@needs_helm
@pytest.mark.slow
@pytest.mark.parametrize("live", [7, 0, None])
def test_workloads_that_are_scaled_keep_the_replicas_that_run(live, tmp_path, monkeypatch):
    """Without ``replicas`` Kubernetes would set 1 where an earlier version of the release had them."""
    kinds = {each["apiVersion"]: set() for each in golden("full")}
    for each in golden("full"):
        kinds[each["apiVersion"]].add(each["kind"])
    monkeypatch.setattr(Api, "kinds", kinds)
    monkeypatch.setattr(Api, "replicas", live)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Api) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        config = tmp_path / "config"
        cluster = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}
        context = {"name": "c", "context": {"cluster": "c", "user": ""}}
        config.write_text(json.dumps({"clusters": [cluster], "contexts": [context], "current-context": "c"}))
        values = ["--values", str(chart.CASES / "full" / "values.yaml"), "--namespace", "llm"]
        asked = ["--dry-run=server", "--disable-openapi-validation", "--kubeconfig", str(config)]
        command = [str(chart.HELM), "template", "trident", str(chart.CHART), *values, *asked]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        server.shutdown()
    assert done.returncode == 0, done.stderr
    found = {each["metadata"]["name"]: each["spec"].get("replicas") for each, _ in pods(chart.documents(done.stdout))}
    assert found.pop("trident-scaler") == 1
    assert set(found.values()) == {live} and len(found) == 4
