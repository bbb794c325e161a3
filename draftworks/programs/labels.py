"""The name under which a launcher shows the lines of a program that runs beside others. Torch-free."""

LABEL = "label"
"""Key of the name in the extras of Dagster Pipes."""
