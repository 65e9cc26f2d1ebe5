"""Text as bytes or tokens, and sequences of unequal length as batches."""
