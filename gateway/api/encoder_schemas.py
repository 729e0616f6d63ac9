"""The bodies of /v1/embeddings, /v1/rerank and /v1/score, and the rows that they ask to encode."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, StrictBool, StrictInt, StrictStr, WithJsonSchema

from clients.wire.encoder_call import Rows
from contract.errors import InvalidArgument
from gateway.api.strict_model import WHOLE, StrictModel

MAX_INPUTS = 2048  # OpenAI's limit
MAX_QUERY = 65_536  # characters of a text that is paired with many
_Id = Annotated[StrictInt, Field(ge=0, lt=2**31), WHOLE]
_Text = Annotated[StrictStr, Field(min_length=1)]
_Ids = Annotated[list[_Id], Field(min_length=1, fail_fast=True)]


def _check_count(value: Any) -> Any:
    if isinstance(value, list) and len(value) > MAX_INPUTS and not isinstance(value[0], int):
        raise ValueError(f"must have at most {MAX_INPUTS} entries, got {len(value)}")
    return value


_COUNT = BeforeValidator(_check_count)
_ONE_OR_MORE = {"anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "minItems": 1, "maxItems": MAX_INPUTS,
                "items": {"type": "string", "minLength": 1}}]}  # fmt: skip
_TextOrTexts = Annotated[
    _Text | Annotated[list[_Text], Field(min_length=1, fail_fast=True)], _COUNT, WithJsonSchema(_ONE_OR_MORE)
]
_Truncate = Annotated[StrictInt, Field(ge=-1, lt=2**31), WHOLE]


class _EncoderRequest(StrictModel):
    """The fields that all share. truncate_prompt_tokens: as vLLM has it; -1 for the model's limit.

    operation: in metrics. capability: that the model needs. main_field: named by errors about the whole input.
    """

    operation: ClassVar[str]
    capability: ClassVar[str]
    main_field: ClassVar[str]
    model: StrictStr
    user: StrictStr | None = None  # accepted and not stored
    truncate_prompt_tokens: _Truncate | None = None


class EmbeddingsRequest(_EncoderRequest):
    """The body of POST /v1/embeddings. prompt_name: one of the model's own prompts, put before each text."""

    operation, capability, main_field = "embeddings", "embeddings", "input"
    input: Annotated[
        _Text
        | Annotated[list[_Text], Field(min_length=1, fail_fast=True)]
        | _Ids
        | Annotated[list[_Ids], Field(min_length=1, fail_fast=True)],
        _COUNT,
    ]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[StrictInt, Field(ge=1, lt=2**31), WHOLE] | None = None
    prompt_name: Annotated[StrictStr, Field(min_length=1, max_length=128)] | None = None

    def rows(self) -> Rows:
        """Return a row for each input. Raises InvalidArgument."""
        given = self.input
        texts: tuple[str, ...] = ()
        ids: tuple[tuple[int, ...], ...] = ()
        if isinstance(given, str):
            texts = (given,)
        elif isinstance(given[0], str):
            texts = tuple(text for text in given if isinstance(text, str))
        elif isinstance(given[0], int):
            ids = (tuple(token for token in given if isinstance(token, int)),)
        else:
            ids = tuple(tuple(row) for row in given if isinstance(row, list))
        if ids and self.prompt_name is not None:
            raise InvalidArgument("prompt_name", "must be left out with token ids, which have no prompt")
        return Rows(texts, (), ids, self.prompt_name or "", self.dimensions, self.truncate_prompt_tokens)

    def field(self, name: str, row: int) -> str:
        """Return the field of this body that an encoder's error about an input names."""
        return "input" if isinstance(self.input, str) or isinstance(self.input[0], int) else f"input[{row}]"


class Document(StrictModel):
    """A document as an object, as Cohere's and Jina's clients may send it."""

    text: _Text


class RerankRequest(_EncoderRequest):
    """The body of POST /v1/rerank, in Cohere's and Jina's form."""

    operation, capability, main_field = "rerank", "rerank", "documents"
    query: Annotated[StrictStr, Field(min_length=1, max_length=MAX_QUERY)]
    documents: Annotated[list[_Text | Document], Field(min_length=1, fail_fast=True), _COUNT]
    top_n: Annotated[StrictInt, Field(ge=1, lt=2**31), WHOLE] | None = None
    return_documents: StrictBool | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(document if isinstance(document, str) else document.text for document in self.documents)

    def rows(self) -> Rows:
        """Return a pair of the query and each document."""
        texts = self.texts
        return Rows((self.query,) * len(texts), texts, truncate=self.truncate_prompt_tokens)

    def field(self, name: str, row: int) -> str:
        """See EmbeddingsRequest.field."""
        return "query" if name == "text_input" else f"documents[{row}]"


class ScoreRequest(_EncoderRequest):
    """The body of POST /v1/score, in vLLM's form: pairs, or one text with each of several."""

    operation, capability, main_field = "score", "rerank", "text_1"
    text_1: _TextOrTexts
    text_2: _TextOrTexts

    def rows(self) -> Rows:
        """Return the pairs. Raises InvalidArgument."""
        first, second = ([text] if isinstance(text, str) else text for text in (self.text_1, self.text_2))
        if len(first) == 1:
            if len(second) > 1 and len(first[0]) > MAX_QUERY:
                raise InvalidArgument("text_1", f"must have at most {MAX_QUERY} characters with several text_2")
            first = first * len(second)
        if len(first) != len(second):
            problem = f"must be one text or as many as text_2, {len(second)}, got {len(first)}"
            raise InvalidArgument("text_1", problem)
        return Rows(tuple(first), tuple(second), truncate=self.truncate_prompt_tokens)

    def field(self, name: str, row: int) -> str:
        """See EmbeddingsRequest.field."""
        own, value = ("text_1", self.text_1) if name == "text_input" else ("text_2", self.text_2)
        return own if isinstance(value, str) or len(value) == 1 else f"{own}[{row}]"


BODIES: dict[str, type[EmbeddingsRequest] | type[RerankRequest] | type[ScoreRequest]] = {
    "/v1/embeddings": EmbeddingsRequest,
    "/v1/rerank": RerankRequest,
    "/v1/score": ScoreRequest,
}
