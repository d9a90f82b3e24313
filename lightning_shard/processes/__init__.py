"""Says which processes there are, how they meet, and how they fail together."""
