"""Files in and out: whole or not at all, and nothing read here can execute code."""
