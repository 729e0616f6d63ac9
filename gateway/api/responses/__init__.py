"""The Responses API: OpenAI's /v1/responses over the same path as chats."""
