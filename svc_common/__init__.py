"""What both services share: serving, who may call what, settings, logs, metrics, and starting them."""
