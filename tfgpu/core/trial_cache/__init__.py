"""What trials have found, kept in the user's cache folder: a second run does not repeat them."""
