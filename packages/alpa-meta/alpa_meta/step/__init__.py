"""What a step is: arguments, trace, roles of inputs, phases, the program of one microbatch."""
