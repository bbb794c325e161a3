"""A draft that goes into service is loaded by a server that runs, and taken back where it accepts less than before."""
