"""One object that operators deploy: a draft with its flags, its promise and its origin, as an OCI layout or a folder."""
