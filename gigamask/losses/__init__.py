"""How wrong a round is: focal and dice per mask, the IoU head's regression, and the objective that weighs them into sums and counts.

Not here: dividing by the count of masks (`train.step`), scores of an evaluation (`evaluate`).
"""
