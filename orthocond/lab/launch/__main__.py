"""``python -m orthocond.lab.launch RUN [DATA]``: the process that trains one run."""

import sys

from orthocond._process import keep_freed_memory, leave
from orthocond.lab.launch.worker import main

keep_freed_memory()
leave(main(sys.argv[1:]))
