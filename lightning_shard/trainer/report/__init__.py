"""Writes report.html: one page about a run, with everything it shows inside of it."""
