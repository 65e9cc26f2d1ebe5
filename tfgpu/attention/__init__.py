"""Attention whose memory grows with the length of a sequence, not with its square."""
