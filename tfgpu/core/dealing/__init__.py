"""Batches that Python makes on one worker for all: each worker gets its rows, over sockets between the workers."""
