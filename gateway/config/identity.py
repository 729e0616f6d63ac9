"""Section [identity]: the issuers whose tokens callers may send, and as whom they call then.

docs/identity.md shows files for common providers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from gateway.config.rules import NAME, Name, Rules

_Seconds = Annotated[float, Field(gt=0, le=30 * 86_400)]
_Url = Annotated[str, Field(pattern=r"^https?://[^\s/?#]+[^\s?#]*$", max_length=2000)]
_Text = Annotated[str, Field(min_length=1, max_length=1000)]
_SPACED = ("scope", "scp")  # claims whose text is a list with blanks between
# Signatures by a key that the gateway does not have: with a shared secret, or none, it could make tokens by itself.
Algorithm = Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "Ed25519", "EdDSA"]


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


def expanded(path: str | Path) -> Path:
    """Return a path with its home folder in place of ~. Raises ValueError for one that no file can have."""
    if "\0" in str(path):
        raise ValueError("it has a NUL")
    try:
        return Path(path).expanduser()
    except RuntimeError as exc:  # there is no such user
        raise ValueError(str(exc)) from None


def _path(value: Any) -> Any:
    try:
        return expanded(value) if isinstance(value, str) else value
    except ValueError as exc:
        raise ValueError(f"must be a path that a file can have, got {value!r:.200}: {exc}") from None


def _fixed(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


ExpandedPath = Annotated[Path, BeforeValidator(_path)]
_Texts = Annotated[tuple[_Text, ...], BeforeValidator(_listed), Field(min_length=1, max_length=100)]


class ClaimRule(Rules):
    """Finds texts in the claims of a token.

    claim: its name, with dots between the names of nested ones; a list has several texts, so has ``scope``.
    prefix: only texts that begin so count, without it.
    equals: only these texts count.
    """

    claim: _Text
    prefix: str = ""
    equals: Annotated[tuple[_Text, ...], BeforeValidator(_listed)] = ()

    def find(self, claims: Mapping[str, Any]) -> list[str]:
        """Return the texts, in their order."""
        found = _value(claims, self.claim)
        if isinstance(found, str) and self.claim in _SPACED:
            found = found.split()
        texts = [_text(one) for one in (found if isinstance(found, list) else [found])]
        kept = [text.removeprefix(self.prefix) for text in texts if text.startswith(self.prefix)]
        return [text for text in kept if text and (not self.equals or text in self.equals)]


class LevelRule(ClaimRule):
    """Gives the name of a level: ``name``, or the first text of a claim, as ``names`` call it where it is there."""

    claim: str = ""
    name: Annotated[str, Field(pattern=f"^$|{NAME}")] = ""
    names: Mapping[_Text, str] = {}

    @model_validator(mode="after")
    def _one(self) -> LevelRule:
        if bool(self.claim) == bool(self.name):
            raise ValueError('must be a text, or a table with claim, such as { claim = "groups" }')
        return self

    def first(self, claims: Mapping[str, Any]) -> str:
        """Return the name; "" where the claims have none."""
        found = [self.name] if self.name else self.find(claims)
        return self.names.get(found[0], found[0]) if found else ""


_Level = Annotated[LevelRule, BeforeValidator(_fixed)]


class IssuerRules(Rules):
    """One issuer of tokens.

    issuer: the ``iss`` of its tokens; its OpenID discovery document is below it, and tells where its keys are unless
        jwks_url or jwks_file does. audience: one of these must be an ``aud`` of a token.
    org, team, key: the levels of the caller. Without org, the team's text is ORG/TEAM.
    """

    issuer: _Url
    audience: _Texts
    algorithms: Annotated[tuple[Algorithm, ...], BeforeValidator(_listed), Field(min_length=1)] = ("RS256", "ES256")
    jwks_url: _Url | None = None
    jwks_file: ExpandedPath | None = None
    ca_file: ExpandedPath | None = None
    org: _Level | None = None
    team: _Level | None = None
    key: _Level = LevelRule(claim="sub")
    operators: ClaimRule | None = None
    org_admins: ClaimRule | None = None
    team_admins: ClaimRule | None = None

    @model_validator(mode="after")
    def _together(self) -> IssuerRules:
        if self.jwks_url and self.jwks_file:
            raise ValueError("must have jwks_url or jwks_file, not both")
        if self.team is None and (self.org is not None or self.operators is None):
            raise ValueError("must have a rule team; only an issuer of nothing but operators has none")
        return self


class IdentityRules(Rules):
    """issuers: by a name that the names of their callers begin with. refetch_s: anybody can send unknown key ids."""

    issuers: Mapping[Name, IssuerRules] = {}
    default_team: Annotated[str, Field(pattern=r"^([A-Za-z0-9][\w.-]{0,63}/[A-Za-z0-9][\w.-]{0,63})?$")] = ""
    leeway_s: Annotated[float, Field(ge=0, le=600)] = 60.0
    refresh_s: _Seconds = 300.0
    refetch_s: _Seconds = 10.0
    max_age_s: _Seconds = 86_400.0
    cache_s: Annotated[float, Field(ge=0, le=3600)] = 60.0

    @field_validator("issuers")
    @classmethod
    def _different(cls, issuers: Mapping[str, IssuerRules]) -> Mapping[str, IssuerRules]:
        named = [rules.issuer for rules in issuers.values()]
        for issuer in named:
            if named.count(issuer) > 1:
                raise ValueError(f"must have different issuers, got {issuer} twice; one may have several audiences")
        return issuers


def level_name(text: str) -> str | None:
    """Return a text of a claim as the name of an organisation or a team; None if it cannot be one."""
    return text if re.fullmatch(NAME, text) else None


def _value(claims: Any, path: str) -> Any:
    """Return the claim at a path; None if there is none. A name may have dots itself."""
    if not isinstance(claims, Mapping):
        return None
    if path in claims:
        return claims[path]
    for dot in (place for place, letter in enumerate(path) if letter == "."):
        if path[:dot] in claims:
            found = _value(claims[path[:dot]], path[dot + 1 :])
            if found is not None:
                return found
    return None


def _text(value: Any) -> str:
    """Return a text, number or truth value as a text; "" for anything else."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, (str, int)) else ""
