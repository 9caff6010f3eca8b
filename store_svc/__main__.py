"""Run the store service: `python -m store_svc`."""

import sys

from svc_common.logs import quiet_grpc

if __name__ == "__main__":
    quiet_grpc()
    from store_svc.server import main  # imports grpc, so it must follow quiet_grpc()

    sys.exit(main(sys.argv[1:]))
