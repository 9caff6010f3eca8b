"""The tables and sentences that `bench.readme` makes from results of benchmarks, as Markdown."""
