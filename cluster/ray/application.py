"""The fleet as a Ray Serve application: what Serve builds from a configuration, and that configuration.

Other ``args`` are another version, which Serve rolls out; the number of replicas changes in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field

from contract import manifest, toml_table
from contract.manifest import EngineManifest

APPLICATION = "trident"
FILE = Path(__file__).with_name("fleet.yaml")
ROOT = Path(__file__).resolve().parents[2]
GPU_KINDS = ("trtllm", "llmapi")
# After the drain: telling the gateways, the in-band end of streams that are left, tritonserver's exit, and a reserve.
BEYOND_DRAIN_S = 20.0


class ServerArguments(BaseModel):
    """What every replica runs, on every node.

    engine: folder under ``root``/engines, or TRIDENT_ENGINES_DIR of ``environ`` (more variables of the server).
    register, token_file, pool: TRIDENT_REGISTER, TRIDENT_REGISTER_TOKEN_FILE, TRIDENT_REGISTER_POOL.
    drain_s: seconds that streams may go on after a stop. orphan_s: and that a server goes on whose Ray worker died.
    root, python: the project's folder, and its interpreter. cpus: that Ray books for a replica.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    engine: str = "demo"
    register_at: Annotated[str, Field(alias="register", min_length=1)]
    token_file: Annotated[str, Field(min_length=1)]
    pool: str = ""
    drain_s: Annotated[float, Field(ge=0, le=86_400)] = 30.0
    orphan_s: Annotated[float, Field(ge=0, le=86_400)] = 60.0
    root: str = str(ROOT)
    python: str = str(ROOT / ".venv" / "bin" / "python")
    cpus: Annotated[float, Field(ge=0, le=10_000)] = 1.0
    environ: Mapping[str, str] = Field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Of the engine."""
        return Path(self.environ.get("TRIDENT_ENGINES_DIR") or Path(self.root, "engines"), self.engine)

    def variables(self) -> dict[str, str]:
        """Return the environment of the server beyond the worker's own."""
        return {
            "TRIDENT_REGISTER": self.register_at,
            "TRIDENT_REGISTER_TOKEN_FILE": self.token_file,
            "TRIDENT_REGISTER_POOL": self.pool,
            "TRIDENT_DRAIN_S": f"{self.drain_s:g}",
            **self.environ,
        }


def application(arguments: dict[str, Any]) -> Any:
    """Return the Serve application of ServerArguments. Raises InvalidArgument, NotFound, EngineFailed."""
    from ray import serve

    from cluster.ray.replica import TritonReplica

    server = checked(arguments)
    return serve.deployment(TritonReplica).options(**options(server, manifest.load(server.folder))).bind(
        server.root, server.python, server.engine, server.variables(), server.orphan_s
    )  # fmt: skip


def checked(arguments: Mapping[str, Any]) -> ServerArguments:
    """Return the arguments of an application. Raises InvalidArgument for the first wrong one."""
    return toml_table.checked(ServerArguments, arguments, "args")


def options(server: ServerArguments, engine: EngineManifest) -> dict[str, Any]:
    """Return how Serve places, checks and stops the replicas of an engine."""
    gpus = int(engine.recipe.get("tp") or 1) * int(engine.recipe.get("pp") or 1) if engine.kind in GPU_KINDS else 0
    actor: dict[str, Any] = {"num_cpus": server.cpus, "num_gpus": gpus}
    if engine.memory_bytes:
        actor["memory"] = engine.memory_bytes
    return {
        "ray_actor_options": actor,
        "health_check_period_s": 2,
        "health_check_timeout_s": 10,
        "graceful_shutdown_wait_loop_s": 0.01,  # before the stop; no request of ours is known to Serve
        "graceful_shutdown_timeout_s": server.drain_s + BEYOND_DRAIN_S,
        "max_surge_percent": 100,  # new ones first
        "max_constructor_retry_count": 3,
    }


def configuration(
    server: ServerArguments, least: int, most: int, gateways: list[str], scaling: str = ""
) -> dict[str, Any]:
    """Return fleet.yaml's configuration of Serve with these arguments. least, most: replicas. gateways: their metrics
    pages, for the policy. scaling: file of its rules; "": the defaults."""
    config: dict[str, Any] = yaml.safe_load(FILE.read_text("utf-8"))
    [app] = config["applications"]
    app["args"] = server.model_dump(by_alias=True)
    [deployment] = app["deployments"]
    deployment["autoscaling_config"] |= {"min_replicas": least, "max_replicas": most}
    deployment["autoscaling_config"]["policy"]["policy_kwargs"] = {
        "gateways": gateways,
        "pool": server.pool,
        "config": scaling,
        "consoles": server.register_at,
        "token_file": server.token_file,
    }
    return config
