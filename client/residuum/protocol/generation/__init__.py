"""What belongs to generation: uploads of vectors and encoders, events of a reply, logit lens, patch sweeps. No I/O."""
