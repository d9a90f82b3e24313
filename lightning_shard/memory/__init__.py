"""Keeps a field, or what autograd saves of it, in less memory than it needs on one device."""
