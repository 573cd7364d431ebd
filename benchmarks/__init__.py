"""Measurements of the loss against its alternatives on the same device in the same run."""
