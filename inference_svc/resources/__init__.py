"""Resources that running requests share: steering vectors, signs of random projections, and runs of rows."""
