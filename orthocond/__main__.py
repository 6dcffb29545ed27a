"""``python -m orthocond`` is the command `orthocond`."""

from orthocond._ending import leave
from orthocond.cli import main

leave(main())
