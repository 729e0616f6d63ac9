"""Settings of the scaler, from environment variables with the prefix TRIDENT_SCALER_."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from contract.environment import AbsolutePath, EnvironmentSettings, environment_config

Port = Annotated[int, Field(ge=0, le=65_535)]


class Settings(EnvironmentSettings):
    """Settings of one scaler. Raises InvalidArgument whose field is the environment variable."""

    model_config = environment_config("TRIDENT_SCALER_")

    gateways: str = Field(
        "http://127.0.0.1:9002/metrics",
        description="metrics pages of the gateways: URLs, joined by commas, or `dns:///NAME:PORT`, whose every address "
        "is a gateway",
    )
    config: str = Field("", description="TOML file of the rules (docs/scaling.md); unset: the defaults, for every pool")
    state: AbsolutePath | None = Field(None, description="file that keeps what was decided over a restart")
    interval_s: Annotated[float, Field(ge=0.01, le=600)] = Field(2.0, description="seconds between two readings")
    stale_s: Annotated[float, Field(ge=0.1, le=3600)] = Field(
        15.0, description="age in seconds from which a reading counts no more: then nothing is known"
    )
    consoles: str = Field(
        "",
        description="HTTP endpoints of the gateways whose /console shows the decisions: `HOST:PORT,HOST:PORT` or "
        "`dns:///NAME:PORT`; unset: none",
    )
    admin_token_file: AbsolutePath | None = Field(None, description="file with the gateways' token, for CONSOLES")
    host: str = Field("127.0.0.1", description="address of the external scaler and of the scaler's own metrics")
    grpc_port: Port = Field(9004, description="port of KEDA's external scaler; 0: a free one")
    metrics_port: Port = Field(9005, description="port of the scaler's own /metrics; 0: a free one")
