import json

from benchmarks.gateway import scripted_openai


def test_an_event_is_one_chunk_of_the_body():
    size, _, rest = scripted_openai.chunk({"content": "a"}, "length").partition(b"\r\n")
    data = rest[: int(size, 16)]
    assert rest[int(size, 16) :] == b"\r\n" and data.endswith(b"\n\n")
    [choice] = json.loads(data.removeprefix(b"data: "))["choices"]
    assert choice["delta"] == {"content": "a"} and choice["finish_reason"] == "length"
