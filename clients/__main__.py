"""``python -m clients``"""

import sys

from clients.command_line import main

sys.exit(main())
