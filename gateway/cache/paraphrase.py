"""Whether two prompts may be two ways of asking one thing: what an embedding cannot see.

Sentence embeddings are nearly blind to what a question turns on: "convert dollars to euros" and "convert euros to
dollars" are more alike to them (0.996) than most paraphrases are (docs/decisions/0014). So a prompt is taken down to
the words that carry it, in their order: courtesy and forms of asking that mean the same are left away. Of two prompts
each word must be the other's at the same place. Where one differs, both must be plain words that the model finds
equal in meaning; numbers, negations, names, quotations, code, prepositions and whatever has an opposite never are.
Every doubt is a "no": that costs a generation, a wrong "yes" is a wrong answer. The lists are English; in another
language hardly anything is taken for a paraphrase.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

MAX_EXCHANGES = 2

# What is asked with these has another answer tomorrow.
_OF_THE_MOMENT = re.compile(
    r"\b(?:today|tonight|tomorrow|yesterday|now(?:adays)?|current(?:ly)?|latest|newest|recent(?:ly)?|at the moment|"
    r"right away|these days|up[ -]to[ -]date|so far|what time|which day|what day|what date|"
    r"(?:this|next|last|past|coming) (?:second|minute|hour|morning|afternoon|evening|night|day|week|weekend|month|"
    r"quarter|season|year|decade|monday|tuesday|wednesday|thursday|friday|saturday|sunday)s?|ago|weather|forecast|"
    r"breaking|headlines?|news|random(?:ly)?|another|again|different one)\b",
    re.IGNORECASE,
)

_I = r"(?:i|you|we|one|someone|people)"
# (how it is asked, how it is asked in short), in this order, on lower and upper case.
_FORMS = tuple(
    (re.compile(pattern, re.IGNORECASE), short)
    for pattern, short in (
        (r"\b(can)(?:not|'t)\b", r"\1 not"),
        (r"\bwon't\b", "will not"),
        (r"n't\b", " not"),
        (r"\b(what|who|where|when|why|how|which|that|it|there|here|he|she)'s\b", r"\1 is"),
        (r"'re\b", " are"),
        (r"'m\b", " am"),
        (r"'ve\b", " have"),
        (r"'ll\b", " will"),
        (r"'d\b", " would"),
        (r"\bplease\b|\bkindly\b|\bthank you\b|\bthanks\b|^\W*(?:hi|hello|hey)(?: there)?\b\W*", " "),
        (r"^\W*(?:i (?:want|need|would like) to know|do you know|i wonder|i am wondering)\b", " "),
        (r"^\W*(?:can|could|would|will) you\s+(?=[a-z])", " "),
        (r"^\W*(?:tell|explain|describe|define)\b(?: to me| me)?(?: about)?", " what "),
        (r"^\W*(?:list|name|give|show)\b(?: me)?", " list "),
        (r"^\W*what are some\b", " list "),
        (rf"\b(?:what|which) (?:is|are) (?:the|a|some) (?:good )?(?:ways?|steps?) (?:for {_I} )?to\b", " how "),
        (rf"\bwhat (?:do|can|should|must) {_I} (?:have to |need to )?do to\b", " how "),
        (rf"\bhow (?:do|can|could|should|would|might|must) {_I}\b", " how "),
        (rf"\bhow {_I} (?:can|could|should|would|might)\b", " how "),
        (r"\bhow (?:many)\b|\b(?:what is |what was )?the number of\b", " count "),
        (r"\bhow tall\b", " height "),
        (r"\bhow old\b", " age "),
        (r"\bhow far\b", " distance "),
        (r"\bhow fast\b", " speed "),
        (r"\bhow (much|long|often|big|large|heavy|deep|wide|hot|cold)\b", r" how_\1 "),
        (rf"\bwhere (?:do|can|could|would) {_I} (?:find|see)\b", " where "),
        (r"\bwhere (is|are) (.+?) located\b", r"where \1 \2"),
        (r"\bwhat (?:is|are) the reasons?(?: why| that)?\b(?! for)", " why "),
        (r"\bwhat (?:does|do) (.+?) mean\b", r"what \1"),
        (r"\bwhom\b", "who"),
    )
)
_POSSESSIVE = re.compile(r"\b(\w+)'s? (\w+)\b(?=[^']|$)")
_TOKEN = re.compile(
    r"""\w+://\S+ | "[^"]+" | “[^”]+” | `+[^`]+`+ | \d+(?:[.,:/]\d+)*[!%°]? |
        \w+(?:['.\-@]\w+)* | [^\w\s]""",
    re.VERBOSE,
)
_VERBATIM = re.compile(r":\s|\n|```")  # what follows is the matter itself, not a question about it
_DECORATION = frozenset(".,?!;\"'")
_PRESENT, _PAST = frozenset("is are am do does has".split()), frozenset("was were did had".split())
_ASKED_BY = _PRESENT | _PAST
_DROPPED = _ASKED_BY - {"has", "had"} | frozenset(
    "a an the of to be been being what which some there our just really actually exactly then".split()
)
# Words that another one never stands for: they are small, or the other end of a scale, or one of a family of names.
_FIXED = frozenset(
    """
    no not never none nor neither nobody nothing nowhere without hardly barely rarely seldom except but only unless
    who whose when where why how list count can could should must may might will would shall
    i you me my mine your yours we us he him his she her hers it its they them their this that these those
    in on at by for from with into onto over under above below up down out off between among through during before
    after since until against about as like than via per and or if both either each every all any many much few less
    more most least fewer little several always often sometimes once twice ever again
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
    eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand million billion trillion
    dozen half third quarter first second fourth fifth sixth seventh eighth ninth tenth last next previous single
    double triple pair couple
    monday tuesday wednesday thursday friday saturday sunday january february march april june july august september
    october november december spring summer autumn winter morning noon afternoon evening night day week month year
    hour minute today tomorrow yesterday early late earlier later earliest latest old new young
    north south east west northern southern eastern western left right top bottom front back inside outside inner
    outer upper lower high low higher highest lowest
    red orange yellow green blue purple pink brown black white grey gray
    good bad better worse best worst big small bigger smaller biggest smallest large larger largest long short longer
    shorter longest shortest tall taller tallest fast slow faster slower heavy light hot cold warm cool dry wet hard
    soft easy difficult simple complex cheap expensive rich poor strong weak thick thin deep shallow wide narrow full
    empty safe dangerous true false right wrong odd even positive negative plus minus public private formal casual
    informal modern ancient male female healthy sick
    increase decrease rise fall raise lower gain lose add subtract multiply divide buy sell lend borrow give take get
    send receive push pull open close start stop begin end enter exit enable disable install uninstall connect
    disconnect lock unlock load save read write import export input output upload download encode decode encrypt
    decrypt create delete make destroy build break join leave win attack defend accept reject allow deny love hate
    like dislike remember forget learn teach ask answer live die wake sleep inhale exhale import export hire fire
    pass fail include exclude show hide zoom freeze thaw heat cool expand shrink merge split attach detach mount
    husband wife father mother son daughter brother sister uncle aunt nephew niece king queen prince princess man
    woman men women boy girl boys girls bull cow rooster hen employer employee teacher student doctor patient buyer
    seller debtor creditor parent child husband groom bride breakfast lunch dinner pros cons advantage disadvantage
    benefit drawback profit loss cause effect question problem solution asset liability credit debit maximum minimum
    latitude longitude horizontal vertical row column prefix suffix client server source target singular plural
    kilometer mile meter foot feet inch kilogram pound gram ounce liter gallon celsius fahrenheit kelvin
    """.split()
)


_VOWEL = re.compile("[aeiouy]")


@dataclass(frozen=True)
class Word:
    """A word that carries the prompt. fixed: no other word stands for it. ``stem`` is what inflection leaves."""

    text: str
    stem: str
    fixed: bool


@dataclass(frozen=True)
class Gist:
    """What a prompt asks: its words, and whether of the past ("was"), the present ("is") or both or neither."""

    words: tuple[Word, ...]
    present: bool
    past: bool


def of_the_moment(text: str) -> bool:
    """It asks for what is true only when it is asked, or for something else than the last time."""
    return _OF_THE_MOMENT.search(text) is not None


def gist(text: str) -> Gist:
    """The words that carry ``text``, in their order. Cheap: some 50 µs for a sentence."""
    text = unicodedata.normalize("NFC", text).replace("’", "'").strip()
    split = _VERBATIM.search(text)
    asked, verbatim = (text[: split.start()], text[split.start() :]) if split else (text, "")
    for pattern, short in _FORMS:
        asked = pattern.sub(short, asked)
    asked = _POSSESSIVE.sub(r"\2 of \1", asked)
    tokens = _TOKEN.findall(asked)
    lower = [token.lower() for token in tokens]
    words = [_word(token, begins=at == 0 or tokens[at - 1] in ".?!") for at, token in enumerate(tokens)]
    words = [word for word in words if word.text not in _DROPPED | _DECORATION]
    if lower and lower[0] in _ASKED_BY:  # "Is it …": a yes or a no, not what "it is" asks for
        words.insert(0, Word("whether", "whether", True))
    if verbatim:
        words.append(Word(verbatim, verbatim, True))
    return Gist(tuple(words), not _PRESENT.isdisjoint(lower), not _PAST.isdisjoint(lower))


def exchanged(one: Gist, other: Gist) -> tuple[tuple[str, str], ...] | None:
    """The pairs of words that must mean the same for the two prompts to do so; None if they cannot."""
    if len(one.words) != len(other.words) or not one.words:
        return None
    if (one.past and not one.present and other.present and not other.past) or (
        other.past and not other.present and one.present and not one.past
    ):
        return None
    pairs = []
    for a, b in zip(one.words, other.words, strict=True):
        if a.text == b.text or _inflected(a, b):
            continue
        if a.fixed or b.fixed or _look_alike(a.text, b.text) or len(pairs) == MAX_EXCHANGES:
            return None
        if a in other.words or b in one.words:  # "dollars to euros", "euros to dollars"
            return None
        pairs.append((a.text, b.text))
    return tuple(pairs)


def _word(token: str, *, begins: bool) -> Word:
    lower = token.lower()
    plain = token.isascii() and token.isalpha()
    name = token != lower and (not begins or token[1:] != lower[1:])
    stem = _stem(lower)
    return Word(lower if plain else token, stem, not plain or name or not _FIXED.isdisjoint((lower, stem, stem + "e")))


def _inflected(a: Word, b: Word) -> bool:
    """One word in two forms: "sort" and "sorting", "symptom" and "symptoms"; not "calling" and "called"."""
    both = {a.text[-3:], b.text[-3:]}
    return a.stem == b.stem and not ("ing" in both and any(end.endswith("ed") for end in both))


def _stem(word: str) -> str:
    for ending, shortest, instead in (("ies", 5, "y"), ("sses", 6, "ss"), ("s", 4, ""), ("ing", 6, ""), ("ed", 5, "")):
        if not word.endswith(ending) or len(word) < shortest or word.endswith(("ss", "us", "is")):
            continue
        if ending not in ("ing", "ed") or _VOWEL.search(word[: -len(ending)]):  # "string" is no form of "str"
            word = word[: -len(ending)] + instead
        break
    if len(word) > 4 and word[-1] == word[-2] and word[-1] not in "ls":
        word = word[:-1]  # "stopped", "stopping"
    return word[:-1] if len(word) > 4 and word[-1] == "e" else word


def _look_alike(a: str, b: str) -> bool:
    """They share a beginning or an end: "legal" and "illegal", "employer" and "employee" are no synonyms."""
    return a[:4] == b[:4] or a[-4:] == b[-4:]
