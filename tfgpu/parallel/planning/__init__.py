"""Which layouts there are for a model and its devices, and what each needs: arithmetic, before anything runs."""
