"""What running requests share: steering vectors, signs of projections, and rows of memory."""
