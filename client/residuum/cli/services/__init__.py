"""The commands that start services and the page, ask for their state, and create tokens."""
