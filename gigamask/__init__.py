"""gigamask trains Segment Anything from scratch, from SA-1B's tars.

Floors: a module imports strictly lower floors, and rooms on one floor do not import each other.
0 faults, draws, geometry; 1 contracts, seams; 2 data, samplers, model, prompts, losses, parallel;
3 prepare, train, predict; 4 evaluate; 5 recipes; 6 cli, follow.
"""

__version__ = "0.1.0"
