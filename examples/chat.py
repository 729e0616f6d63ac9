"""Hold a conversation: the client keeps the history and sends it with every turn.

python -m examples.chat [HOST:PORT]
"""

import sys

from clients import Client

TURNS = ("What is a list?", "And a tuple?")


def main(url: str | None) -> None:
    messages = [{"role": "system", "content": "Answer in one sentence."}]
    with Client(url) as client:
        for turn in TURNS:
            messages.append({"role": "user", "content": turn})
            completion = client.generate(messages=messages, max_tokens=24).complete()
            messages.append({"role": "assistant", "content": completion.text})
            print(f"user: {turn}\nassistant: {completion.text}")
    print(f"[{len(messages)} messages]")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
