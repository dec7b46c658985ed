"""The commands: training, studies, benchmarks. The library imports none of them, users `explain`."""
