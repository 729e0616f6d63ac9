"""Tells whether a text is in an EBNF grammar of the form that python_backends/grammar writes: a second opinion."""

from __future__ import annotations

import re
from functools import cache

_TOKEN = re.compile(
    r"""\s*(?:(?P<text>"(?:\\.|[^"\\])*")|(?P<set>\[(?:\\.|[^\]\\])*\])|(?P<rule>\w+)|(?P<count>\{\d+(?:,\d*)?\})"""
    r"""|(?P<mark>::=|[()|*+?]))"""
)
_CHARACTER = re.compile(r"\\u[0-9a-f]{4}|\\U[0-9a-f]{8}|[^\\]", re.DOTALL)


def _characters(text: str) -> list[int]:
    return [int(part[2:], 16) if part[0] == "\\" else ord(part) for part in _CHARACTER.findall(text)]


class Matcher:
    """One grammar."""

    def __init__(self, ebnf: str) -> None:
        self._rules = {}
        for line in ebnf.splitlines():
            name, _, body = line.partition(" ::= ")
            self._tokens = [(m.lastgroup, m.group(m.lastgroup)) for m in _TOKEN.finditer(body)]
            assert "".join(token for _, token in self._tokens).replace(" ", "") == _bare(body), line
            self._rules[name] = self._choice()
            assert not self._tokens

    def _choice(self):
        parts = [self._row()]
        while self._tokens and self._tokens[0] == ("mark", "|"):
            self._tokens.pop(0)
            parts.append(self._row())
        return ("choice", tuple(parts))

    def _row(self):
        parts = []
        while self._tokens and self._tokens[0] not in (("mark", "|"), ("mark", ")")):
            kind, token = self._tokens.pop(0)
            if kind == "text":
                node = ("text", "".join(map(chr, _characters(token[1:-1]))))
            elif kind == "set":
                node = ("set", self._set(token[1:-1]))
            elif kind == "rule":
                node = ("rule", token)
            else:
                assert token == "(", token
                node = self._choice()
                assert self._tokens.pop(0) == ("mark", ")")
            parts.append(self._repeated(node))
        return ("row", tuple(parts))

    def _repeated(self, node):
        if not self._tokens:
            return node
        kind, token = self._tokens[0]
        if kind == "count":
            low, comma, high = token[1:-1].partition(",")
            most = None if comma and not high else int(high or low)
            self._tokens.pop(0)
            return ("repeat", node, int(low), most)
        if kind == "mark" and token in "*+?":
            self._tokens.pop(0)
            return ("repeat", node, int(token == "+"), 1 if token == "?" else None)
        return node

    @staticmethod
    def _set(text):
        points, ranges, at = _characters(text), [], 0
        raw = _CHARACTER.findall(text)
        while at < len(points):
            if at + 2 < len(points) and raw[at + 1] == "-":
                ranges.append((points[at], points[at + 2]))
                at += 3
            else:
                ranges.append((points[at], points[at]))
                at += 1
        return tuple(ranges)

    def matches(self, text: str) -> bool:
        """Whether the whole text is in the grammar."""

        @cache
        def ends(node, at):
            kind = node[0]
            if kind == "text":
                return frozenset([at + len(node[1])]) if text.startswith(node[1], at) else frozenset()
            if kind == "set":
                inside = at < len(text) and any(low <= ord(text[at]) <= high for low, high in node[1])
                return frozenset([at + 1]) if inside else frozenset()
            if kind == "rule":
                return ends(self._rules[node[1]], at)
            if kind == "choice":
                return frozenset().union(*(ends(part, at) for part in node[1]))
            if kind == "row":
                places = frozenset([at])
                for part in node[1]:
                    places = frozenset().union(*(ends(part, place) for place in places))
                return places
            _, item, least, most = node
            places, reached, count = frozenset([at]), frozenset([at]) if least == 0 else frozenset(), 0
            while places and (most is None or count < most):
                places = frozenset().union(*(ends(item, place) for place in places))
                count += 1
                if count >= least:
                    if most is None and places <= reached:
                        break
                    reached |= places
            return reached

        return len(text) in ends(self._rules["root"], 0)

    def sample(self, rng) -> str:
        """A random text of the grammar, short where the grammar lets it be."""
        heights = {name: float("inf") for name in self._rules}
        for _ in self._rules:
            heights = {name: 1 + self._height(node, heights) for name, node in self._rules.items()}
        return self._sampled(self._rules["root"], heights, rng, 12)

    def _height(self, node, heights):
        kind = node[0]
        if kind == "rule":
            return heights[node[1]]
        if kind == "choice":
            return min(self._height(part, heights) for part in node[1])
        if kind == "row":
            return max((self._height(part, heights) for part in node[1]), default=0)
        return self._height(node[1], heights) if kind == "repeat" and node[2] else 0

    def _sampled(self, node, heights, rng, depth):
        kind = node[0]
        if kind == "text":
            return node[1]
        if kind == "set":
            low, high = rng.choice(node[1])
            return chr(rng.randint(low, min(high, low + 60)))
        if kind == "rule":
            return self._sampled(self._rules[node[1]], heights, rng, depth - 1)
        if kind == "choice":
            least = min(self._height(part, heights) for part in node[1])
            ways = [part for part in node[1] if depth > 0 or self._height(part, heights) == least]
            return self._sampled(rng.choice(ways), heights, rng, depth)
        if kind == "row":
            return "".join(self._sampled(part, heights, rng, depth) for part in node[1])
        _, item, least, most = node
        high = least + 2 if most is None else min(most, least + 3)
        count = rng.randint(least, high) if depth > 0 else least
        return "".join(self._sampled(item, heights, rng, depth) for _ in range(count))


def _bare(body: str) -> str:
    return "".join(
        token if token[0] in '"[' else token.replace(" ", "")
        for token in re.findall(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|[^"\[]+', body)
    ).replace(" ", "")
