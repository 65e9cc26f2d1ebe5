"""What training changes: variables in shards, layer state, and copying it between workers."""
