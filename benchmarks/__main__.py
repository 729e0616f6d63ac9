"""``python -m benchmarks``: measure a server or the gateway; see ``--help``."""

import sys

from benchmarks.child_process import adopt_orphans
from benchmarks.command_line import main

if __name__ == "__main__":  # the load generator's own processes import this module too
    adopt_orphans()
    sys.exit(main(sys.argv[1:]))
