"""HTTP servers as processes, and a client for them that costs little."""
