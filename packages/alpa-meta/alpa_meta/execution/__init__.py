"""From a plan to running tasks: what each mesh runs, how results meet, the compiled step."""
