"""The benchmarks: one program per claim, each measured side by side with what it is compared to."""
