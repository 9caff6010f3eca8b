"""Tensors that users send: vectors, sparse autoencoders, lens maps; and the checks of their numbers."""
