"""Handle errors by type, and set how requests are retried: python -m examples.errors_and_retries [HOST:PORT]"""

import sys

from clients import NO_RETRY, Client, RetryPolicy
from contract.errors import InvalidArgument, Overloaded, TridentError, Unavailable


def describe(error: TridentError) -> str:
    if isinstance(error, InvalidArgument):
        return f"fix the request: {error.field}"
    if isinstance(error, Overloaded | Unavailable):
        return f"retry after {error.retry_after_s or 1:g} s"
    return f"{type(error).__name__}, {'retryable' if error.retryable else 'not retryable'}"


def main(url: str | None) -> None:
    # Up to 6 attempts, 0.1 s, 0.2 s, ... apart at most; only before the first token, never after it.
    with Client(url, retry=RetryPolicy(attempts=6, base_s=0.1, cap_s=2.0)) as client:
        print(f"text: {client.complete('x = ', max_tokens=4).text!r}")
        for arguments in ({"max_tokens": 0}, {"temperature": -1.0}, {"temprature": 0.5}):
            try:
                client.complete("x = ", **arguments)
            except TridentError as error:
                print(f"{error}\n  -> {describe(error)}")
    with Client("127.0.0.1:1", retry=NO_RETRY) as client:  # no server listens there
        try:
            client.complete("x = ", timeout_s=10)
        except TridentError as error:
            print(f"Unavailable: {type(error) is Unavailable}\n  -> {describe(error)}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
