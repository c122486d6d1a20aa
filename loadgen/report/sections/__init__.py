"""What a report says: each function makes one section of a result, or None where the result has nothing of it."""
