"""The throughput of shipping and the store, compared with Arrow Flight, plain TCP and protobuf's stubs."""
