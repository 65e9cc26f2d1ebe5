"""Image augmentation: the stages, and how they are combined into one function of a batch."""
