"""Which sample comes next: orders that are functions of (seed, epoch), and how they are cut into steps, ranks and micro-batches."""
