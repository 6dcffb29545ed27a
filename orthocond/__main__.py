"""``python -m orthocond`` is the command `orthocond`."""

from orthocond._process import leave
from orthocond.cli import main

leave(main())
