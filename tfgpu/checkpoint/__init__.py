"""What a training saves, and how it resumes."""
