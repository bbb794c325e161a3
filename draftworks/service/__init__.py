"""Which draft the servers of a target use: the record, its replacement, the rule of promotion. Torch-free."""
