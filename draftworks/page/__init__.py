"""The page of the fleet: one HTML file of what every draft promised, does in service, was made from and cost."""
