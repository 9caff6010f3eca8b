"""The commands that generate, steer and extract, and the flags that they share."""
