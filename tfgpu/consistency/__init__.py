"""Whether what must be equal is equal: between replicas, between workers, and between two runs."""
