"""The same training in several frameworks; each peer runs in a process of its own."""
