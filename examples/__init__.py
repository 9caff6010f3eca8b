"""Programs that show residuum at work, through its public client alone."""
