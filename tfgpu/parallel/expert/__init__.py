"""Expert parallelism: each device of a group holds a part of the experts, to which the tokens of all are sent."""
