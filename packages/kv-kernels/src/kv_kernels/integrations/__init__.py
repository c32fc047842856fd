"""Ties to other libraries, one module each; importing this package loads none of them."""
