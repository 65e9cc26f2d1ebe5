"""One order and one draw per row, whatever the number of replicas."""
