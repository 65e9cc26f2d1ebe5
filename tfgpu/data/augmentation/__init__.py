"""Augmentation of images: what each stage does, and how stages become one function of a batch."""
