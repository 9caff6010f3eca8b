"""Every configuration of bench.isolated and every peer in one run, and a report of what came of it."""
