"""``python -m orthocond.lab.launch RUN [DATA]``: the process that trains one run."""

import sys

from orthocond.lab.launch.worker import main

sys.exit(main(sys.argv[1:]))
