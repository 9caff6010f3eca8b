"""What the server says about its model, and attention weights computed with it."""
