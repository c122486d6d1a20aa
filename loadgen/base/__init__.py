"""What everything else uses: documents, numbers in words, headers, child processes."""
