"""`python -m residuum`: runs the command `residuum` where it is not on the path."""

import sys

from residuum.cli import main

sys.exit(main())
