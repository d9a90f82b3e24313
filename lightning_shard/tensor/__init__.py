"""Shows users the `DomainTensor`, a tensor that is split over ranks."""
