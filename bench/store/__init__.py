"""What shipping and the store move, beside Arrow Flight, a bare TCP copy and protobuf's own stubs."""
