"""What Prometheus can ask the load generator: what it does now, and what its runs found. Nothing here is measured for a
verdict: results come from raw samples alone."""
