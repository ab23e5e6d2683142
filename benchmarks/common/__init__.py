"""What all benchmarks share: percentiles, reports, plots, and what the machine allows."""
