"""Which sample comes next: orders that are functions of (items, epoch, ledger), and how they are cut into steps, ranks and micro-batches."""
