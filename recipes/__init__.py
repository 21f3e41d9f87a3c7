"""The command line, one YAML ladder per method, minimal scripts to read, plots and benchmarks."""
