"""Text as bytes or tokens, and batches of variable-length sequences."""
