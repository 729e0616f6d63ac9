"""Run an OpenAI batch through the gateway: python -m examples.batch [BASE_URL] [API_KEY]

The gateway needs TRIDENT_GATEWAY_BATCH_DB, the path of an SQLite file; without it there is no batch API.
"""

import json
import sys
import time

import openai

PROMPTS = ("def add(a, b):", "class Stack:", "import os")


def main(base_url: str, api_key: str) -> None:
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    model = client.models.list().data[0].id
    lines = []
    for number, prompt in enumerate(PROMPTS):
        body = {"model": model, "prompt": prompt, "max_tokens": 8}
        lines.append({"custom_id": f"line-{number}", "method": "POST", "url": "/v1/completions", "body": body})
    data = "\n".join(json.dumps(line) for line in lines).encode()
    file = client.files.create(file=("prompts.jsonl", data), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        time.sleep(0.2)
        batch = client.batches.retrieve(batch.id)
    print(f"{batch.status}: {batch.request_counts.completed} of {batch.request_counts.total}")
    for line in client.files.content(batch.output_file_id).text.splitlines():
        result = json.loads(line)
        print(f"{result['custom_id']}: {result['response']['body']['choices'][0]['text']!r}")


if __name__ == "__main__":
    address = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:9000/v1"
    main(address, sys.argv[2] if len(sys.argv) > 2 else "none")
