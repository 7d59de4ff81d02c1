"""Which sample comes next: epoch orders, and how they are cut into steps and micro-batches.

An order is a pure function of the sampler's fields, the items, the epoch and the loss history.
"""
