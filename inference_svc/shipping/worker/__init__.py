"""The worker's half of shipping: extents are filled, handed out and taken back."""
