"""Check the PEM files that settings name: TLS libraries report a wrong one late, and some as another fault."""

from __future__ import annotations

import ssl
from pathlib import Path

from contract.errors import InvalidArgument


def check_pair(setting: str, cert: str | Path | None, key: str | Path | None) -> None:
    """Raises InvalidArgument for a certificate, if there is one, that cannot be served with a key."""
    if cert is None:
        return
    try:
        # Without a password OpenSSL asks the terminal for one.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")
    except (OSError, ValueError) as exc:
        problem = f"must be a certificate with its key, in PEM and without a password, got {cert} and {key}"
        raise InvalidArgument(setting, problem) from exc


def check_authority(setting: str, path: str | Path | None) -> None:
    """Raises InvalidArgument for a file, if there is one, that has no certificate to trust."""
    if path is None:
        return
    try:
        ssl.create_default_context(cafile=path)
    except (OSError, ValueError) as exc:
        raise InvalidArgument(setting, f"must be a certificate in PEM, got {path}") from exc
