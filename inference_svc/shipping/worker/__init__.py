"""The worker's side of shipping: it fills extents, hands them to shippers and gets them back."""
