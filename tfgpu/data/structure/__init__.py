"""Examples with numbers to predict, named inputs and targets, or sample weights."""
