"""Run the store service: `python -m store_svc`. With `restore`, make its database again from an archive."""

import sys

from svc_common.early_end import end_at_sigterm, end_with_starter
from svc_common.logs import quiet_grpc

if __name__ == "__main__":
    quiet_grpc()
    arguments = sys.argv[1:]
    # Both import grpc, so they must follow quiet_grpc().
    if arguments[:1] == ["restore"]:
        from store_svc.archive.restore import main

        arguments = arguments[1:]
    else:
        end_at_sigterm()
        end_with_starter()
        from store_svc.server import main
    sys.exit(main(arguments))
