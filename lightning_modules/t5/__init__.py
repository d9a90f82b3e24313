"""Summarization with T5."""
