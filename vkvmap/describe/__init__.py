"""Look at a mapping before trusting it: what a move costs and why, and pictures of pages."""
