"""`python -m residuum`: the command, where it is not on the path."""

import sys

from residuum.cli import main

sys.exit(main())
