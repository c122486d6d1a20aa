"""The named conditions under which a comparison means something."""
