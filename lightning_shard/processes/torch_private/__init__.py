"""torch's private names and missing types, which all rooms may import."""
