"""`python -m store_svc`."""

import sys

from svc_common.logs import quiet_grpc

if __name__ == "__main__":
    quiet_grpc()
    from store_svc.server import main  # which imports grpc

    sys.exit(main(sys.argv[1:]))
