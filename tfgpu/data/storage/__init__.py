"""Files in object stores and on web servers, read by blocks that a disk cache keeps."""
