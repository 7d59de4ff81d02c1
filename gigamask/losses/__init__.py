"""How wrong an answer is: that of a round of prompts, with the objective that weighs its losses; of a masked autoencoder; of a relevance network.

Not here: dividing by the count of masks (`train.step`), scores of an evaluation (`evaluate`).
"""
