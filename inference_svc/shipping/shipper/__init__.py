"""The shipper: a process that sends extents to the stores."""
