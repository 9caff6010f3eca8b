"""The arithmetic of probes, their smoothing and the format of their files; and when a rule fires."""
