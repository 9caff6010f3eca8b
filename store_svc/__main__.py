"""`python -m store_svc`."""

import sys

from store_svc.server import main

sys.exit(main(sys.argv[1:]))
