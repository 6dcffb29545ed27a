"""``python -m orthocond.lab.launch RUN [DATA]``: the process that trains one run."""

import sys

from orthocond._ending import leave
from orthocond.lab.launch.worker import main

leave(main(sys.argv[1:]))
