"""Acceptance of drafts on servers in production: counters, a series per server, and its comparison. Torch-free."""
