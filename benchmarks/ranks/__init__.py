"""Parts of `benchmarks.tensor_parallel`, by what ranks say to each other."""
