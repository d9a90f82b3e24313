"""Point clouds and graphs: the order of points along a curve, and neighbours among them."""
