"""BatchNormalization's moments over all replicas, and how layers share the collectives for them."""
