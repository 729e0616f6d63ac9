"""The Dockerfiles and compose.yaml: they copy what exists, run as nobody, and hold what the programs import."""

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILES = sorted((ROOT / "cluster" / "docker").glob("*.Dockerfile"))
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text("utf-8"))
# What the gateway's image runs; of python_backends it imports the chat template only.
GATEWAY = (
    "gateway",
    "contract",
    "clients",
    "cluster/keda",
    "cluster/scaling",
    "python_backends/tokenizer/chat_template.py",
)


def tool(name):
    found = Path(sys.executable).parent / name
    if not found.is_file():
        pytest.skip(f"{name} is not installed: `make check` installs it")
    return str(found)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_a_dockerfile_copies_what_its_context_has(path):
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [words.split()[:-1] for words in re.findall(r"^COPY (?!--from)(.+)$", path.read_text(), re.MULTILINE)]
    for source in (name for names in copied for name in names):
        assert (ROOT / source).exists(), source
        assert source.split("/")[0] in allowed, source


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_an_image_runs_as_nobody_with_a_health_check_and_the_program_first(path):
    final = path.read_text().rpartition("\nFROM ")[2]
    assert re.findall(r"^USER (.+)$", final, re.MULTILINE)[-1] == "10001:10001"
    assert re.search(r"^HEALTHCHECK ", final, re.MULTILINE)
    assert re.search(r'^CMD \["python", "-m", "(gateway|server)"\]$', final, re.MULTILINE), "a shell would keep SIGTERM"
    assert "ARG BASE_IMAGE=" in path.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cpu", "trtllm"])
def test_the_build_finds_in_an_image_the_files_that_name_its_versions(name, tmp_path):
    final = (ROOT / f"cluster/docker/{name}.Dockerfile").read_text().rpartition("\nFROM ")[2].partition("\nWORKDIR ")[2]
    for source, into in re.findall(r"^COPY (?!--from)(\S+) (\S+)$", final, re.MULTILINE):
        target = tmp_path / into / Path(source).name if into.endswith("/") else tmp_path / into
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (ROOT / source).is_dir() else shutil.copy)(ROOT / source, target)
    code = "from build.recipe import commands as c, provenance as p; print(c.modelopt(), c.exporter(), p.versions([]))"
    line = [sys.executable, "-c", code]
    shown = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "nvidia-modelopt==" in shown and "optimum-intel==" in shown and "unknown" not in shown


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_hadolint_accepts_a_dockerfile(path):
    subprocess.run([tool("hadolint"), str(path)], check=True, timeout=30)


def test_docker_compose_reads_compose_yaml():
    command = [tool("docker-compose"), "--file", "compose.yaml", "config", "--quiet"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=30, env={**os.environ, "ENGINE": "smollm2"})


def test_compose_stops_nothing_before_its_drain_and_longest_stream():
    gateway, replica = (COMPOSE["services"][name] for name in ("gateway", "replica"))
    longest_s = gateway["environment"]["TRIDENT_GATEWAY_REQUEST_TIMEOUT_S"]
    for service, drain in ((gateway, "TRIDENT_GATEWAY_DRAIN_S"), (replica, "TRIDENT_DRAIN_S")):
        drain_s = service["environment"][drain]
        assert longest_s < drain_s < int(service["stop_grace_period"].removesuffix("s")) - 15
    assert "replica" in gateway["depends_on"], "the gateway is stopped first"


def test_compose_shows_only_this_machine_its_ports_and_mounts_what_exists():
    for service in COMPOSE["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert (ROOT / source).exists() if source.startswith("./") else source in COMPOSE["volumes"]


def test_prometheus_names_the_jobs_as_the_rules_ask():
    ours = yaml.safe_load((ROOT / "cluster/docker/prometheus.yml").read_text("utf-8"))
    jobs = [job["job_name"] for job in ours["scrape_configs"]]
    rules = "".join(path.read_text("utf-8") for path in (ROOT / "monitoring/prometheus").glob("*.rules.yml"))
    assert set(jobs) <= set(re.findall(r'job="([a-z-]+)"', rules))
    for job in ours["scrape_configs"]:
        assert set(job["dns_sd_configs"][0]["names"]) <= COMPOSE["services"].keys()


@pytest.mark.slow
def test_the_packages_of_the_gateway_image_hold_all_that_it_imports():
    lines = (ROOT / "requirements" / "gateway.txt").read_text("utf-8").splitlines()
    installed, waiting = set(), [Requirement(line) for line in lines if line and line[0] != "#"]
    while waiting:
        wanted = waiting.pop()
        extras = wanted.extras or {""}
        if wanted.marker and not any(wanted.marker.evaluate({"extra": extra}) for extra in extras):
            continue
        if (key := (canonicalize_name(wanted.name), frozenset(extras))) in installed:
            continue
        installed.add(key)
        for text in importlib.metadata.requires(wanted.name) or ():
            needed = Requirement(text)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                needed.marker = None
                waiting.append(needed)
    names, where = {name for name, _ in installed}, importlib.metadata.packages_distributions()
    for module in imported():
        assert {canonicalize_name(found) for found in where.get(module, ())} & names, module


def imported():
    """Yield the first names of the third-party modules that the gateway's image imports."""
    own = {path.name for path in ROOT.iterdir() if path.is_dir()} | set(sys.stdlib_module_names) | {"tomli"}
    for package in GATEWAY:
        for path in (ROOT / package).rglob("*.py") if (ROOT / package).is_dir() else [ROOT / package]:
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Import):
                    found = [alias.name for alias in node.names]
                else:
                    found = [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
                yield from ({name.split(".")[0] for name in found} - own)
