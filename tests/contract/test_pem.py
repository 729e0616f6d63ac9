"""PEM files that settings name: usable ones pass, others are refused with the setting and the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from contract import pem
from contract.errors import InvalidArgument

CERTIFICATES = Path(__file__).parents[1] / "clients" / "certificates"
CA, CERT, KEY = (CERTIFICATES / name for name in ("ca.pem", "server.pem", "server.key"))


def test_a_pair_and_an_authority_pass_and_so_does_nothing():
    pem.check_pair("CERT", CERT, KEY)
    pem.check_pair("CERT", None, None)
    pem.check_authority("CA", CA)
    pem.check_authority("CA", None)


@pytest.mark.parametrize(("cert", "key"), [(CA, KEY), (KEY, CERT), (CERT, CERT), (CERTIFICATES / "none", KEY)])
def test_a_certificate_with_the_key_of_another_is_refused(cert: Path, key: Path):
    with pytest.raises(InvalidArgument, match=f"^CERT: must be a certificate with its key.*got {cert} and {key}$"):
        pem.check_pair("CERT", cert, key)


def test_a_file_without_a_certificate_is_no_authority():
    with pytest.raises(InvalidArgument, match=f"^CA: must be a certificate in PEM, got {KEY}$"):
        pem.check_authority("CA", KEY)
