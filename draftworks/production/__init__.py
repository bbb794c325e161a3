"""What servers in production accept of their drafts: counters, a series per server, and its comparison. Torch-free."""
