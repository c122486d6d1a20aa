"""What each probe found, computed from records alone."""
