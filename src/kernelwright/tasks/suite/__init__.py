"""The built-in suite: one module per task in KernelBench's format, named after its file.

The first line of a module's docstring says its class, before the colon, and what bounds it. Sizes are small
enough for one CPU core: an eager forward takes about 0.3 to 30 ms. Inputs are signed and outputs depend on
all of them, so that no constant passes for a solution. `kernelwright.tasks.suites` reads the modules as text;
nothing imports them.
"""
