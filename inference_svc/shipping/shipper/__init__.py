"""The shipper's half of shipping: a process that sends extents to the stores."""
