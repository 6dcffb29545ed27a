"""``python -m orthocond`` is the command `orthocond`."""

import sys

from orthocond.cli import main

sys.exit(main())
