"""What a compiled step reads: whole batches, or this worker's rows of them."""
