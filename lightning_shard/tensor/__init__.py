"""DomainTensor: a tensor split over ranks, as users see it."""
