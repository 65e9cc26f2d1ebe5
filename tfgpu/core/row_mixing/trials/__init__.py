"""Trials: code of the user's runs on a few rows, at once and in parts, and what it does is compared."""
