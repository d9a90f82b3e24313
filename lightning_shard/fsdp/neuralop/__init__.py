"""neuraloperator's spectral layers: weights split over the domain, no whole fields."""
