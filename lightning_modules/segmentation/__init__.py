"""A network like nnU-Net's, trained and applied on whole volumes that are split over ranks."""
