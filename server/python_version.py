"""Script that fails, before anything is installed, if the Python that runs it cannot serve."""

import sys

# Triton's Python stub exists for 3.8 to 3.13 and needs numpy < 2, whose newest release supports 3.10 to 3.12.
OLDEST, NEWEST = (3, 10), (3, 12)


def problem(version):
    # type: (tuple[int, int]) -> str | None
    """Return an error message, or None if ``version`` (major, minor) is supported."""
    if OLDEST <= version <= NEWEST:
        return None
    return (
        # No f-string: Python 2 must be able to read this file to print it.
        "Trident needs Python 3.10, 3.11 or 3.12, because Triton's Python stub needs numpy < 2; got {}.{}. "
        "Choose another one: make setup PYTHON=python3.11".format(*version)  # noqa: UP032
    )


if __name__ == "__main__":
    sys.exit(problem(sys.version_info[:2]))
