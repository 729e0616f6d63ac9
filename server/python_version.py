"""Refuses a Python that cannot serve, before anything is installed: run as a script, with the Python to be used."""

import sys

# The server's Python stub exists for 3.8 to 3.13 and needs numpy < 2, whose newest release supports 3.10 to 3.12.
OLDEST, NEWEST = (3, 10), (3, 12)


def problem(version):
    """A sentence, or None when ``version`` (major, minor) will do."""
    if OLDEST <= version <= NEWEST:
        return None
    return (
        # No f-string: Python 2 must be able to read this file to print it.
        "Trident needs Python 3.10, 3.11 or 3.12, because the server's Python stub needs numpy < 2; this is "
        "{}.{}. Name another one: make setup PYTHON=python3.11".format(*version)  # noqa: UP032
    )


if __name__ == "__main__":
    sentence = problem(sys.version_info[:2])
    if sentence:
        sys.exit(sentence)
