"""The same requests under several policies or settings."""
