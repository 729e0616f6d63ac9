"""``python -m evals``: run tasks against an OpenAI endpoint, compare results, judge, and gate; see ``--help``."""

import sys

from evals.command_line import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
