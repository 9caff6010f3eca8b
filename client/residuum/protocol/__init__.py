"""What is said to the services, and what their answers mean, without I/O: both clients use it."""
